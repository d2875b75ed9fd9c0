"""What `LLM.get_metrics` returns: the numbers a server shows on /metrics, under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from octavo import buckets
from octavo.types import EngineStats

TOKEN_BUCKETS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))


@dataclass(frozen=True)
class Metric:
    """A number with a name; `labels` tell apart those that share one."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """Grows from the start."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """Of this moment."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """`buckets` count the observations of at most each bound; the last bound is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Observations:
    """What a histogram is made of."""

    name: str
    bounds: Sequence[float]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self, labels: dict[str, str]) -> Histogram:
        total, buckets = 0, {}
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(self.name, labels, total, self.sum, buckets)


class RequestTimes:
    """Histograms of finished requests."""

    def __init__(self) -> None:
        self.prompt_tokens = Observations("vllm:request_prompt_tokens", TOKEN_BUCKETS)
        self.generation_tokens = Observations("vllm:request_generation_tokens", TOKEN_BUCKETS)
        self.first_token = Observations("vllm:time_to_first_token_seconds", buckets.FIRST_TOKEN)
        self.whole = Observations("vllm:e2e_request_latency_seconds", buckets.LATENCY)

    def __iter__(self) -> Iterator[Observations]:
        return iter((self.prompt_tokens, self.generation_tokens, self.first_token, self.whole))


def metrics_of(stats: EngineStats, times: RequestTimes, model: str) -> list[Metric]:
    """All metrics of an engine that serves `model`."""
    labels = {"model_name": model, "engine": "0"}
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0,
    }
    counters = {
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_cached": stats.cached_prompt_tokens,
        "generation_tokens": stats.generation_tokens,
    }
    finished = {reason: stats.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error", "repetition")}
    return [
        *(Gauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", labels, value) for name, value in counters.items()),
        *(
            Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
            for reason, count in finished.items()
        ),
        *(observed.histogram(labels) for observed in times),
    ]
