"""Server-sent events: the frames of a streamed answer, and the ASGI response that sends them.

The status line waits for the first event, so that whatever goes wrong before it is an ordinary JSON error; after it an
error is one `data: {"error": …}` frame and the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.api.errors import ApiError

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def frame(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(data) + b"\n\n"


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection (the body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response that sends `events` and stops them (`aclose`) as soon as the client is gone.

    `explain` turns an exception of `events` into the error to tell.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        explain: Callable[[Exception], ApiError],
    ) -> None:
        self._events = events
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send(scope, receive, send))
        watcher = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not sender.done():
                sender.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
        if not sender.cancelled():
            sender.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    started = True
                    raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": raw})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            problem = self._explain(error)
            if not started:
                await problem.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": frame(problem.payload()), "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
