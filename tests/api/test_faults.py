"""Faults stay with the request that causes them, seen through HTTP; an engine's process that is killed costs nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import octavo
from octavo.api.serve import Parts
from octavo.client import Process
from octavo.config import EngineConfig
from tests.api.asking import ask_all
from tests.api.fault_build import ABORTS, HANGS, NAN, RAISES
from tests.api.harness import MODEL, running, tiny_text, until

POISON = {NAN: "not finite", RAISES: "cannot be sampled", ABORTS: "stopped twice", HANGS: "stopped twice"}


@pytest.fixture(autouse=True)
def builders_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[2]), str(Path(octavo.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@contextmanager
def faulty(**options: Any) -> Iterator[tuple[str, list[Process]]]:
    """A server whose engine has its own process; its URL, and the client that looks after the engine."""
    clients: list[Process] = []

    def engine(config: EngineConfig) -> Process:
        clients.append(Process(config, "tests.api.fault_build:build_faulty"))
        return clients[0]

    with running(Parts(engine, tiny_text), max_num_seqs=100, **options) as url:
        yield url, clients


def neighbour(i: int) -> dict[str, Any]:
    """A request like users' ones: greedy, seeded, with two choices, with logprobs, streamed or not."""
    return {
        "model": MODEL,
        "prompt": [i, 7, 3 + i % 5, *range(i % 30)],
        "max_tokens": 30 + i % 17,
        "temperature": 0 if i % 4 == 0 else 1.0,
        "seed": i,
        "n": 1 if i % 4 == 0 or i % 3 else 2,
        "logprobs": 2 if i % 2 else None,
        "stream": i % 5 != 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }


def test_poisoned_requests_fail_alone() -> None:
    neighbours = [neighbour(i) for i in range(50)]
    with faulty(watchdog_timeout=1.0) as (url, clients):
        right = asyncio.run(ask_all(url, neighbours))
        assert all(isinstance(answer, list) and all(one[0][3] == "length" for one in answer) for answer in right)
        assert sum(len(one[0][1]) for answer in right for one in answer) == sum(
            body["max_tokens"] * body["n"] for body in neighbours
        )
        poisoned = [
            {**neighbour(0), "prompt": [1, token, 2], "stream": stream} for token in POISON for stream in (True, False)
        ]
        found = asyncio.run(ask_all(url, [*neighbours[:25], *poisoned, *neighbours[25:]]))
        assert [*found[:25], *found[25 + len(poisoned) :]] == right
        for body, error in zip(poisoned, found[25:], strict=False):
            assert POISON[body["prompt"][1]] in error["message"] and error["code"] == "engine_error", error
        assert httpx.get(f"{url}/health").status_code == 200
        assert 5 <= clients[0].restarts <= 8, "at most two deaths for each of the four that cause them"


def test_a_killed_engine_costs_no_request_anything() -> None:
    asked = [{**neighbour(i), "max_tokens": 200 + i % 17} for i in range(100)]
    with faulty() as (url, clients):
        right = asyncio.run(ask_all(url, asked))

        async def disturbed() -> list[Any]:
            answers = asyncio.create_task(ask_all(url, asked))
            reasons = set()
            for _ in range(3):
                await asyncio.sleep(0.2)  # the second and third time in the middle of the replay
                restarts = clients[0].restarts
                assert not answers.done()
                os.kill(clients[0].pid or 0, signal.SIGKILL)
                async with httpx.AsyncClient(base_url=url) as http:
                    while clients[0].restarts == restarts or clients[0].status.state != "ready":
                        health = await http.get("/health")
                        reasons.add((health.status_code, "SIGKILL" in health.text))
                        await asyncio.sleep(0.01)
            assert (503, True) in reasons
            return await answers

        assert asyncio.run(disturbed()) == right
        assert clients[0].restarts == 3
        engine = psutil.Process(clients[0].pid)
        assert httpx.get(f"{url}/health").status_code == 200
    until(lambda: not engine.is_running())


def test_streams_say_that_they_are_alive_while_the_engine_restarts() -> None:
    with faulty(sse_keep_alive_interval=0.05) as (url, clients):
        body = {**neighbour(1), "stream": True, "max_tokens": 400, "n": 1}
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 20:
                    os.kill(clients[0].pid or 0, signal.SIGKILL)
        assert lines.count(": keep-alive") >= 2
        assert "data: [DONE]" in lines
        ids = [
            token
            for line in lines
            if line.startswith("data: {")
            for choice in json.loads(line[6:])["choices"]
            for token in choice["token_ids"]
        ]
        assert len(ids) == 400
