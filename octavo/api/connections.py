"""What clients that open connections and say nothing, or read nothing, may cost: a while, and no flood in the log."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""How long the head of a connection's first request may take; between requests uvicorn has a limit of its own."""
READ_SECONDS = 120.0
"""How long a client may leave some tens of kilobytes of its answer unread; until then it occupies a place among
--max-num-queued-reqs."""
COMPLAINT_SECONDS = 60.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol; a connection on which no request comes, or whose client does not read, is closed. The date
    that answers tell is read when a request comes, not by a clock that ticks while there is none."""

    _patience: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._patience = self.loop.call_later(FIRST_SECONDS, self._give_up)

    def data_received(self, data: bytes) -> None:
        self.server_state.default_headers = _date(int(time.time()))
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._patience, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def _give_up(self) -> None:
        if self.cycle is None:  # no request has begun
            self.transport.close()


@lru_cache(1)
def _date(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


def quiet_when_full() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler for an event loop. asyncio reports each connection that could not be accepted, thousands a
    second; here it is one line a minute."""
    told = -COMPLAINT_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
        elif time.monotonic() - told >= COMPLAINT_SECONDS:
            told = time.monotonic()
            logger.error("new connections wait: %s; raise the limit (ulimit -n) or close idle clients", error.strerror)

    return handle
