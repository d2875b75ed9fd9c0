"""The one path from requests to text: every endpoint that generates goes through `Generation`.

It starts the requests of a call on the engine, mixes their answers in the order they come, turns tokens into text,
tells the engine about stop strings, tells the record, and leaves nothing running whatever way it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from octavo.api.errors import ApiError, internal, unavailable
from octavo.api.record import Record
from octavo.api.sse import Pace
from octavo.client import AsyncEngine
from octavo.text.output import Piece, RequestOutputBuilder
from octavo.types import Delta, Request, TokenLogprobs


class Job(NamedTuple):
    """One prompt of a call."""

    request: Request
    output: RequestOutputBuilder


class News(NamedTuple):
    """What came for one choice: `piece` is the new text and tokens, `prompt` the index of the prompt in the call."""

    prompt: int
    choice: int
    piece: Piece
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    """Seconds its request waited, in the first news of a choice."""


@dataclass
class Usage:
    """Tokens of a call so far. A prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """By prompt."""

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Generation:
    """The requests of one call, running together. Use `news()` once; closing it aborts what still runs.

    Args:
        limit: seconds since the call came after which what still runs is ended; None for no limit.
    """

    def __init__(
        self, engine: AsyncEngine, jobs: Sequence[Job], record: Record, pace: Pace, limit: float | None = None
    ) -> None:
        self.record = record
        self._engine = engine
        self._jobs = jobs
        self._index = {job.request.id: i for i, job in enumerate(jobs)}
        self._pace = pace
        self._limit = limit
        self._late = False
        """The time is over."""
        self._ending: set[asyncio.Task[None]] = set()
        self._open = {(i, c) for i, job in enumerate(jobs) for c in range(job.request.n)}
        self.usage = Usage(prompt_tokens=sum(len(job.request.prompt) for job in jobs))

    async def news(self) -> AsyncGenerator[News, None]:
        """Yields what comes, choice by choice, until every choice has a finish reason: one piece for each step of the
        engine, or for all the steps that a client did not take in time.

        Raises:
            ApiError: a choice failed or was aborted from the server's side, or the time is over; the others are
                aborted then.
        """
        timer = self._start_timer()
        self.record.began()
        try:
            # Closing the engine's stream aborts what is left of the requests.
            async with aclosing(self._engine.generate(*(job.request for job in self._jobs))) as stream:
                async for deltas in stream:
                    for delta in merged(deltas) if self._pace.lags() else deltas:
                        index = self._index[delta.request]
                        if (index, delta.choice) not in self._open:
                            continue
                        news = self._take(index, delta)
                        if news.piece.stopped:
                            await self._engine.abort(delta.request, delta.choice)
                        yield news
            if self._open:  # the engine has nothing more to say, but every choice must have its end
                raise internal()
        except Exception:
            self._close_all("error")
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._close_all("abort")
            self.record.ended()

    def _take(self, index: int, delta: Delta) -> News:
        job = self._jobs[index]
        if delta.cached:
            self.usage.cached[index] = max(delta.cached, self.usage.cached.get(index, 0))
        if delta.finish in ("error", "abort"):
            self._close(index, delta.choice, delta.finish)
            raise self._too_late() if self._late else _failure(delta)
        piece = job.output.push(delta)
        self.record.took(index, delta.choice, delta, len(piece.token_ids), piece.text)
        self.usage.completion_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self._close(index, delta.choice, piece.finish_reason)
        return News(index, delta.choice, piece, delta.prompt_logprobs)

    def _start_timer(self) -> asyncio.TimerHandle | None:
        if self._limit is None:
            return None
        left = self._limit - (time.monotonic() - self.record.origin.arrived)
        return asyncio.get_running_loop().call_later(max(left, 0.0), self._expire)

    def _expire(self) -> None:
        """End what still runs; its news then end with an error."""
        self._late = True
        for name in self._index:
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

    def _close(self, index: int, choice: int, reason: str) -> None:
        self._open.remove((index, choice))
        self.record.choice_ended(index, choice, reason)

    def _close_all(self, reason: str) -> None:
        for index, choice in list(self._open):
            self._close(index, choice, reason)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """`deltas` with those of one choice joined to one."""
    whole: dict[tuple[str, int], Delta] = {}
    for delta in deltas:
        key = (delta.request, delta.choice)
        whole[key] = _joined(whole[key], delta) if key in whole else delta
    return list(whole.values())


def _joined(first: Delta, second: Delta) -> Delta:
    return msgspec.structs.replace(
        first,
        tokens=first.tokens + second.tokens,
        logprobs=None if first.logprobs is None else first.logprobs + (second.logprobs or []),
        finish=second.finish,
        stop_reason=second.stop_reason,
        error=second.error,
    )


def _failure(delta: Delta) -> ApiError:
    if delta.finish == "abort":
        return unavailable(delta.error or "The server is shutting down and ended this request.")
    return ApiError(500, delta.error, code="engine_error") if delta.error else internal()
