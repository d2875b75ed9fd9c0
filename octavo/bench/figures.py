"""From what came of requests to the figures of a run: latencies, throughput, goodput, concurrency.

Latencies are milliseconds, in vLLM's terms: TTFT, time to first token; TPOT, time per output token after the first;
ITL, time between two events with text; E2EL, from sending to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.bench.client import Outcome

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""The latencies by their short names."""


@dataclass(frozen=True)
class Distribution:
    """Some values in few numbers; all 0 where there are no values."""

    mean: float
    median: float
    std: float
    """Of the values themselves (divided by their number)."""
    percentiles: dict[float, float]

    @staticmethod
    def of(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        """`percentiles` are 0 to 100; between two values they are interpolated linearly."""
        array = np.asarray(values if len(values) else [0.0], dtype=float)
        return Distribution(
            float(array.mean()),
            float(np.median(array)),
            float(array.std()),
            {p: float(np.percentile(array, p)) for p in percentiles},
        )


@dataclass(frozen=True)
class Figures:
    """The figures of a run. Throughput is per second."""

    completed: int
    failed: int
    duration: float
    """Seconds."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    """Requests per second that met every limit; None where no limits were given."""
    max_output_tokens_per_s: float
    """Most events with text in one second; seconds are counted from the beginning."""
    max_concurrent_requests: int
    latencies: dict[str, Distribution]
    """By the keys of `METRICS`, in milliseconds."""

    @staticmethod
    def of(
        outcomes: Sequence[Outcome],
        *,
        duration: float | None = None,
        percentiles: Sequence[float] = (99,),
        goodput: Mapping[str, float] | None = None,
    ) -> Figures:
        """
        Args:
            duration: seconds; None for the time from the first request to the last answer.
            percentiles: 0 to 100.
            goodput: limits in milliseconds by ttft, tpot, e2el.
        """
        done = [outcome for outcome in outcomes if outcome.error is None]
        if duration is None:
            duration = max((o.ended for o in outcomes), default=0.0) - min((o.asked for o in outcomes), default=0.0)
        seconds = duration or 1e-9
        prompt = sum(outcome.prompt_tokens for outcome in done)
        output = sum(outcome.output_tokens for outcome in done)
        return Figures(
            completed=len(done),
            failed=len(outcomes) - len(done),
            duration=duration,
            total_input_tokens=prompt,
            total_output_tokens=output,
            request_throughput=len(done) / seconds,
            output_throughput=output / seconds,
            total_token_throughput=(prompt + output) / seconds,
            request_goodput=sum(is_good(o, goodput) for o in done) / seconds if goodput else None,
            max_output_tokens_per_s=_busiest_second(done),
            max_concurrent_requests=peak_concurrency(outcomes),
            latencies={name: Distribution.of(values, percentiles) for name, values in latencies(done).items()},
        )

    def as_json(self, metrics: Sequence[str] = tuple(METRICS)) -> dict[str, Any]:
        """The figures under the names that vLLM's result files have."""
        fields = {name: value for name, value in vars(self).items() if name != "latencies"}
        for metric in metrics:
            found = self.latencies[metric]
            fields |= {f"{name}_{metric}_ms": getattr(found, name) for name in ("mean", "median", "std")}
            fields |= {f"p{p:g}_{metric}_ms": value for p, value in found.percentiles.items()}
        return fields


def ttft(outcome: Outcome) -> float | None:
    """Milliseconds; None for an answer without text."""
    return None if outcome.first is None else 1000 * (outcome.first - outcome.asked)


def tpot(outcome: Outcome) -> float | None:
    """Milliseconds; None for an answer of less than two tokens or without text."""
    if outcome.first is None or outcome.output_tokens < 2:
        return None
    return 1000 * (outcome.ended - outcome.first) / (outcome.output_tokens - 1)


def itls(outcome: Outcome) -> list[float]:
    """Milliseconds."""
    return [1000 * (later - earlier) for earlier, later in zip(outcome.times, outcome.times[1:], strict=False)]


def e2el(outcome: Outcome) -> float:
    """Milliseconds."""
    return 1000 * (outcome.ended - outcome.asked)


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """All values of each of `METRICS`, in milliseconds."""
    return {
        "ttft": [value for outcome in outcomes if (value := ttft(outcome)) is not None],
        "tpot": [value for outcome in outcomes if (value := tpot(outcome)) is not None],
        "itl": [value for outcome in outcomes for value in itls(outcome)],
        "e2el": [e2el(outcome) for outcome in outcomes],
    }


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether it met every one of `limits` (milliseconds by ttft, tpot, e2el). A single token has a TPOT of 0; an
    answer without text has no first token and does not meet a limit on it."""
    if outcome.error is not None:
        return False
    first = ttft(outcome)
    values = {
        "ttft": float("inf") if first is None else first,
        "tpot": tpot(outcome) or 0.0,
        "e2el": e2el(outcome),
    }
    return all(values[name] <= limit for name, limit in limits.items())


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were under way at one time."""
    changes = sorted([(o.asked, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])
    running = peak = 0
    for _, change in changes:  # at one and the same time ends come before beginnings
        running += change
        peak = max(peak, running)
    return peak


def _busiest_second(outcomes: Sequence[Outcome]) -> float:
    times = np.asarray([time for outcome in outcomes for time in outcome.times])
    if not len(times):
        return 0.0
    begun = min(outcome.asked for outcome in outcomes)
    return float(np.bincount((times - begun).astype(int)).max())
