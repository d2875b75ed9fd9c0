"""One event per token, for clients that read; those that do not get what has gathered as one event."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx

from octavo.api.generation import merged
from octavo.api.sse import _Watched
from octavo.types import Delta, TokenLogprobs
from tests.api.conftest import text_of
from tests.api.harness import GREEDY, ScriptEngine, parts_of, running, until

TOKENS = 480


def request(**body: Any) -> bytes:
    raw = json.dumps({**GREEDY, "prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + raw


def chunks_of(raw: bytes) -> list[dict[str, Any]]:
    """The chunks of a whole HTTP answer."""
    body, rest = b"", raw.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = [line.removeprefix("data: ") for line in body.decode().split("\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_slow_reader_gets_the_same_in_fewer_events() -> None:
    engine = ScriptEngine()
    asked = {"n": 2, "temperature": 1.0, "seed": 1, "logprobs": 3}
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    with running(parts_of(engine), listening=listening) as url:
        port = int(url.rsplit(":", 1)[1])
        whole = httpx.post(f"{url}/v1/completions", json=json.loads(request(**asked).partition(b"\r\n\r\n")[2]))
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", port))
            slow.sendall(request(**asked, stream=True, stream_options={"include_usage": True}))
            until(lambda: len(engine.seen) == 2 and not engine.live)  # the engine does not wait for it
            time.sleep(0.1)
            raw = b""
            while part := slow.recv(1 << 16):
                raw += part
    *chunks, last = chunks_of(raw)
    assert len(chunks) < 2 * TOKENS * 0.8, "what gathered went together"
    answer = whole.json()
    assert last["usage"] == answer["usage"]
    for choice in answer["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert text_of(chunks, choice["index"]) == choice["text"]
        assert [end for part in parts if (end := part["finish_reason"])] == ["length"]
        for name, values in choice["logprobs"].items():
            assert sum((part["logprobs"][name] for part in parts), []) == values


def test_a_reader_that_keeps_up_gets_an_event_for_each_token() -> None:
    with (
        running(parts_of(ScriptEngine())) as url,
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as reader,
    ):
        reader.sendall(request(stream=True, return_token_ids=True))
        raw = b""
        while part := reader.recv(1 << 16):
            raw += part
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks_of(raw)] == [1] * TOKENS


def test_merged_keeps_every_token_and_the_end() -> None:
    def score(token: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.5, 1, ())

    deltas = [
        Delta("a", 0, start=4, tokens=[1], logprobs=[score(1)], cached=7),
        Delta("a", 1, tokens=[5]),
        Delta("a", 0, start=5, tokens=[2, 3], logprobs=[score(2), score(3)]),
        Delta("b", 0, tokens=[9], finish="length"),
        Delta("a", 0, start=7, finish="stop", stop_reason=3),
    ]
    scores = [score(1), score(2), score(3)]
    assert merged(deltas) == [
        Delta("a", 0, start=4, tokens=[1, 2, 3], logprobs=scores, cached=7, finish="stop", stop_reason=3),
        Delta("a", 1, tokens=[5]),
        Delta("b", 0, tokens=[9], finish="length"),
    ]


def test_whether_a_write_waited() -> None:
    cancelled = False

    async def write(seconds: float | None) -> None:
        nonlocal cancelled
        try:
            if seconds is not None:
                await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def main() -> None:
        assert await _Watched(write(None)) is False
        assert await _Watched(write(0.01)) is True

        async def forever() -> None:
            await _Watched(write(100))

        task = asyncio.create_task(forever())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and cancelled

    asyncio.run(main())


def test_the_shortest_interval_of_comments_leaves_time_for_others() -> None:
    with running(parts_of(ScriptEngine(pause=0.05)), sse_keep_alive_interval=1e-9) as url:
        body = {**GREEDY, "prompt": "a", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith(":")
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
            assert "data: [DONE]" in list(lines)
