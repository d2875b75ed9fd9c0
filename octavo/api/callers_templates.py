"""Chat templates that come with requests: where they run, and how many requests may wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from octavo.api.errors import unavailable
from octavo.text.confined import WORKERS, Confined
from octavo.text.template import ChatTemplate

_R = TypeVar("_R")

_READY = 16
"""Templates that are kept ready: reading one takes longer than using it."""
MOST = 4 * WORKERS
"""Requests that may be there; a template that does not end takes its worker for a while."""


class CallersTemplates:
    """What one server has for them. Nothing is started before the first one comes."""

    def __init__(self) -> None:
        self.sandbox = Confined()
        self.read = lru_cache(_READY)(self._read)
        self._here = 0
        self._threads = ThreadPoolExecutor(WORKERS, "callers' templates")

    def _read(self, source: str, special_tokens: tuple[tuple[str, str], ...], content_format: str) -> ChatTemplate:
        return ChatTemplate(source, dict(special_tokens), content_format, self.sandbox)

    async def use(self, work: Callable[[], _R]) -> _R:
        """`work`, which uses such a template, on a thread where others of its kind wait, and nobody else.

        Raises:
            ApiError: 503 where too many wait already.
        """
        if self._here >= MOST:
            raise unavailable(f"{self._here} requests that bring a chat template are being prepared; try again later.")
        self._here += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._here -= 1

    def close(self) -> None:
        """End what runs; nobody need wait for it."""
        self.sandbox.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
