"""Logprobs of real models, against transformers' float32 on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.conftest import SAID, SAID_IDS
from tests.cases.real import NAME, Real


def test_logp_01_impossible_tokens_are_json(real: Real) -> None:
    [token] = real.tokens(" Paris")
    found = real.complete("The capital of France is", max_tokens=3, logprobs=5, allowed_token_ids=[token])
    assert found["choices"][0]["text"] == " Paris" * 3
    for top in found["choices"][0]["logprobs"]["top_logprobs"]:
        assert top[" Paris"] <= 0 and all(value >= -9999.0 for value in top.values())
    first = real.chat("Hello", max_tokens=1, logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"][0]
    [id] = real.tokens(first["token"])
    choice = real.chat("Hello", max_tokens=1, logprobs=True, top_logprobs=5, logit_bias={str(id): -100})["choices"][0]
    assert choice["logprobs"]["content"][0]["token"] != first["token"]
    assert all(-9999.0 <= top["logprob"] <= 0 for top in choice["logprobs"]["content"][0]["top_logprobs"])


def test_logp_02_prompt_scores_know_no_sampling(real: Real) -> None:
    body = {"echo": True, "logprobs": 1, "temperature": 1, "max_tokens": 2, "seed": 1}
    prompt = "correct horse battery staple"
    plain = real.complete(prompt, **body)
    for extra in ({"top_k": 1}, {"temperature": 0}, {"top_p": 0.1}, {"repetition_penalty": 2.0}):
        filtered = real.complete(prompt, **{**body, **extra})
        count = filtered["usage"]["prompt_tokens"]
        scores = filtered["choices"][0]["logprobs"]["token_logprobs"][:count]
        assert scores == plain["choices"][0]["logprobs"]["token_logprobs"][:count]
        assert scores[0] is None and all(score < 0 for score in scores[1:])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_logp_04_echo_scores_equal_transformers(real: Real, oracle: Any, max_tokens: int) -> None:
    prompt = "The capital of France is Paris"
    answer = real.client.completions.create(
        model=NAME, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    found = answer.choices[0].logprobs
    ids = real.tokens(prompt)
    logits = oracle(ids)
    ids += [int(logits[-1].argmax())] * max_tokens
    logits = oracle(ids)
    expected = logits - logits.max(axis=1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.prompt_tokens + max_tokens == len(ids)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    np.testing.assert_allclose(
        found.token_logprobs[1:], [expected[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-3, rtol=0
    )
    for i, top in enumerate(found.top_logprobs[1:]):
        assert max(top.values()) == pytest.approx(expected[i].max(), abs=1e-3)
    assert answer.choices[0].text.startswith(prompt)
    ends = real.tokens(" Paris")
    assert ids[-1 - max_tokens :][:1] == ends, "the loglikelihood of the last word is that of its token"
    at = len(ids) - max_tokens - 1
    assert sum(found.token_logprobs[at : at + 1]) == pytest.approx(expected[at - 1, ends[0]], abs=1e-3)


def test_logp_08_bytes_of_tokens_make_the_text(scripted: Real) -> None:
    for stream in (False, True):
        answer: Any = scripted.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Say it"}], logprobs=True, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        assert bytes(byte for entry in entries for byte in entry.bytes).decode("utf-8") == SAID
        assert len(entries) in (len(SAID_IDS), len(SAID_IDS) + 1) and all(entry.token for entry in entries)


def test_logp_14_held_text_loses_no_entries(real: Real) -> None:
    prompt = [{"role": "user", "content": "Count: one two three"}]
    plain = real.chat(prompt, max_tokens=20)["choices"][0]["message"]["content"]
    stop = plain[9:20] + "~"
    body: dict[str, Any] = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2, "stop": [stop]}
    whole = real.chat(prompt, **body)
    streamed = [
        entry
        for chunk in real.client.chat.completions.create(
            model=NAME, messages=prompt, temperature=0, stream=True, **body
        )  # type: ignore[call-overload]
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(streamed) == whole["usage"]["completion_tokens"] == 20
    assert [entry.model_dump() for entry in streamed] == whole["choices"][0]["logprobs"]["content"]
