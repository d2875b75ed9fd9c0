"""The `langchain-openai` package against the server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import GenerationChunk
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.api.conftest import Api
from tests.api.harness import MODEL, SAID, ids_of, make_tokenizer, until

TOKENS = len(ids_of(SAID)) + 1
"""Of `SAID`, with the end of sequence."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for all tests: the package keeps its connections from one client to the next."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


def chat(api: Api, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(**{**_options(api), "stream_usage": True, **options})


def text(api: Api, **options: Any) -> OpenAI:
    return OpenAI(**{**_options(api), "max_tokens": 100, **options})


def _options(api: Api) -> dict[str, Any]:
    return {"base_url": f"{api.url}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}


def prompts(api: Api) -> list[str]:
    """The prompts the engine has got, as text."""
    tokenizer = make_tokenizer()
    return [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in api.engine.seen]


def test_invoke(api: Api) -> None:
    answer = chat(api).invoke("Hello")
    assert isinstance(answer, AIMessage) and answer.content == SAID
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == TOKENS
    assert answer.usage_metadata["input_tokens"] == len(api.engine.seen[0].prompt)
    assert answer.usage_metadata["total_tokens"] == TOKENS + len(api.engine.seen[0].prompt)
    assert prompts(api) == ["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"]


def test_stream(api: Api) -> None:
    api.engine.cached = 4
    chunks = list(chat(api).stream("Hello"))
    assert len([chunk for chunk in chunks if chunk.content]) > 10
    whole = joined(chunks)
    assert whole.content == SAID
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == TOKENS
    assert whole.usage_metadata["input_token_details"]["cache_read"] == 4
    assert whole.usage_metadata == chat(api).invoke("Hello").usage_metadata


def test_async(api: Api, loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> tuple[AIMessage, AIMessageChunk, list[AIMessage]]:
        llm = chat(api)
        chunks = [chunk async for chunk in llm.astream("Hello")]
        return await llm.ainvoke("Hello"), joined(chunks), await llm.abatch([f"Hello {i}" for i in range(12)])

    answer, streamed, several = loop.run_until_complete(ask())
    assert answer.content == streamed.content == SAID
    assert [each.content for each in several] == [SAID] * 12
    assert answer.usage_metadata == streamed.usage_metadata
    assert sorted(prompts(api)[2:]) == sorted(
        f"<|im_start|>user\nHello {i}<|im_end|>\n<|im_start|>assistant\n" for i in range(12)
    )


def test_batch(api: Api) -> None:
    answers = chat(api, max_tokens=3).batch(["a", "b", "c"], config={"max_concurrency": 2})
    assert [answer.content for answer in answers] == ["Alpha beta, DEF"] * 3
    assert [answer.response_metadata["finish_reason"] for answer in answers] == ["length"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(api: Api, stream: bool) -> None:
    llm = chat(api, logprobs=True, top_logprobs=2)
    answer = joined(list(llm.stream("Hello"))) if stream else llm.invoke("Hello")
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == TOKENS
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == SAID
    assert [entry["token"] for entry in entries[0]["top_logprobs"]] == ["Alpha", " beta"]
    assert {entry["logprob"] for entry in entries} == {-0.25}


@pytest.mark.parametrize("stream", [False, True])
def test_stop(api: Api, stream: bool) -> None:
    bound = chat(api).bind(stop=["gamma", "End"])
    answer = joined(list(bound.stream("Hello"))) if stream else bound.invoke("Hello")
    assert answer.content == "Alpha beta, DEF " and answer.response_metadata["finish_reason"] == "stop"
    assert list(api.engine.seen[0].sampling.stop) == ["gamma", "End"]


def test_parameters_reach_the_engine(api: Api) -> None:
    llm = chat(
        api,
        temperature=0.5,
        top_p=0.75,
        seed=9,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={70: 5},
        max_tokens=2,
        extra_body={"top_k": 7, "min_p": 0.125, "ignore_eos": True},
    )
    llm.invoke("Hello")
    [request] = api.engine.seen
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 7, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (0.5, 0.25, {70: 5.0})
    assert (request.seed, request.max_tokens, request.eos_ids) == (9, 2, ())


def test_a_conversation_with_tools_in_its_history(api: Api) -> None:
    call = {"name": "weather", "args": {"city": "Köln"}, "id": "call_1", "type": "tool_call"}
    history = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "Is it "}, {"type": "text", "text": "raining?"}]),
        AIMessage("Let me look.", tool_calls=[call]),
        ToolMessage("Yes", tool_call_id="call_1"),
        AIMessage("It rains."),
        HumanMessage("And now?"),
    ]
    assert chat(api).invoke(history).content == SAID
    assert prompts(api) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nIs it \nraining?<|im_end|>\n"
        "<|im_start|>assistant\nLet me look.<|im_end|>\n"
        "<|im_start|>tool\nYes<|im_end|>\n"
        "<|im_start|>assistant\nIt rains.<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]


def test_a_call_without_a_text(api: Api) -> None:
    call = {"name": "weather", "args": {}, "id": "call_1", "type": "tool_call"}
    history = [HumanMessage("Hi"), AIMessage("", tool_calls=[call]), ToolMessage("Yes", tool_call_id="call_1")]
    assert chat(api).invoke(history).content == SAID
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nYes<|im_end|>" in prompts(api)[0]


def test_tools_reach_the_template(api: Api) -> None:
    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    answer = chat(api).bind_tools([weather]).invoke("Hello")
    assert answer.content == SAID and answer.tool_calls == []
    assert '"description": "The weather of a city."' in prompts(api)[0]


def test_a_chain(api: Api) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "You are {who}."), ("human", "{question}")]) | chat(api)
    assert chain.invoke({"who": "terse", "question": "Why?"}).content == SAID
    assert prompts(api)[0].startswith("<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>")


def test_errors(api: Api) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        chat(api, model="no-such").invoke("Hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        list(chat(api, temperature=3).stream("Hello"))
    api.engine.fail_after = 1
    with pytest.raises(openai.APIError, match="not finite"):
        list(chat(api).stream("Hello"))
    api.engine.fail_after = None
    assert chat(api).invoke("Hello").content == SAID


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output_is_refused_until_it_can_be_kept(api: Api, method: Any) -> None:
    class Point(pydantic.BaseModel):
        """A point."""

        x: int

    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(api).with_structured_output(Point, method=method).invoke("Hello json")


def test_text_invoke_and_stream(api: Api) -> None:
    llm = text(api)
    assert llm.invoke("Once") == SAID
    parts = list(llm.stream("Once"))
    assert len(parts) > 10 and "".join(parts) == SAID
    assert prompts(api) == ["Once", "Once"]


def test_text_async(api: Api, loop: asyncio.AbstractEventLoop) -> None:
    async def ask() -> tuple[str, str, list[str]]:
        llm = text(api)
        streamed = "".join([part async for part in llm.astream("Once")])
        return await llm.ainvoke("Once"), streamed, await llm.abatch(["a", "b", "c"])

    assert loop.run_until_complete(ask()) == (SAID, SAID, [SAID] * 3)


def test_text_prompts_in_one_call(api: Api) -> None:
    result = text(api, n=2, best_of=2, temperature=1, seed=4, max_tokens=5).generate(["a", "b", "c"])
    assert [len(choices) for choices in result.generations] == [2, 2, 2]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"] == {"prompt_tokens": 3, "completion_tokens": 30, "total_tokens": 33}
    for choices in result.generations:
        assert len({choice.text for choice in choices}) == 2
        assert {choice.generation_info["finish_reason"] for choice in choices if choice.generation_info} == {"length"}
    alone = text(api, n=2, best_of=2, temperature=1, seed=4, max_tokens=5).generate(["b"])
    assert [c.text for c in alone.generations[0]] == [c.text for c in result.generations[1]]


def test_text_stop_and_logprobs(api: Api) -> None:
    result = text(api, logprobs=2).generate(["a"], stop=[" gamma"])
    [[choice]] = result.generations
    assert choice.text == "Alpha beta, DEF" and choice.generation_info is not None
    assert choice.generation_info["finish_reason"] == "stop"
    assert choice.generation_info["logprobs"]["tokens"][:3] == ["Alpha", " beta", ", DEF"]
    chunks = list(text(api, logprobs=2)._stream("a", stop=[" gamma"]))
    assert all(isinstance(chunk, GenerationChunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == "Alpha beta, DEF"


@pytest.mark.parametrize("given_up", ["left", "cancelled"])
def test_a_stream_that_is_given_up_frees_the_engine(api: Api, loop: asyncio.AbstractEventLoop, given_up: str) -> None:
    api.engine.pause = 0.005
    llm = chat(api, max_tokens=400, extra_body={"ignore_eos": True})

    async def read() -> None:
        async with aclosing(llm.astream("Hello")) as source:
            async for chunk in source:
                if chunk.content and given_up == "left":
                    return

    async def ask() -> None:
        task = asyncio.create_task(read())
        await asyncio.to_thread(until, lambda: bool(api.engine.live))
        if given_up == "cancelled":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(until, lambda: not api.engine.live)

    loop.run_until_complete(ask())
    assert len(api.engine.aborts) == 1


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """The sum of the chunks of a stream."""
    [*_, whole] = itertools.accumulate(chunks)
    return whole
