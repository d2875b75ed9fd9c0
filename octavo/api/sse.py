"""Streamed answers: the ASGI response that sends them, piece by piece.

The status line waits for the first event, so that whatever goes wrong before it is an ordinary JSON error; after it an
error is one piece more and the stream ends without `[DONE]`. A stream that has nothing to say for a
while sends comments, so that nobody on the way takes it for dead; they too wait for no event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.api.dialect import Dialect, refusal
from octavo.api.errors import ApiError


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection (the body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Pace:
    """Whether a client keeps up. While its connection takes no more, tokens gather; then they go as one event."""

    behind: bool = False

    def lags(self) -> bool:
        """Whether a write has had to wait since the last time this was asked."""
        behind, self.behind = self.behind, False
        return behind


class EventStream:
    """An ASGI response that sends `events` and stops them (`aclose`) as soon as the client is gone.

    Args:
        events: pieces of the answer; each goes out at once.
        dialect: how they, errors and comments are written.
        headers: beside those of every stream.
        explain: turns an exception of `events` into the error to tell.
        pace: is told of writes that had to wait.
        keep_alive: seconds without an event after which a comment is sent; 0 for never.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        dialect: Dialect,
        headers: Mapping[str, str],
        explain: Callable[[Exception], ApiError],
        pace: Pace,
        keep_alive: float = 0.0,
    ) -> None:
        self._events = events
        self._dialect = dialect
        self._headers = {
            "content-type": dialect.media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        self._explain = explain
        self._pace = pace
        self._keep_alive = keep_alive if dialect.comment else 0.0
        self._started = False
        self._written = 0.0
        """Time of the last write."""
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.create_task(self._send(scope, receive, send)), asyncio.create_task(gone(receive))]
        if self._keep_alive:
            tasks.append(asyncio.create_task(self._comment(send)))
        sender = tasks[0]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not sender.cancelled():
            sender.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for event in self._events:
                await self._write(send, event)
        except Exception as error:
            problem = self._explain(error)
            async with self._lock:
                first, self._started = not self._started, True
                if first:
                    await refusal(problem, self._dialect)(scope, receive, send)
                    return
            await self._write(send, self._dialect.event(self._dialect.problem(problem)))
        finally:
            await self._events.aclose()
        async with self._lock:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
            waited = await _Watched(send({"type": "http.response.body", "body": data, "more_body": True}))
            self._pace.behind = self._pace.behind or waited
            self._written = time.monotonic()

    async def _comment(self, send: Send) -> None:
        """Send a comment whenever nothing was written for a while."""
        self._written = time.monotonic()
        while True:
            await asyncio.sleep(max(self._written + self._keep_alive - time.monotonic(), 0.0))
            if time.monotonic() - self._written >= self._keep_alive:
                await self._write(send, self._dialect.comment)


class _Watched:
    """Awaits `work` and tells whether that had to wait for anything."""

    def __init__(self, work: Awaitable[None]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, bool]:
        steps = self._work.__await__()
        waited = False
        try:
            step = next(steps)
            while True:
                waited = True
                try:
                    value = yield step
                except BaseException as error:  # cancelling reaches the work
                    step = steps.throw(error)
                else:
                    step = steps.send(value)
        except StopIteration:
            return waited
