"""Requests run to their ends on an engine of this process, and what came of each."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from octavo.offline.metrics import RequestTimes
from octavo.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats, TokenLogprobDict
from octavo.text.output import Piece, RequestOutputBuilder
from octavo.types import Delta, Request, TokenLogprobs
from octavo.wire import Engine

logger = logging.getLogger(__name__)

TokenText = Callable[[int], str]


@dataclass
class Job:
    """A request on its way: `builder` turns its tokens into text, `output` gathers."""

    request: Request
    builder: RequestOutputBuilder
    output: RequestOutput
    token_text: TokenText
    open: set[int] = field(default_factory=set)
    """Choices that go on."""

    @classmethod
    def of(cls, request: Request, builder: RequestOutputBuilder, prompt: str | None, token_text: TokenText) -> Job:
        wants_logprobs = request.sampling.logprobs is not None
        choices = [
            CompletionOutput(index, "", [], 0.0 if wants_logprobs else None, [] if wants_logprobs else None)
            for index in range(request.n)
        ]
        output = RequestOutput(
            request.id,
            prompt,
            list(request.prompt),
            outputs=choices,
            num_cached_tokens=0,
            metrics=RequestStateStats(arrival_time=time.time(), queued_ts=time.monotonic()),
        )
        return cls(request, builder, output, token_text, set(range(request.n)))

    def take(self, delta: Delta) -> bool:
        """Add what came for an open choice; whether the engine must be told to end that choice (a stop string)."""
        choice = self.output.outputs[delta.choice]
        piece = self.builder.push(delta)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens or 0, piece.cached)
        top = self.request.sampling.prompt_logprobs
        asked = bool(self.request.sampling.prompt_logprob_token_ids)
        if piece.prompt_logprobs is not None and top is not None:
            self.output.prompt_logprobs = [
                None if entry is None else as_dict(entry, top, self.token_text, asked)
                for entry in piece.prompt_logprobs
            ]
        if piece.finish_reason == "error":
            logger.error("request %s failed: %s", self.request.id, piece.error)
            self.output.error = piece.error
        self._append(choice, piece)
        self._tick(len(piece.token_ids), delta.queued)
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
            self.open.discard(delta.choice)
            self.output.finished = not self.open
        return piece.stopped

    def _append(self, choice: CompletionOutput, piece: Piece) -> None:
        choice.text += piece.text
        assert isinstance(choice.token_ids, list)
        choice.token_ids += piece.token_ids
        if choice.logprobs is not None and piece.logprobs:
            top = self.request.sampling.logprobs or 0
            asked = bool(self.request.sampling.logprob_token_ids)
            choice.logprobs += [as_dict(entry, top, self.token_text, asked) for entry in piece.logprobs]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(e.logprob for e in piece.logprobs)

    def _tick(self, tokens: int, queued: float) -> None:
        times = self.output.metrics
        assert times is not None
        if not tokens:
            return
        now = time.monotonic()
        if not times.scheduled_ts:
            times.scheduled_ts = times.queued_ts + queued
        if not times.num_generation_tokens:
            times.first_token_ts = now
            times.first_token_latency = now - times.queued_ts
        times.last_token_ts = now
        times.num_generation_tokens += tokens


def as_dict(entry: TokenLogprobs, top: int, token_text: TokenText, asked: bool = False) -> TokenLogprobDict:
    """vLLM's form: the token itself and the `top` most probable ones (-1: all that came), by id. With `asked` the
    others are ids that the caller named: all of them, without rank."""
    others = entry.top if top < 0 or asked else entry.top[:top]
    found = {
        token: Logprob(logprob, None if asked else rank, token_text(token))
        for rank, (token, logprob) in enumerate(others, 1)
    }
    own = Logprob(entry.logprob, entry.rank, token_text(entry.token))
    return {entry.token: own, **{token: item for token, item in found.items() if token != entry.token}}


def run(engine: Engine, jobs: Sequence[Job], times: RequestTimes, on_end: Callable[[Job], object]) -> None:
    """Run all jobs to their ends. Whatever interrupts it (Ctrl-C included) leaves the engine without them.

    Raises:
        ValueError: the engine does not take one; none has run then.
    """
    live: dict[str, Job] = {}
    with Interrupts() as interrupts:
        try:
            for job in jobs:
                engine.add(job.request)
                live[job.request.id] = job
            while live:
                interrupts.check()
                if engine.idle:
                    raise RuntimeError(f"the engine has nothing to do, but {len(live)} requests have not ended")
                for delta in engine.step():
                    _deliver(engine, live, delta, times, on_end)
        except BaseException:
            forget(engine, live)
            raise


def _deliver(
    engine: Engine, live: dict[str, Job], delta: Delta, times: RequestTimes, on_end: Callable[[Job], object]
) -> None:
    job = live.get(delta.request)
    if job is None or delta.choice not in job.open:
        return
    if job.take(delta):
        engine.abort(delta.request, delta.choice)
    if job.output.finished:
        del live[delta.request]
        _observe(job, times)
        on_end(job)


class Interrupts:
    """Holds Ctrl-C back until `check` is called: cut in the middle, a step would leave the engine in disorder. A second
    one is not held back, nor is any where the program handles SIGINT itself."""

    def __init__(self) -> None:
        self._seen = False
        self._before: Any = None

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C came."""
        if self._seen:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if kind is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True


def forget(engine: Engine, request_ids: Iterable[str]) -> None:
    """Abort requests and let the engine come to rest."""
    for request_id in request_ids:
        engine.abort(request_id)
    while not engine.idle:
        engine.step()


def _observe(job: Job, times: RequestTimes) -> None:
    state = job.output.metrics
    assert state is not None
    times.prompt_tokens.add(len(job.request.prompt))
    times.generation_tokens.add(state.num_generation_tokens)
    times.first_token.add(state.first_token_latency)
    times.queue.add(max(0.0, state.scheduled_ts - state.queued_ts))
    times.whole.add(time.monotonic() - state.queued_ts)
