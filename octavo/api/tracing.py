"""A span for each call, sent to an OpenTelemetry collector (OTLP over HTTP) under vLLM's attribute names.

The span is made when the call has ended, with the times it had: nothing is kept open, and nothing happens while tokens
pass by. It is a child of the caller's span where the request came with a `traceparent`. OpenTelemetry is an extra, and
imported only where a collector is named; its own variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, …) count.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import octavo
from octavo.api.record import Record
from octavo.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACES_PATH = "/v1/traces"
_SEND_SECONDS = 3.0
"""Time to send a batch, retries included: a collector that is away holds up the end of the server no longer."""


class Tracer:
    """Makes a span of each call that has ended."""

    wants_text = False

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "octavo"}))
        self._provider = TracerProvider(resource=resource)  # sends what is left when the program ends
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo", octavo.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def began(self, record: Record) -> None:
        pass

    def ended(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns() - int((time.monotonic() - record.origin.arrived - record.seconds) * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(record.origin.trace),
            kind=SpanKind.SERVER,
            attributes=attributes_of(record),
            start_time=end - int(record.seconds * 1e9),
        )
        if any(story.reason == "error" for story in record.choices.values()):
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def attributes_of(record: Record) -> dict[str, str | int | float | list[str]]:
    """What the span says of a call; times are seconds, and those that never came are left out."""
    sampling, stories = record.requests[0].sampling, list(record.choices.values())
    found: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.operation.name": "chat" if "chat" in record.origin.route else "text_completion",
        "gen_ai.request.id": record.origin.request_id,
        "gen_ai.request.model": record.origin.model,
        "gen_ai.response.model": record.origin.model,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": record.requests[0].max_tokens,
        "gen_ai.response.finish_reasons": [str(story.reason) for story in stories],
        "gen_ai.usage.num_sequences": len(stories),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.generated_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.latency.time_in_queue": record.queued,
        "gen_ai.latency.time_to_first_token": record.first_token,
        "gen_ai.latency.e2e": record.seconds,
    }
    if begun := [story for story in stories if story.tokens]:
        scheduled = min(story.scheduled for story in begun)
        first, last = min(story.first for story in begun), max(story.last for story in begun)
        found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
        found["gen_ai.latency.time_in_model_decode"] = last - first
        found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return {name: value for name, value in found.items() if value is not None}


def tracer_of(config: EngineConfig) -> Tracer | None:
    """What traces calls; None where no collector is named.

    Raises:
        ConfigError: the packages are not installed, or the URL is none.
    """
    url = config.otlp_traces_endpoint
    if not url:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:  # "http://[::1"
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, got {url!r} "
            "(OTLP over HTTP; gRPC is not spoken)."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({error.name}): "
            "pip install octavo[otel]"
        ) from None
    endpoint = url if parts.path.strip("/") else url.rstrip("/") + _TRACES_PATH
    return Tracer(OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_SECONDS))
