"""Spans, as a real collector would get them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from octavo.api.tracing import tracer_of
from octavo.config import ConfigError, EngineConfig
from tests.api.harness import GREEDY, ScriptEngine, parts_of, running, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Post)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Post(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.add(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.server.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def value(item: Any) -> Any:
        kind = item.WhichOneof("value")
        found = getattr(item, kind)
        return [value(one) for one in found.values] if kind == "array_value" else found

    return {item.key: value(item.value) for item in span.attributes}


def test_a_request_is_a_span_under_its_caller(collector: Collector) -> None:
    engine = ScriptEngine(cached=2, queued=0.001, pause=0.003)
    began = time.time()
    with running(parts_of(engine), otlp_traces_endpoint=collector.url) as url:
        headers = {"X-Request-Id": "r-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {**GREEDY, "prompt": "Hello", "max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.9}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        until(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert collector.paths == {"/v1/traces"} and collector.services == {"octavo"}
    found = attributes(span)
    latency = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": "r-1",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.cached_tokens": 2,
    }
    assert set(latency) == {
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.e2e",
        "gen_ai.latency.time_in_model_prefill",
        "gen_ai.latency.time_in_model_decode",
        "gen_ai.latency.time_in_model_inference",
    }
    assert latency["gen_ai.latency.time_in_queue"] == pytest.approx(0.001)
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(latency["gen_ai.latency.e2e"], abs=1e-6)
    assert 0 < latency["gen_ai.latency.time_to_first_token"] < seconds
    assert began - 0.1 < span.start_time_unix_nano / 1e9 < span.end_time_unix_nano / 1e9 < time.time() + 0.1


def test_streams_and_failures_are_spans_too(collector: Collector) -> None:
    with running(parts_of(ScriptEngine(fail_after=2)), otlp_traces_endpoint=f"{collector.url}/v1/traces") as url:
        messages = [{"role": "user", "content": "Hello"}]
        body = {**GREEDY, "messages": messages, "stream": True}
        assert "error" in httpx.post(f"{url}/v1/chat/completions", json=body, headers={"traceparent": "rubbish"}).text
        until(lambda: len(collector.spans) == 1)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": 5}).status_code == 400
        httpx.get(f"{url}/v1/models")
    (span,) = collector.spans
    assert span.parent_span_id == b"" and len(span.trace_id) == 16
    assert span.status.code == span.status.STATUS_CODE_ERROR
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.response.finish_reasons"] == ["error"]
    assert found["gen_ai.usage.completion_tokens"] == 2


def test_a_caller_that_is_not_sampled_is_respected(collector: Collector) -> None:
    with running(parts_of(ScriptEngine()), otlp_traces_endpoint=collector.url) as url:
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
            httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a", "max_tokens": 2}, headers=headers)
        until(lambda: len(collector.spans) == 1)
        time.sleep(0.1)
    assert len(collector.spans) == 1


def test_a_collector_that_is_away_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with running(parts_of(ScriptEngine()), otlp_traces_endpoint="http://127.0.0.1:9") as url:
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a", "max_tokens": 2})
            assert answer.status_code == 200


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://x:4317", "http://", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as http"):
        tracer_of(EngineConfig(otlp_traces_endpoint=url))


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install octavo\[otel\]"):
        tracer_of(EngineConfig(otlp_traces_endpoint="http://localhost:4318"))


def test_nothing_is_imported_unasked() -> None:
    code = (
        "import sys, octavo.api.server\n"
        "from octavo.api.frontend import Service; from octavo.config import EngineConfig\n"
        "Service(EngineConfig())\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'google.protobuf', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
