"""A generation with a time limit, and with the times of its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.api.errors import ApiError
from octavo.api.generation import Generation, News, Usage
from octavo.client import AsyncEngine


class Times:
    """When the tokens of a call came.

    Args:
        arrived: when the call came, on the monotonic clock.
    """

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._first: dict[tuple[int, int], float] = {}
        """By prompt and choice."""
        self._last: dict[tuple[int, int], float] = {}
        self._tokens = 0
        self._queued = 0.0

    def saw(self, news: News) -> None:
        """Take note of the tokens of `news`, which came just now."""
        self._queued = max(self._queued, news.queued)
        if not news.piece.token_ids:
            return
        key, now = (news.prompt, news.choice), time.monotonic()
        self._first.setdefault(key, now)
        self._last[key] = now
        self._tokens += len(news.piece.token_ids)

    def as_json(self) -> dict[str, float | None]:
        """`metrics` of an answer: milliseconds, and tokens of all choices per second since the call came; null where
        there were too few tokens to tell."""
        queued = {"queue_time_ms": self._queued * 1000}
        if not self._first:
            untold = ("time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second")
            return {**queued, **dict.fromkeys(untold)}
        first, last = min(self._first.values()), max(self._last.values())
        between = self._tokens - len(self._first)
        waits = sum(self._last[key] - self._first[key] for key in self._first)
        return {
            **queued,
            "time_to_first_token_ms": (first - self._arrived) * 1000,
            "generation_time_ms": (last - first) * 1000,
            "mean_itl_ms": waits / between * 1000 if between else None,
            "tokens_per_second": self._tokens / max(last - self._arrived, 1e-9),
        }


class TimedGeneration:
    """As `Generation`, ended when its time is over.

    Args:
        ids: the requests to end then.
        limit: seconds since `arrived`; None for no limit.
        measured: whether anybody asks for `times`.
    """

    def __init__(
        self,
        generation: Generation,
        engine: AsyncEngine,
        ids: list[str],
        arrived: float,
        limit: float | None,
        measured: bool,
    ) -> None:
        self._generation = generation
        self._engine = engine
        self._ids = ids
        self._arrived = arrived
        self._limit = limit
        self._measured = measured
        self._late = False
        self._ending: set[asyncio.Task[None]] = set()
        self.times = Times(arrived)

    @property
    def usage(self) -> Usage:
        return self._generation.usage

    def news(self) -> AsyncGenerator[News, None]:
        """As `Generation.news`.

        Raises:
            ApiError: also 408 when the time is over.
        """
        if self._limit is None and not self._measured:
            return self._generation.news()
        return self._timed()

    async def _timed(self) -> AsyncGenerator[News, None]:
        timer: asyncio.TimerHandle | None = None
        if self._limit is not None:
            left = self._limit - (time.monotonic() - self._arrived)
            timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._expire)
        try:
            async with aclosing(self._generation.news()) as source:
                async for news in source:
                    self.times.saw(news)
                    yield news
        except ApiError:
            if self._late:
                raise self._too_late() from None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        """End what still runs; its news then end with an error."""
        self._late = True
        for name in self._ids:
            task = asyncio.ensure_future(self._engine.abort(name))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _too_late(self) -> ApiError:
        return ApiError(
            408,
            f"The answer was not done within {self._limit:g} seconds, when {self.usage.completion_tokens} tokens had "
            "been generated. Allow more time (`timeout`, or --request-timeout of the server), ask for fewer tokens, or "
            "stream.",
            param="timeout",
            code="timeout",
            headers={"X-Should-Retry": "false"},  # clients would ask again, and be as late again
        )
