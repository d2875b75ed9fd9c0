"""An engine with a real model is killed while a hundred streams run, and again in the middle of their replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests import realmodels
from tests.api.asking import ask_all
from tests.cases.real import serving

WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "long",
    "story",
    "about",
    "rivers",
    "and",
    "ships",
    "that",
    "never",
    "came",
    "home",
]


def body(i: int) -> dict[str, Any]:
    """Greedy and seeded requests, some with two choices or logprobs, most of them streamed; prompts with a common
    beginning of several blocks."""
    return {
        "model": "small",
        "prompt": " ".join(WORDS * 3) + f" {i} " + " ".join(WORDS[: i % 11]),
        "max_tokens": 24 + i % 9,
        "temperature": 0 if i % 4 == 0 else 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.1 if i % 7 == 0 else 1.0,
        "seed": i,
        "n": 2 if i % 4 and i % 3 == 0 else 1,
        "logprobs": 2 if i % 2 else None,
        "stream": i % 10 != 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }


def engine_of(pid: int) -> psutil.Process:
    [engine] = psutil.Process(pid).children()
    return engine


def ready(url: str) -> bool:
    return httpx.get(f"{url}/health").status_code == 200


def test_shut_03_a_killed_engine_costs_no_request_anything(tmp_path: Path) -> None:
    asked = [body(i) for i in range(90)]
    unseeded = [{**body(i), "seed": None, "temperature": 1.0, "n": 1} for i in range(90, 100)]
    flags = ("--max-model-len", "512", "--kv-cache-memory-bytes", "256MiB")
    with serving(realmodels.smollm2_gguf(), tmp_path, *flags) as server:
        right = asyncio.run(ask_all(server.url, asked))
        before = server.number("vllm:generation_tokens_total")

        async def disturbed() -> list[Any]:
            answers = asyncio.create_task(ask_all(server.url, [*asked, *unseeded]))
            killed = set()
            for _ in range(2):
                while True:  # wait until tokens have come from this engine
                    await asyncio.sleep(0.02)
                    assert not answers.done()
                    if await asyncio.to_thread(ready, server.url):
                        found = await asyncio.to_thread(server.number, "vllm:num_requests_running")
                        if found > 20 and engine_of(server.pid).pid not in killed:
                            break
                await asyncio.sleep(0.3)
                engine = engine_of(server.pid)
                killed.add(engine.pid)
                engine.kill()
            return await answers

        found = asyncio.run(disturbed())
        assert found[:90] == right
        for asked_for, answer in zip(unseeded, found[90:], strict=True):
            [((_, ids, scores, end), _)] = answer
            assert len(ids) == asked_for["max_tokens"] and end == "length"
            assert len(scores) in (0, len(ids))
        assert server.number("vllm:generation_tokens_total") > before
        server.alive()
        assert server.number("vllm:num_requests_running") == 0
