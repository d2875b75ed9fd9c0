"""What `LLM.get_metrics` returns: the numbers a server shows on /metrics, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo import buckets
from octavo.buckets import Counts
from octavo.types import EngineStats


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


class RequestTimes:
    """Histograms of finished requests."""

    def __init__(self) -> None:
        self.prompt_tokens = Counts.of(buckets.TOKENS)
        self.generation_tokens = Counts.of(buckets.TOKENS)
        self.first_token = Counts.of(buckets.FIRST_TOKEN)
        self.queue = Counts.of(buckets.LATENCY)
        self.whole = Counts.of(buckets.LATENCY)

    def __iter__(self) -> Iterator[tuple[str, Counts]]:
        """(name, counts) of each."""
        yield "request_prompt_tokens", self.prompt_tokens
        yield "request_generation_tokens", self.generation_tokens
        yield "time_to_first_token_seconds", self.first_token
        yield "request_queue_time_seconds", self.queue
        yield "e2e_request_latency_seconds", self.whole


def _histogram(name: str, labels: dict[str, str], counts: Counts) -> Histogram:
    totals = counts.cumulative()
    return Histogram(
        f"vllm:{name}",
        labels,
        totals[-1],
        counts.sum,
        dict(zip([*map(str, counts.bounds), "+Inf"], totals, strict=True)),
    )


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
        "corrupted_requests": stats.failed_rows,
    }
    histograms = [
        *times,
        ("iteration_tokens_total", stats.step_tokens),
        ("request_num_preemptions", stats.choice_preemptions),
    ]
    finished = {reason: stats.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error", "repetition")}
    return [
        *(Gauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", labels, value) for name, value in counters.items()),
        *(
            Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
            for reason, count in finished.items()
        ),
        *(_histogram(name, labels, counts) for name, counts in histograms),
    ]
