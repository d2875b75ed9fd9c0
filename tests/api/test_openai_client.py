"""The `openai` package against the server: what it asks for, what it makes of the answers, when it tries again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import openai
import pydantic
import pytest

from tests.api.conftest import Api
from tests.api.harness import MODEL, SAID, ScriptEngine, ids_of, parts_of, running, until

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
SAID_TOKENS = len(ids_of(SAID)) + 1
"""With the end of sequence."""

_T = TypeVar("_T")


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def in_loop(url: str, use: Callable[[openai.AsyncOpenAI], Awaitable[_T]], **options: Any) -> _T:
    """What `use` returns when it is given an asynchronous client, in an event loop of its own."""

    async def run() -> _T:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", **{"max_retries": 0, **options}) as made:
            return await use(made)

    return asyncio.run(run())


class Joined:
    """The choices of a stream, joined: content and, where there are any, logprobs by index."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.tokens: dict[int, list[str]] = {}
        self.ends: dict[int, list[str]] = {}
        self.usage: Any = None

    def add(self, chunk: Any) -> None:
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            self.text[choice.index] = self.text.get(choice.index, "") + (text or "")
            found = choice.logprobs
            if found is not None:
                tokens = found.tokens if hasattr(found, "tokens") else [entry.token for entry in found.content]
                self.tokens.setdefault(choice.index, []).extend(tokens)
            if choice.finish_reason:
                self.ends.setdefault(choice.index, []).append(choice.finish_reason)
        if chunk.usage is not None:
            assert self.usage is None and chunk.choices == []
            self.usage = chunk.usage


def joined(chunks: Any) -> Joined:
    found = Joined()
    for chunk in chunks:
        found.add(chunk)
    return found


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=200, logprobs=True, top_logprobs=2
    )
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert choice.message.tool_calls is None and choice.message.refusal is None
    assert answer.usage.completion_tokens == len(choice.logprobs.content) == SAID_TOKENS
    assert [entry.token for entry in choice.logprobs.content[0].top_logprobs] == ["Alpha", " beta"]
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == SAID
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    found = joined(chunks)
    assert (found.text, found.ends) == ({0: SAID}, {0: ["stop"]})
    assert found.usage.completion_tokens == SAID_TOKENS
    assert found.usage.total_tokens == found.usage.prompt_tokens + SAID_TOKENS


def test_choices_seed_stop_and_logprobs_of_chat(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "n": 3,
        "seed": 11,
        "stop": ["gamma", "never"],
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 100,
    }
    whole = client.chat.completions.create(**body).choices
    found = joined(client.chat.completions.create(**body, stream=True))
    assert [choice.index for choice in whole] == [0, 1, 2]
    assert len({choice.message.content for choice in whole}) > 1
    assert all("gamma" not in choice.message.content and choice.finish_reason == "stop" for choice in whole)
    assert [choice.model_extra["stop_reason"] for choice in whole] == ["gamma"] * 3
    assert found.text == {choice.index: choice.message.content for choice in whole}
    assert found.ends == {index: ["stop"] for index in range(3)}
    assert found.tokens == {choice.index: [entry.token for entry in choice.logprobs.content] for choice in whole}


def test_the_helper_that_joins_a_stream(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 2, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == [choice.message.content for choice in whole.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert [choice.logprobs.content for choice in answer.choices] == [
        choice.logprobs.content for choice in whole.choices
    ]
    assert answer.usage == whole.usage
    assert kinds.count("content.done") == kinds.count("logprobs.content.done") == 2


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=["a", "b"],
        temperature=0,
        max_tokens=2,
        logprobs=1,
        extra_body={"top_k": 5, "ignore_eos": True, "return_token_ids": True},
    )
    assert [choice.text for choice in answer.choices] == ["Alpha beta"] * 2
    assert answer.choices[0].logprobs.tokens == ["Alpha", " beta"]
    assert answer.choices[0].logprobs.text_offset == [0, 5]
    assert answer.choices[0].logprobs.top_logprobs == [{"Alpha": -0.25}, {" beta": -0.25}]
    assert answer.choices[1].model_extra["token_ids"] == [256, 257]
    assert answer.choices[1].model_extra["prompt_token_ids"] == [ord("b")]
    assert answer.object == "text_completion" and answer.usage.prompt_tokens == 2


def test_completion_of_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[72, 105], [72]], temperature=0, max_tokens=1, echo=True, logprobs=0
    )
    assert [choice.text for choice in answer.choices] == ["HiAlpha", "HAlpha"]
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25, -0.25]


def test_completion_stream(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 30, "logprobs": 0}
    whole = client.completions.create(**body)
    found = joined(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert found.text == {choice.index: choice.text for choice in whole.choices}
    assert found.ends == {choice.index: [choice.finish_reason] for choice in whole.choices}
    assert found.tokens == {choice.index: choice.logprobs.tokens for choice in whole.choices}
    assert found.usage == whole.usage


def test_extra_fields_and_raw_answers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=3,
        extra_body={"min_p": 0.1, "guided_jsn": {}, "ignore_eos": True},
        extra_headers={"X-Request-Id": "mine-7"},
    )
    assert raw.status_code == 200 and raw.request_id == "mine-7" and raw.retries_taken == 0
    assert raw.headers["content-type"] == "application/json"
    assert "guided_jsn" in raw.headers["x-octavo-warnings"]
    answer = raw.parse()
    assert answer.id == "chatcmpl-mine-7" and answer.choices[0].message.content == "Alpha beta, DEF"
    [warning] = answer.model_extra["warnings"]
    assert "guided_jsn" in warning


def test_raw_streams(client: openai.OpenAI) -> None:
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt="a", temperature=0, max_tokens=2, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.object, model.model_extra["max_model_len"]) == (MODEL, "model", 512)
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("no-such")
    assert missing.value.code == "model_not_found"


def test_unknown_models_and_wrong_values(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9, stream=stream)
        assert bad.value.param == "temperature" and "temperature" in bad.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert long.value.code == "context_length_exceeded" and "512" in long.value.message


def test_an_error_within_a_stream(client: openai.OpenAI, api: Api) -> None:
    api.engine.fail_after = 2
    text = ""
    with pytest.raises(openai.APIError, match="not finite"):
        for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "Alpha beta"
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)


def test_answers_to_schemas_are_refused_until_they_can_be_kept(client: openai.OpenAI) -> None:
    class Point(pydantic.BaseModel):
        x: int

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Point)
    assert refused.value.param == "response_format"


def test_keys() -> None:
    with running(parts_of(ScriptEngine()), api_key=("right", "other")) as url:
        for key in ("right", "other"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as known:
                assert known.completions.create(model=MODEL, prompt="a", temperature=0, max_tokens=1).choices
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as unknown:
            with pytest.raises(openai.AuthenticationError) as refused:
                unknown.models.list()
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                unknown.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)


def test_bodies_over_the_limit() -> None:
    with (
        running(parts_of(ScriptEngine()), max_request_bytes=2000) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as small,
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            small.completions.create(model=MODEL, prompt="x" * 3000)
        assert refused.value.status_code == 413 and refused.value.code == "request_too_large"


@pytest.fixture
def one_at_a_time() -> Iterator[tuple[str, ScriptEngine]]:
    """A server that takes one request, and 5 ms for each of its tokens."""
    engine = ScriptEngine(pause=0.005)
    with running(parts_of(engine), max_num_queued_reqs=1) as url:
        yield url, engine


def test_a_busy_server_and_the_clients_own_retries(one_at_a_time: tuple[str, ScriptEngine]) -> None:
    url, engine = one_at_a_time
    body: dict[str, Any] = {"model": MODEL, "prompt": "a", "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        held = client.completions.create(**body, max_tokens=490, stream=True, extra_body={"ignore_eos": True})
        until(lambda: bool(engine.live))
        with pytest.raises(openai.InternalServerError) as busy:
            client.completions.create(**body, max_tokens=1)
        assert busy.value.status_code == 503 and busy.value.response.headers["retry-after"] == "1"
        threading.Timer(0.2, held.close).start()
        raw = client.with_options(max_retries=3).completions.with_raw_response.create(**body, max_tokens=1)
        assert raw.retries_taken >= 1 and raw.parse().choices[0].text == "Alpha"


def test_a_server_that_loads_is_waited_for() -> None:
    loaded = threading.Event()
    with running(parts_of(ScriptEngine(), loaded), wait=False) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="loading") as early:
                client.models.list()
            assert early.value.status_code == 503
            threading.Timer(0.2, loaded.set).start()
            raw = client.with_options(max_retries=3).models.with_raw_response.list()
        assert raw.retries_taken >= 1 and [model.id for model in raw.parse()] == [MODEL]


def test_more_requests_than_a_key_may_have() -> None:
    engine = ScriptEngine(pause=0.005)
    body: dict[str, Any] = {"model": MODEL, "prompt": "a", "temperature": 0}
    with (
        running(parts_of(engine), api_key=("one", "two"), max_num_reqs_per_key=1) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as one,
        openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0) as two,
    ):
        held = one.completions.create(**body, max_tokens=490, stream=True, extra_body={"ignore_eos": True})
        until(lambda: bool(engine.live))
        with pytest.raises(openai.RateLimitError) as limited:
            one.completions.create(**body, max_tokens=1)
        assert limited.value.status_code == 429 and "retry-after" in limited.value.response.headers
        assert two.completions.create(**body, max_tokens=1).choices[0].text == "Alpha"
        held.close()
        raw = one.with_options(max_retries=3).completions.with_raw_response.create(**body, max_tokens=1)
        assert raw.parse().choices[0].text == "Alpha"


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_of_the_client_ends_the_work(api: Api, client: openai.OpenAI, stream: bool) -> None:
    api.engine.pause = 0.6 if stream else 0.005
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model=MODEL, prompt="a", max_tokens=490, stream=stream, extra_body={"ignore_eos": True}
        )
    until(lambda: not api.engine.live and len(api.engine.aborts) == 1)
    api.engine.pause = 0.0
    api.alive()


def test_a_connection_that_is_refused() -> None:
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as nobody,
        pytest.raises(openai.APIConnectionError),
    ):
        nobody.models.list()


def test_async_client(api: Api) -> None:
    async def ask(client: openai.AsyncOpenAI) -> list[str | None]:
        async def one() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def text() -> str:
            stream = await client.completions.create(
                model=MODEL, prompt="a", temperature=0, max_tokens=100, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        answers = await asyncio.gather(*(one() for _ in range(8)), *(text() for _ in range(8)))
        return [*answers, (await whole).choices[0].message.content]

    assert in_loop(api.url, ask) == [SAID] * 17


def test_async_choices_equal_those_of_the_other_client(api: Api, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "n": 4,
        "seed": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }

    async def ask(asynchronous: openai.AsyncOpenAI) -> tuple[Any, Joined]:
        found = Joined()
        async for chunk in await asynchronous.chat.completions.create(**body, stream=True):
            found.add(chunk)
        return await asynchronous.chat.completions.create(**body), found

    whole = client.chat.completions.create(**body)
    same, found = in_loop(api.url, ask)
    assert same.choices == whole.choices and same.usage == whole.usage
    assert found.text == {choice.index: choice.message.content for choice in whole.choices}


def test_async_errors(api: Api) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("no-such")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="a", n=0, stream=True)
        assert bad.value.param == "n"
        api.engine.fail_after = 1
        with pytest.raises(openai.APIError, match="not finite"):
            async for _ in await client.completions.create(model=MODEL, prompt="a", stream=True):
                pass

    in_loop(api.url, ask)


@pytest.mark.parametrize("how", ["cancel", "close", "leave"])
def test_an_async_stream_that_is_given_up_frees_the_engine(api: Api, how: str) -> None:
    api.engine.pause = 0.005
    before = api.engine.numbers.generation_tokens

    async def ask(client: openai.AsyncOpenAI) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, n=2, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            async with stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        begun.set()
                        if how == "close":
                            await stream.close()
                        if how != "cancel":
                            return

        task = asyncio.create_task(read())
        await begun.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(until, lambda: not api.engine.live)

    in_loop(api.url, ask)
    assert len(api.engine.aborts) == 1
    assert api.engine.numbers.generation_tokens - before < 700
    api.alive()


def test_an_async_call_that_is_cancelled_frees_the_engine(api: Api) -> None:
    api.engine.pause = 0.005

    async def ask(client: openai.AsyncOpenAI) -> None:
        call = asyncio.create_task(
            client.completions.create(model=MODEL, prompt="a", max_tokens=490, extra_body={"ignore_eos": True})
        )
        await asyncio.to_thread(until, lambda: bool(api.engine.live))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(until, lambda: not api.engine.live)

    in_loop(api.url, ask)
    assert len(api.engine.aborts) == 1
