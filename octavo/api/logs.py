"""Log lines of the front end: what each request asked and got, and how the server does while it works."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextvars import copy_context
from typing import Any, NamedTuple

import msgspec

from octavo.api.metrics import Metrics
from octavo.api.record import Record
from octavo.config import EngineConfig
from octavo.logs import REQUEST_ID
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.types import EngineStats

logger = logging.getLogger("octavo.requests")
stats_logger = logging.getLogger("octavo.stats")

STATS_SECONDS = 10.0


class RequestLog:
    """One line when a request starts, one when it has ended.

    Args:
        tokenizer: turns prompts back into text.
        outputs: say what was generated, too.
        longest: characters of a text to show at most; None for all.
    """

    def __init__(self, tokenizer: Tokenizer, outputs: bool, longest: int | None) -> None:
        self.wants_text = outputs
        self._tokenizer = tokenizer
        self._longest = longest

    def began(self, record: Record) -> None:
        requests = record.requests
        fields = {
            "route": record.origin.route,
            "model": record.origin.model,
            "client": record.origin.client,
            "prompt_tokens": record.prompt_tokens,
            "parameters": settings_of(requests[0].sampling),
            "prompt": _alone([self._prompt(request.prompt) for request in requests]),
        }
        self._write("request started", record, fields)

    def ended(self, record: Record) -> None:
        reasons = Counter(story.reason for story in record.choices.values())
        first = record.first_token
        fields = {
            "finish": "+".join(f"{reason}*{n}" if n > 1 else str(reason) for reason, n in sorted(reasons.items())),
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.generated_tokens,
            "cached_tokens": record.cached_tokens,
            "ttft_ms": None if first is None else round(first * 1000, 1),
            "total_ms": round(record.seconds * 1000, 1),
            "client": record.origin.client,
        }
        if self.wants_text:
            fields["output"] = _alone([self._cut("".join(story.text)) for story in record.choices.values()])
        self._write("request ended", record, fields)

    def _write(self, text: str, record: Record, fields: dict[str, Any]) -> None:
        logger.info(text, extra={"request_id": record.origin.request_id, "fields": fields})

    def _prompt(self, ids: tuple[int, ...]) -> str:
        """A token is at least a character, but for parts of one: so many of them are enough."""
        shown = ids if self._longest is None else ids[: self._longest]
        return self._cut(self._tokenizer.decode(shown, skip_special_tokens=False))

    def _cut(self, text: str) -> str:
        return text if self._longest is None else text[: self._longest]


def settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the usual ones."""
    found: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    return found


def _alone(items: list[str]) -> str | list[str]:
    """One without a list around it."""
    return items[0] if len(items) == 1 else items


def request_log(config: EngineConfig, tokenizer: Tokenizer) -> RequestLog | None:
    """What logs requests; None where they are not logged."""
    if not config.enable_log_requests:
        return None
    return RequestLog(tokenizer, config.enable_log_outputs, config.max_log_len)


class _Moment(NamedTuple):
    """Numbers at one time."""

    seconds: float
    prompt_tokens: int
    generated_tokens: int
    engine: EngineStats


class StatsLog:
    """A line every ten seconds while there is work. Between requests nothing runs."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def poke(self) -> None:
        """A request has come."""
        if self._task is None or self._task.done():
            context = copy_context()
            context.run(REQUEST_ID.set, None)  # its lines are of all requests
            self._task = context.run(asyncio.create_task, self._run())

    async def _run(self) -> None:
        before = self._read()
        while True:
            await asyncio.sleep(STATS_SECONDS)
            await self._metrics.refresh()
            at = self._read()
            tokens = at.prompt_tokens - before.prompt_tokens + at.generated_tokens - before.generated_tokens
            if not (tokens or at.engine.running or at.engine.waiting):
                return
            self._write(before, at)
            before = at

    def _read(self) -> _Moment:
        requests = self._metrics.requests
        now = time.monotonic()
        return _Moment(now, requests.prompt_tokens, requests.generated_tokens, self._metrics.engine.now())

    def _write(self, before: _Moment, at: _Moment) -> None:
        seconds, then, now = at.seconds - before.seconds, before.engine, at.engine
        stats_logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            (at.prompt_tokens - before.prompt_tokens) / seconds,
            (at.generated_tokens - before.generated_tokens) / seconds,
            now.running,
            now.waiting,
            100 * now.blocks_used / max(now.blocks_total, 1),
            100 * (now.prefix_hits - then.prefix_hits) / max(now.prefix_queries - then.prefix_queries, 1),
        )
