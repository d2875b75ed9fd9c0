"""What /metrics tells Prometheus, under vLLM's names so that its dashboards work.

Times and sizes of requests are observed where their tokens pass by, and kept as plain counts: a token costs a few
additions. Every choice of a request counts once, whatever way it ends, so the totals over `finished_reason` and the
counts of the per-choice histograms agree. Names that vLLM has renamed are given twice. docs/observability.md lists
them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from octavo import buckets
from octavo.api.engine_metrics import EngineNumbers, counter, histogram
from octavo.api.http_metrics import HttpNumbers
from octavo.buckets import Counts
from octavo.client import EngineUnavailable
from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.client import AsyncEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTIONS = ("max_num_queued_reqs", "max_num_reqs_per_key")
_STATS_SECONDS = 2.0
"""The engine answers between steps; while one takes longer, its last numbers are shown."""


class RequestNumbers(Collector):
    """What happened to requests, as the front end saw it. Seconds and tokens."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.prompt_tokens = 0
        """Of prompts that have been read."""
        self.cached_tokens = 0
        """Of these, found in the prefix cache."""
        self.generated_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = dict.fromkeys(REJECTIONS, 0)
        self.first_token = Counts.of(buckets.FIRST_TOKEN)
        self.between_tokens = Counts.of(buckets.BETWEEN_TOKENS)
        self.per_token = Counts.of(buckets.BETWEEN_TOKENS)
        self.latency = Counts.of(buckets.LATENCY)
        self.queue = Counts.of(buckets.LATENCY)
        self.inference = Counts.of(buckets.LATENCY)
        self.prefill = Counts.of(buckets.LATENCY)
        self.decode = Counts.of(buckets.LATENCY)
        self.prompt_sizes = Counts.of(buckets.TOKENS)
        self.computed_sizes = Counts.of(buckets.TOKENS)
        self.answer_sizes = Counts.of(buckets.TOKENS)
        self.longest_answers = Counts.of(buckets.TOKENS)
        self.asked_choices = Counts.of(buckets.CHOICES)
        self.asked_tokens = Counts.of(buckets.TOKENS)

    def collect(self) -> Iterator[Metric]:
        for name, text, counts in (
            ("time_to_first_token_seconds", "From arrival to the first token of a choice.", self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a choice.", self.between_tokens),
            ("time_per_output_token_seconds", "Older name of vllm:inter_token_latency_seconds.", self.between_tokens),
            ("request_time_per_output_token_seconds", "Mean time per token after the first.", self.per_token),
            ("e2e_request_latency_seconds", "From arrival to the end of a choice.", self.latency),
            ("request_queue_time_seconds", "From the engine's taking a request to its first step.", self.queue),
            ("request_prefill_time_seconds", "From a request's first step to the first token.", self.prefill),
            ("request_decode_time_seconds", "From the first token to the last.", self.decode),
            ("request_inference_time_seconds", "From a request's first step to the last token.", self.inference),
            ("request_prompt_tokens", "Prompt tokens of a choice.", self.prompt_sizes),
            ("request_prefill_kv_computed_tokens", "Prompt tokens that no cache held.", self.computed_sizes),
            ("request_generation_tokens", "Tokens generated for a choice.", self.answer_sizes),
            ("request_max_num_generation_tokens", "Tokens of the longest choice of a prompt.", self.longest_answers),
            ("request_params_n", "The parameter n.", self.asked_choices),
            ("request_params_max_tokens", "The parameter max_tokens.", self.asked_tokens),
        ):
            yield histogram(f"vllm:{name}", text, self._labels, counts)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that have been read.", self.prompt_tokens),
            ("prompt_tokens_cached", "Of these, the ones found in the prefix cache.", self.cached_tokens),
            ("generation_tokens", "Tokens generated.", self.generated_tokens),
        ):
            yield counter(f"vllm:{name}", text, self._labels, value)
        sources = {
            "local_compute": self.prompt_tokens - self.cached_tokens,
            "local_cache_hit": self.cached_tokens,
            "external_kv_transfer": 0,
        }
        yield self._by("prompt_tokens_by_source", "Tokens of prompts by where their KV came from.", "source", sources)
        yield self._by("request_success", "Choices ended, by finish reason.", "finished_reason", self.finished)
        yield self._by("admission_rejections", "Requests not taken, by the limit in the way.", "reason", self.rejected)

    def _by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        metric = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), key], value)
        return metric


class Metrics:
    """One server's metrics, from its start on, in a registry of their own."""

    def __init__(self, config: EngineConfig) -> None:
        labels = {"model_name": (*config.served_model_name, config.model)[0], "engine": "0"}
        self._registry = CollectorRegistry()
        self._engine: AsyncEngine | None = None
        self.engine = EngineNumbers(labels, config)
        self.requests = RequestNumbers(labels)
        self._registry.register(self.engine)
        self._registry.register(self.requests)
        self.http = HttpNumbers(self._registry)
        ProcessCollector(registry=self._registry)
        ProcessCollector("octavo_engine", pid=self._engine_pid, registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def watch(self, engine: AsyncEngine) -> None:
        """From now on the numbers of `engine` are shown."""
        self._engine = engine

    async def refresh(self) -> None:
        """Ask the engine for its numbers; without an answer those told before stay."""
        engine, stats = self._engine, None
        if engine is None:
            return
        restarts = engine.restarts
        if engine.status.state == "ready":
            with suppress(EngineUnavailable, asyncio.TimeoutError):
                stats = await asyncio.wait_for(engine.stats(), _STATS_SECONDS)
        if engine.restarts != restarts:
            stats = None  # they are those of a life that is over
        self.engine.take(stats, engine.restarts, engine.status.state == "ready", engine.replayed)

    async def page(self) -> bytes:
        """The exposition text."""
        await self.refresh()
        return generate_latest(self._registry)

    def _engine_pid(self) -> int | str:
        """Of the engine's process; one that nobody has where it runs in this one."""
        return getattr(self._engine, "pid", None) or "none"
