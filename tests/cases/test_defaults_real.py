"""Sampling defaults of a model's generation config reach every request of a server that does not say otherwise."""

from __future__ import annotations

import json

import pytest

from tests import realmodels
from tests.cases.real import serving


def test_overridden_defaults_are_what_a_plain_request_gets(tmp_path_factory: pytest.TempPathFactory) -> None:
    overrides = json.dumps({"temperature": 0.0, "max_new_tokens": 7})
    flags = ("--override-generation-config", overrides, "--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB")
    with serving(realmodels.smollm2_gguf(), tmp_path_factory.mktemp("defaults"), *flags) as server:
        body = {"model": "small", "messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True}
        answers = [server.http.post("/v1/chat/completions", json=body).json() for _ in range(3)]
        texts = {answer["choices"][0]["message"]["content"] for answer in answers}
        assert len(texts) == 1, "greedy, because the default temperature is 0"
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {7}
        sampled = server.http.post("/v1/chat/completions", json={**body, "temperature": 1.5, "seed": 4}).json()
        assert sampled["choices"][0]["message"]["content"] not in texts, "what a request says wins"
