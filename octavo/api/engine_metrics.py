"""The engine's own numbers on /metrics, from the last `EngineStats` it told.

An engine that has died is followed by one that counts from 0 again. `EngineNumbers` adds the lives up, so that no
counter goes backwards; what a life did after its last snapshot is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.buckets import Counts
from octavo.config import EngineConfig
from octavo.types import EngineStats

_Read = Callable[[EngineStats], float]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _used(stats: EngineStats) -> float:
    return _share(stats.blocks_used, stats.blocks_total)


def _hit_rate(stats: EngineStats) -> float:
    return _share(stats.prefix_hits, stats.prefix_queries)


_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:num_requests_running", "Sequences being computed.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Sequences waiting to be computed.", lambda s: s.waiting),
    ("vllm:num_requests_swapped", "Always 0: nothing is swapped out. For older dashboards.", lambda s: 0),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks held by live sequences, 0 to 1.", _used),
    ("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", _used),
    ("vllm:cpu_cache_usage_perc", "Always 0: nothing is swapped out. For older dashboards.", lambda s: 0),
    (
        "octavo:kv_cache_filled_ratio",
        "Tokens held per token place in the blocks in use, 0 to 1; what is missing is waste.",
        lambda s: _share(s.kv_slots_filled, s.kv_slots_allocated) if s.kv_slots_allocated else 1.0,
    ),
    ("octavo:kv_slots_allocated", "Token places in the KV blocks in use.", lambda s: s.kv_slots_allocated),
    ("octavo:kv_slots_filled", "Of these, the places that hold a token.", lambda s: s.kv_slots_filled),
)

_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("vllm:gpu_prefix_cache_queries", "Older name of vllm:prefix_cache_queries.", lambda s: s.prefix_queries),
    ("vllm:gpu_prefix_cache_hits", "Older name of vllm:prefix_cache_hits.", lambda s: s.prefix_hits),
    ("vllm:num_preemptions", "Times a running sequence gave up its KV blocks.", lambda s: s.preemptions),
    ("vllm:corrupted_requests", "Sequences lost because their logits were not finite.", lambda s: s.failed_rows),
    ("octavo:engine_steps", "Steps the engine has run.", lambda s: s.steps),
    ("octavo:engine_failed_steps", "Steps that raised.", lambda s: s.failed_steps),
    ("octavo:engine_recomputed_tokens", "Tokens computed again after preemption.", lambda s: s.recomputed_tokens),
    ("octavo:engine_step_seconds", "Time spent in steps.", lambda s: s.step_seconds),
    ("octavo:engine_host_seconds", "Time spent planning and committing.", lambda s: s.host_seconds),
)

_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineStats], Counts]], ...] = (
    ("vllm:iteration_tokens_total", "Tokens computed in a step.", lambda s: s.step_tokens),
    ("vllm:request_num_preemptions", "Preemptions of a choice.", lambda s: s.choice_preemptions),
)

_SUMS = (
    "steps",
    "failed_steps",
    "failed_rows",
    "preemptions",
    "recomputed_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "prefix_queries",
    "prefix_hits",
    "generation_tokens",
    "step_seconds",
    "host_seconds",
)
"""What an engine counts from its start."""


def total(lives: EngineStats, last: EngineStats) -> EngineStats:
    """`last` with what earlier lives have counted."""
    return msgspec.structs.replace(
        last,
        **{name: getattr(lives, name) + getattr(last, name) for name in _SUMS},
        step_tokens=lives.step_tokens.plus(last.step_tokens),
        choice_preemptions=lives.choice_preemptions.plus(last.choice_preemptions),
    )


class EngineNumbers(Collector):
    """All lives of the engine as one."""

    def __init__(self, labels: dict[str, str], config: EngineConfig) -> None:
        self.up = False
        """It takes requests now; while it does not, the gauges read 0."""
        self.restarts = 0
        self.replayed = 0
        self.cache_dtype = ""
        """Type of the KV cache, which "auto" leaves to the model; empty until it is loaded."""
        self._labels = labels
        self._settings = {
            option.name: str(getattr(config, option.name))
            for option in fields(config)
            if option.metadata["group"] == "cache"
        }
        self._earlier = EngineStats()
        self._last = EngineStats()

    def take(self, stats: EngineStats | None, restarts: int, up: bool, replayed: int = 0) -> None:
        """What the engine tells now, None if nothing; it has been started again `restarts` times, and `replayed`
        requests have gone on after that."""
        if restarts != self.restarts:
            self._earlier = total(self._earlier, self._last)
            self._last = EngineStats()
            self.restarts = restarts
        if stats is not None:
            self._last = stats
        self.up, self.replayed = up, replayed

    def now(self) -> EngineStats:
        """Gauges of this moment and totals over all lives."""
        now = total(self._earlier, self._last)
        if self.up:
            return now
        return msgspec.structs.replace(
            now, running=0, waiting=0, held_back=0, blocks_used=0, kv_slots_allocated=0, kv_slots_filled=0, groups=[]
        )

    def collect(self) -> Iterator[Metric]:
        now = self.now()
        for name, text, read in _GAUGES:
            yield gauge(name, text, self._labels, read(now))
        for name, text, read in _COUNTERS:
            yield counter(name, text, self._labels, read(now))
        for name, text, counts in _HISTOGRAMS:
            yield histogram(name, text, self._labels, counts(now))
        rate = "Share of looked-up tokens found in the prefix cache since the start. For older dashboards."
        yield gauge("vllm:gpu_prefix_cache_hit_rate", rate, self._labels, _hit_rate(now))
        yield gauge("octavo:engine_up", "1 while the engine takes requests, else 0.", self._labels, self.up)
        yield counter("octavo:engine_restarts", "Times the engine was started again.", self._labels, self.restarts)
        replayed = "Requests that went on after a restart of the engine."
        yield counter("octavo:requests_replayed", replayed, self._labels, self.replayed)
        yield self._waiting(now)
        yield from self._blocks(now)
        if now.blocks_total and self.cache_dtype:
            text = "The settings of the KV cache, as labels."
            settings = {
                **self._settings,
                "cache_dtype": self.cache_dtype,
                "num_gpu_blocks": str(now.blocks_total),
                "num_cpu_blocks": "0",
            }
            yield gauge("vllm:cache_config_info", text, {**self._labels, **settings}, 1)

    def _waiting(self, now: EngineStats) -> Metric:
        text = (
            "Sequences waiting: for room (capacity), or for a sibling to compute the prompt that they share (deferred)."
        )
        metric = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=[*self._labels, "reason"])
        for reason, value in (("capacity", now.waiting - now.held_back), ("deferred", now.held_back)):
            metric.add_metric([*self._labels.values(), reason], value)
        return metric

    def _blocks(self, now: EngineStats) -> Iterator[Metric]:
        """By KV group, where the engine tells."""
        for name, text in (
            ("total", "KV blocks."),
            ("used", "KV blocks held by live sequences."),
            ("cached", "KV blocks with content that a new prompt can share, held or free."),
        ):
            metric = GaugeMetricFamily(f"octavo:kv_blocks_{name}", text, labels=[*self._labels, "group"])
            for group, use in enumerate(now.groups):
                metric.add_metric([*self._labels.values(), str(group)], getattr(use, name))
            yield metric


def gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    metric = CounterMetricFamily(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def histogram(name: str, text: str, labels: dict[str, str], counts: Counts) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
    metric.add_metric(list(labels.values()), list(zip(bounds, counts.cumulative(), strict=True)), counts.sum)
    return metric
