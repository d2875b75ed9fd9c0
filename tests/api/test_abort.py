"""Clients that go away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.api.conftest import Api
from tests.api.harness import GREEDY, until


@pytest.fixture
def slow(api: Api) -> Iterator[Api]:
    """An engine that takes 5 ms for a token."""
    api.engine.pause = 0.005
    yield api


def send(api: Api, path: str, **body: object) -> socket.socket:
    """An open connection on which a request that would run long has been sent."""
    default = (
        {"prompt": "Hello"}
        if path.endswith("/v1/completions")
        else {"messages": [{"role": "user", "content": "Hello"}]}
    )
    raw = json.dumps({**GREEDY, **default, "max_tokens": 450, "ignore_eos": True, **body}).encode()
    host, port = api.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return connection


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_abort_01_a_closed_connection_ends_the_work(slow: Api, path: str, stream: bool) -> None:
    connection = send(slow, path, stream=stream)
    until(lambda: bool(slow.engine.live))
    if stream:
        connection.recv(64)
    connection.close()
    until(lambda: not slow.engine.live)
    assert len(slow.engine.aborts) == 1
    generated = slow.engine.numbers.generation_tokens
    slow.alive()
    assert slow.engine.numbers.generation_tokens == generated + 1


@pytest.mark.parametrize("stream", [False, True])
def test_abort_03_all_choices_of_all_prompts_end(slow: Api, stream: bool) -> None:
    connection = send(slow, "/v1/completions", stream=stream, n=4, temperature=1, prompt=["a", "b", "c"])
    until(lambda: len(slow.engine.live) == 12)
    connection.close()
    until(lambda: not slow.engine.live)
    assert len(slow.engine.aborts) == 3


def test_abort_03_nothing_is_aborted_without_need(api: Api) -> None:
    for _ in range(20):
        assert api.completion(max_tokens=2).status_code == 200
        api.stream("/v1/chat/completions", max_tokens=2)
    assert api.engine.aborts == []


def test_abort_a_neighbour_goes_on(slow: Api) -> None:
    connection = send(slow, "/v1/completions", stream=True)
    until(lambda: bool(slow.engine.live))
    with slow.http.stream(
        "POST", "/v1/completions", json={**GREEDY, "prompt": "Hello", "stream": True, "max_tokens": 20}
    ) as response:
        connection.close()
        raw = response.read().decode()
    assert raw.endswith("data: [DONE]\n\n")
