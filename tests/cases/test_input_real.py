"""Prompts, their lengths, usage counts and clients that go away, with a real model."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from tests.api.harness import until
from tests.cases.real import NAME, Real


@pytest.mark.parametrize("prompt", [[200000], [[1, 2], [999999]]])
def test_input_01_ids_outside_the_vocabulary(real: Real, prompt: object) -> None:
    assert real.refused(prompt=prompt, max_tokens=1)["param"] == "prompt"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_input_03_empty_prompts_without_bos(real: Real, prompt: object) -> None:
    error = real.refused(prompt=prompt, max_tokens=1)
    assert error["param"] == "prompt" and "empty" in error["message"]


def test_input_03_an_empty_prompt_with_bos(gemma: LLM) -> None:
    [output] = gemma.generate("", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert list(output.prompt_token_ids) == [2] and len(output.outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="empty"):
        gemma.generate({"prompt_token_ids": []}, SamplingParams(max_tokens=1), use_tqdm=False)


def test_input_05_ids_are_taken_as_they_are(real: Real, gemma: LLM) -> None:
    ids = real.tokens("Hello world")
    by_text, by_ids = (real.complete(prompt, max_tokens=6) for prompt in ("Hello world", ids))
    assert by_ids["usage"]["prompt_tokens"] == by_text["usage"]["prompt_tokens"] == len(ids)
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
    two = real.complete([ids, ids], max_tokens=6)
    assert [choice["text"] for choice in two["choices"]] == [by_ids["choices"][0]["text"]] * 2
    assert two["usage"]["prompt_tokens"] == 2 * len(ids)
    assert real.refused(prompt=["x", [1]])["param"] == "prompt"
    [output] = gemma.generate({"prompt_token_ids": [4521]}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert list(output.prompt_token_ids) == [4521], "no BOS is put before ids"


def test_len_02_prompts_around_the_context_length(smol: LLM) -> None:
    length = smol.info.max_model_len
    [output] = smol.generate(
        {"prompt_token_ids": [100] * (length - 1)}, SamplingParams(max_tokens=None), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"
    for count in (length, length + 1):
        with pytest.raises(ValueError, match=str(count)):
            smol.generate({"prompt_token_ids": [100] * count}, SamplingParams(max_tokens=None), use_tqdm=False)


def test_len_06_a_prompt_far_too_long(real: Real) -> None:
    text = "word " * 3000
    assert "1024" in real.refused("/v1/chat/completions", messages=[{"role": "user", "content": text}])["message"]
    assert "1024" in real.refused(prompt=["ok", text])["message"]
    assert real.number("vllm:num_requests_running") == real.number("vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("count", [1, 5])
def test_len_07_tokens_are_counted_exactly(real: Real, count: int) -> None:
    body: dict[str, Any] = {"model": NAME, "prompt": "Count:", "max_tokens": count, "temperature": 0}
    whole = real.client.completions.create(**body, extra_body={"ignore_eos": True})
    *_, last = real.client.completions.create(
        **body, extra_body={"ignore_eos": True}, stream=True, stream_options={"include_usage": True}
    )
    assert whole.usage.completion_tokens == last.usage.completion_tokens == count
    assert whole.choices[0].finish_reason == "length"


def test_len_04_answers_without_a_limit(smol: LLM, real: Real) -> None:
    assert real.complete("Count:", ignore_eos=True)["usage"]["completion_tokens"] == 16
    ids = [100] * (smol.info.max_model_len - 12)
    [output] = smol.generate(
        {"prompt_token_ids": ids}, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"


def test_usage_01_usage_of_a_stream(real: Real) -> None:
    body: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
    }
    *earlier, last = list(real.client.chat.completions.create(**body, stream_options={"include_usage": True}))
    assert last.choices == [] and last.usage.completion_tokens == 3
    assert last.usage.total_tokens == last.usage.prompt_tokens + 3
    assert all(chunk.choices and chunk.usage is None for chunk in earlier)
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all(chunk.choices for chunk in real.client.chat.completions.create(**body, **options))
    with pytest.raises(openai.BadRequestError):
        real.client.chat.completions.create(**{**body, "stream": False}, stream_options={"include_usage": True})


def test_usage_03_cached_tokens_of_a_batch(real: Real) -> None:
    prompts = ["The quick brown fox jumps over the lazy dog and " * 3, "Pack my box with five dozen liquor jugs. " * 3]
    for prompt in prompts:
        real.complete(prompt, max_tokens=1)
    one = [real.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for prompt in prompts]
    both = real.complete(prompts, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert all(one) and both == sum(one)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_abort_01_a_client_that_goes_away(real: Real, path: str, stream: bool) -> None:
    idle, before = real.number("vllm:kv_cache_usage_perc"), real.number("vllm:generation_tokens_total")
    body = {
        "prompt": "Tell",
        "messages": [{"role": "user", "content": "Tell"}],
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": stream,
    }
    del body["messages" if path == "/v1/completions" else "prompt"]
    with real.http.stream("POST", path, json=body) if stream else _sent(real, path, body):
        until(lambda: real.number("vllm:num_requests_running") == 1)
    until(lambda: real.number("vllm:num_requests_running") == 0, 2)
    assert real.number("vllm:kv_cache_usage_perc") == idle
    made = real.number("vllm:generation_tokens_total")
    time.sleep(0.3)
    assert real.number("vllm:generation_tokens_total") == made < before + 900
    real.alive()


def _sent(real: Real, path: str, body: dict[str, Any]) -> Any:
    """A connection of its own on which a request has been sent, closed at the end of the block."""
    host, port = real.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return contextlib.closing(connection)
