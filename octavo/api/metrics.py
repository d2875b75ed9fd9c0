"""What /metrics tells Prometheus, under vLLM's names so that its dashboards work.

Gauges and totals of the engine come from an `EngineStats` snapshot taken when the page is asked for; times and sizes of
requests are observed where their tokens pass by. Every choice of a request counts once, whatever way it ends, so the
totals over `finished_reason` and the counts of the per-request histograms agree. Names that vLLM has renamed are given
twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from octavo import buckets
from octavo.types import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_CHOICES = (1, 2, 5, 10, 20)


def _sizes(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `largest`."""
    sizes: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > largest:
                return sizes
            sizes.append(step * scale)
        scale *= 10


class _EngineTotals(Collector):
    """The engine's own numbers, as of the last snapshot."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        s = self.stats
        used = s.blocks_used / s.blocks_total if s.blocks_total else 0.0
        filled = s.kv_slots_filled / s.kv_slots_allocated if s.kv_slots_allocated else 1.0
        yield self._gauge("vllm:num_requests_running", "Sequences being computed.", s.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting to be computed.", s.waiting)
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of the KV blocks held by live sequences, 0 to 1.", used)
        yield self._gauge("octavo:kv_cache_filled_ratio", "Tokens held per token place allocated, 0 to 1.", filled)
        for name in ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"):
            yield self._counter(name, "Tokens looked up in the prefix cache.", s.prefix_queries)
        for name in ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"):
            yield self._counter(name, "Tokens found in the prefix cache.", s.prefix_hits)
        yield self._counter("vllm:num_preemptions", "Times a running sequence gave up its KV blocks.", s.preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of admitted sequences.", s.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens not computed again.", s.cached_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", s.generation_tokens)
        yield self._counter("octavo:engine_steps", "Steps the engine has run.", s.steps)
        yield self._counter("octavo:engine_failed_steps", "Steps that raised.", s.failed_steps)
        yield self._counter(
            "octavo:engine_recomputed_tokens", "Tokens computed again after preemption.", s.recomputed_tokens
        )
        yield self._counter("octavo:engine_step_seconds", "Time spent in steps.", s.step_seconds)
        yield self._counter("octavo:engine_host_seconds", "Time spent planning and committing.", s.host_seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=self._names)
        metric.add_metric(self._values, value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, text, labels=self._names)
        metric.add_metric(self._values, value)
        return metric


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}
        self._labels = labels
        self._engine = _EngineTotals(labels)
        self._registry.register(self._engine)
        sizes = _sizes(max_model_len)
        self._first_token = self._histogram(
            ["vllm:time_to_first_token_seconds"], "From arrival to the first token.", buckets.FIRST_TOKEN
        )
        self._between_tokens = self._histogram(
            ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
            "Between two tokens of a choice.",
            _BETWEEN_TOKENS,
        )
        self._per_token = self._histogram(
            ["vllm:request_time_per_output_token_seconds"],
            "Mean time per token after the first, by choice.",
            _BETWEEN_TOKENS,
        )
        self._latency = self._histogram(
            ["vllm:e2e_request_latency_seconds"], "From arrival to the end of a choice.", buckets.LATENCY
        )
        self._prompt_tokens = self._histogram(["vllm:request_prompt_tokens"], "Prompt tokens of a choice.", sizes)
        self._generation_tokens = self._histogram(
            ["vllm:request_generation_tokens"], "Tokens generated for a choice.", sizes
        )
        self._asked_choices = self._histogram(["vllm:request_params_n"], "The parameter n.", _CHOICES)
        self._asked_tokens = self._histogram(["vllm:request_params_max_tokens"], "The parameter max_tokens.", sizes)
        finished = Counter(
            "vllm:request_success",
            "Choices ended, by finish reason.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._finished = {reason: finished.labels(**labels, finished_reason=reason) for reason in FINISH_REASONS}

    def _histogram(self, names: Sequence[str], text: str, buckets: Iterable[float]) -> list[Histogram]:
        edges = list(buckets)
        return [
            Histogram(name, text, list(self._labels), registry=self._registry, buckets=edges).labels(**self._labels)
            for name in names
        ]

    def asked(self, choices: int, max_tokens: int) -> None:
        """A prompt was accepted."""
        _observe(self._asked_choices, choices)
        _observe(self._asked_tokens, max_tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of a choice came `seconds` after the request."""
        _observe(self._first_token, seconds)

    def next_token(self, seconds: float) -> None:
        """A later token of a choice came `seconds` after the one before."""
        _observe(self._between_tokens, seconds)

    def finished(self, reason: str, seconds: float, decode_seconds: float, prompt_tokens: int, tokens: int) -> None:
        """A choice ended for `reason`, `seconds` after the request and `decode_seconds` after its first token."""
        self._finished[reason].inc()
        _observe(self._latency, seconds)
        _observe(self._prompt_tokens, prompt_tokens)
        _observe(self._generation_tokens, tokens)
        if tokens > 1:
            _observe(self._per_token, decode_seconds / (tokens - 1))

    def page(self, stats: EngineStats | None) -> bytes:
        """The exposition text, with the engine's numbers from `stats` (None: the ones told before)."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self._registry)


def _observe(histograms: list[Histogram], value: float) -> None:
    for histogram in histograms:
        histogram.observe(value)
