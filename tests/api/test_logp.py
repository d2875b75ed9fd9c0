"""Logprobs in both layouts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Api
from tests.api.harness import SAID, ids_of


def strict(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_logp_01_impossible_tokens_are_clamped(api: Api) -> None:
    completion = strict(api.completion(max_tokens=2, logprobs=5).text)
    tops = completion["choices"][0]["logprobs"]["top_logprobs"]
    assert all(-9999.0 in top.values() for top in tops)
    chat = strict(api.chat(max_tokens=1, logprobs=True, top_logprobs=5).text)
    top = chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.25, -2.0, -3.0, -4.0, -9999.0]


@pytest.mark.parametrize("stream", [False, True])
def test_logp_03_scoring_a_prompt_without_generating(api: Api, stream: bool) -> None:
    body = {"prompt": "Your answer: Yes", "echo": True, "max_tokens": 0, "logprobs": 1}
    if stream:
        chunks = api.stream("/v1/completions", stream_options={"include_usage": True}, **body)
        choice, usage = chunks[0]["choices"][0], chunks[-1]["usage"]
    else:
        answer = api.completion(**body).json()
        choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == "Your answer: Yes" and choice["finish_reason"] == "length"
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None and len(scores) == usage["prompt_tokens"] == 16
    assert usage["completion_tokens"] == 0
    api.alive()


def test_logp_03_echo_alone_generates_nothing(api: Api) -> None:
    answer = api.completion(prompt="Your answer", echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "Your answer" and answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0


def test_logp_03_zero_tokens_need_echo(api: Api) -> None:
    response = api.completion(max_tokens=0)
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"


def test_logp_04_echo_scores_prompt_and_answer(api: Api) -> None:
    prompt = "The capital of France is Paris"
    answer = api.completion(prompt=prompt, echo=True, logprobs=1, max_tokens=1).json()
    found = answer["choices"][0]["logprobs"]
    count = answer["usage"]["prompt_tokens"] + 1
    assert [len(found[name]) for name in sorted(found)] == [count] * 4
    assert found["token_logprobs"] == [None] + [-0.25] * (count - 1)
    assert found["top_logprobs"][0] is None and found["top_logprobs"][-1] == {"Alpha": -0.25}
    assert "".join(found["tokens"]) == prompt + "Alpha"
    assert found["text_offset"] == list(range(len(prompt) + 1))


def test_logp_04_offsets_are_places_in_the_text(api: Api) -> None:
    choice = api.completion(max_tokens=200, logprobs=0).json()["choices"][0]
    found = choice["logprobs"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)


def test_logp_05_chat_has_its_own_layout(api: Api) -> None:
    answer = api.chat(max_tokens=3, logprobs=True, top_logprobs=2).json()
    found = answer["choices"][0]["logprobs"]
    assert set(found) == {"content"} and len(found["content"]) == 3
    assert found["content"][0] == {
        "token": "Alpha",
        "logprob": -0.25,
        "bytes": list(b"Alpha"),
        "top_logprobs": [
            {"token": "Alpha", "logprob": -0.25, "bytes": list(b"Alpha")},
            {"token": " beta", "logprob": -2.0, "bytes": list(b" beta")},
        ],
    }


def test_logp_05_top_logprobs_need_logprobs(api: Api) -> None:
    response = api.chat(top_logprobs=2)
    assert response.status_code == 400 and response.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_logp_08_bytes_join_to_the_text(api: Api, stream: bool) -> None:
    body = {"max_tokens": 200, "logprobs": True}
    if stream:
        choices = [c for chunk in api.stream("/v1/chat/completions", **body) for c in chunk["choices"]]
    else:
        choices = api.chat(**body).json()["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == SAID
    assert all(entry["token"] for entry in entries)


def test_logp_11_prompt_logprobs(api: Api) -> None:
    answer = api.completion(prompt="abc", prompt_logprobs=1, max_tokens=1).json()
    scores = answer["choices"][0]["prompt_logprobs"]
    assert scores == [
        None,
        {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"}},
    ]
    chat = api.chat(prompt_logprobs=0, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "field, value", [("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", 267), ("logprobs", 1000)]
)
def test_logp_13_more_than_the_cap_is_refused(api: Api, field: str, value: int) -> None:
    name = "top_logprobs" if field == "logprobs" else field
    for response, param in (
        (api.completion(**{field: value}), field),
        (api.chat(logprobs=True, **{name: value}), name),
    ):
        assert response.status_code == 400
        assert "20" in response.json()["error"]["message"] and response.json()["error"]["param"] == param
    api.alive()


@pytest.mark.parametrize("stop", [["DEF gamma 🙂 zz"], ["naïve 漢"]])
def test_logp_14_text_held_back_loses_no_logprobs(api: Api, stop: list[str]) -> None:
    body = {"max_tokens": 200, "logprobs": True, "top_logprobs": 2, "stop": stop}
    whole = api.chat(**body).json()
    streamed = [
        entry
        for chunk in api.stream("/v1/chat/completions", **body)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len(streamed) == whole["usage"]["completion_tokens"]


def test_logp_of_asked_tokens(api: Api) -> None:
    completion = api.completion(max_tokens=1, logprob_token_ids=[5, 6]).json()["choices"][0]["logprobs"]
    assert len(completion["top_logprobs"][0]) == 2
    chat = api.chat(max_tokens=1, logprobs=True, logprob_token_ids=[5, 6]).json()["choices"][0]["logprobs"]
    assert len(chat["content"][0]["top_logprobs"]) == 2
    assert api.engine.seen[0].sampling.logprob_token_ids == api.engine.seen[1].sampling.logprob_token_ids == [5, 6]
    assert api.chat(logprob_token_ids=[5]).json()["error"]["param"] == "logprob_token_ids"


def test_logp_tokens_as_ids(api: Api) -> None:
    found = api.completion(max_tokens=2, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in ids_of(SAID)[:2]]
