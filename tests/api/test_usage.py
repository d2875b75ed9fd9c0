"""Usage counts."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api
from tests.api.harness import EOS, SAID, ids_of

BOTH = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", BOTH)
def test_usage_01_a_last_chunk_when_asked(api: Api, path: str) -> None:
    chunks = api.stream(path, max_tokens=4, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
def test_usage_01_no_usage_when_not_asked(api: Api, path: str, options: dict[str, object]) -> None:
    chunks = api.stream(path, max_tokens=4, **options)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("path", BOTH)
def test_usage_01_stream_options_need_a_stream(api: Api, path: str) -> None:
    body = {"stream_options": {"include_usage": True}}
    response = api.completion(**body) if path.endswith("/v1/completions") else api.chat(**body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("path", BOTH)
def test_usage_continuous(api: Api, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in api.stream(path, max_tokens=4, stream_options=options)]
    assert counts[-1] == 4 and counts == sorted(counts) and len(set(counts)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_usage_03_cached_tokens_add_up_over_prompts(api: Api, stream: bool) -> None:
    api.engine.cached = 3
    body = {"prompt": ["Hello", "Hello you"], "max_tokens": 2}
    usage = (
        api.stream(BOTH[0], stream_options={"include_usage": True}, **body)[-1]
        if stream
        else api.completion(**body).json()
    )["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6 and usage["prompt_tokens"] == 14


def test_usage_a_prompt_counts_once_for_all_choices(api: Api) -> None:
    usage = api.completion(n=3, temperature=1, max_tokens=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 6)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
def test_usage_token_ids_are_returned_when_asked(api: Api, path: str, stream: bool) -> None:
    body = {"return_token_ids": True, "max_tokens": 200}
    if stream:
        chunks = api.stream(path, **body)
        ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
        prompts = [
            part["prompt_token_ids"]
            for chunk in chunks
            for part in (chunk, *chunk["choices"])
            if "prompt_token_ids" in part
        ]
    else:
        answer = (api.completion(**body) if path == BOTH[0] else api.chat(**body)).json()
        ids = answer["choices"][0]["token_ids"]
        prompts = [part["prompt_token_ids"] for part in (answer, *answer["choices"]) if "prompt_token_ids" in part]
    assert ids == [*ids_of(SAID), EOS]
    assert prompts == [list(api.engine.seen[0].prompt)]
