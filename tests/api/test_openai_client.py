"""The `openai` package against the server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.api.conftest import Api
from tests.api.harness import MODEL, SAID

MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=200, logprobs=True, top_logprobs=2
    )
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    assert choice.logprobs.content[0].top_logprobs[1].token == " beta"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == SAID
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=["a", "b"],
        temperature=0,
        max_tokens=2,
        logprobs=1,
        extra_body={"top_k": 5, "ignore_eos": True},
    )
    assert [choice.text for choice in answer.choices] == ["Alpha beta"] * 2
    assert answer.choices[0].logprobs.tokens == ["Alpha", " beta"]


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="a", temperature=0, max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == SAID


def test_errors(client: openai.OpenAI, api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    api.engine.fail_after = 2
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_async_client(api: Api) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
            answers = await asyncio.gather(*(one() for _ in range(8)))
            return [*answers, (await whole).choices[0].message.content]

    assert asyncio.run(ask()) == [SAID] * 9
