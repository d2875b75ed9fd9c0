"""/metrics."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.api.engine_metrics import EngineNumbers
from octavo.api.metrics import Metrics
from octavo.client import Status
from octavo.config import EngineConfig
from octavo.types import BlockUse, EngineStats
from tests.api.conftest import Api
from tests.api.harness import MODEL, ScriptEngine, parts_of, running, until
from tests.api.test_abort import send


def numbers(api: Api) -> dict[str, float]:
    return parsed(api.http.get("/metrics").text)


def parsed(page: str) -> dict[str, float]:
    """Every sample of a page but the buckets, by name and labels other than those of the model."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"
            if "le" not in labels:
                found["/".join([sample.name, *labels.values()])] = sample.value
    return found


def change(api: Api, before: dict[str, float], name: str) -> float:
    return numbers(api)[name] - before.get(name, 0.0)


def total(values: dict[str, float]) -> float:
    return sum(value for name, value in values.items() if name.startswith("vllm:request_success_total/"))


def test_metric_01_aborted_requests_are_counted(api: Api) -> None:
    before = numbers(api)
    api.engine.pause = 0.005
    for _ in range(5):
        connection = send(api, "/v1/completions", stream=True)
        connection.recv(64)
        connection.close()
    until(lambda: change(api, before, "vllm:request_success_total/abort") == 5)
    after = numbers(api)
    for name in (
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_prompt_tokens_count",
        "vllm:request_generation_tokens_count",
    ):
        assert after[name] - before[name] == 5
        assert after[name] == total(after)
    assert after["vllm:num_requests_running"] == 0


def test_metric_what_a_request_adds(api: Api) -> None:
    before = numbers(api)
    api.completion(max_tokens=200)
    api.chat(max_tokens=4, n=2, temperature=1)
    assert change(api, before, "vllm:request_success_total/stop") == 1
    assert change(api, before, "vllm:request_success_total/length") == 2
    assert change(api, before, "vllm:time_to_first_token_seconds_count") == 3
    generated = change(api, before, "vllm:request_generation_tokens_sum")
    assert generated == change(api, before, "vllm:generation_tokens_total")
    for name in ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"):
        assert change(api, before, name) == generated - 3
    assert change(api, before, "vllm:request_params_max_tokens_sum") == 204
    assert change(api, before, "vllm:request_max_num_generation_tokens_sum") == generated - 4, "the longer of two"


def test_metric_times_of_a_request_add_up(api: Api) -> None:
    before = numbers(api)
    api.engine.pause, api.engine.queued = 0.002, 0.001
    api.completion(max_tokens=5)
    names = [f"vllm:request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")]
    assert [change(api, before, f"{name}_count") for name in names] == [1, 1, 1, 1]
    queue, prefill, decode, inference = (change(api, before, f"{name}_sum") for name in names)
    assert queue == pytest.approx(0.001)
    assert prefill + decode == pytest.approx(inference)
    assert 0 < inference < change(api, before, "vllm:e2e_request_latency_seconds_sum")
    assert decode == pytest.approx(change(api, before, "vllm:inter_token_latency_seconds_sum"))


def test_metric_tokens_from_the_cache(api: Api) -> None:
    before = numbers(api)
    api.engine.cached = 3
    api.completion(prompt="Hello", n=2, temperature=1, max_tokens=2)
    assert change(api, before, "vllm:prompt_tokens_total") == 5, "a prompt counts once"
    assert change(api, before, "vllm:prompt_tokens_cached_total") == 3
    assert change(api, before, "vllm:prompt_tokens_by_source_total/local_compute") == 2
    assert change(api, before, "vllm:prompt_tokens_by_source_total/local_cache_hit") == 3
    assert change(api, before, "vllm:request_prefill_kv_computed_tokens_sum") == 4, "two choices"


def test_metric_failed_requests_are_counted(api: Api) -> None:
    before = numbers(api)
    api.engine.fail_after = 2
    assert api.completion().status_code == 500
    assert change(api, before, "vllm:request_success_total/error") == 1
    assert change(api, before, "octavo:http_responses_total/500") == 1


def test_metric_http_requests_by_route_and_class(api: Api) -> None:
    before = numbers(api)
    api.completion(max_tokens=1)
    api.http.post("/v1/completions", json={"prompt": 5})
    api.http.get("/v1/models/tiny")
    api.http.get("/v1/models/a/b/c")
    for path in ("/nowhere", "/v1/modelsx", "/nowhere/else?x=1"):
        api.http.request("BREW", path)
    for series, added in (
        ("/v1/completions/POST/2xx", 1),
        ("/v1/completions/POST/4xx", 1),
        ("/v1/models/{name:path}/GET/2xx", 1),
        ("/v1/models/{name:path}/GET/4xx", 1),
        ("none/other/4xx", 3),
    ):
        assert change(api, before, f"http_requests_total/{series}") == added, series
    assert change(api, before, "octavo:http_responses_total/404") == 4
    assert change(api, before, "http_request_duration_seconds_count//v1/completions/POST") == 2
    assert change(api, before, "http_request_size_bytes_sum//v1/completions") > 20
    assert change(api, before, "http_response_size_bytes_sum//v1/completions") > 200
    page = api.http.get("/metrics").text
    assert "nowhere" not in page and "BREW" not in page and "modelsx" not in page


def test_metric_a_client_that_leaves_is_499(api: Api) -> None:
    before = numbers(api)
    api.engine.pause = 0.01
    connection = send(api, "/v1/completions", max_tokens=400, ignore_eos=True)
    until(lambda: bool(api.engine.live))
    connection.close()
    until(lambda: change(api, before, "octavo:http_responses_total/499") == 1)


def test_metric_requests_not_taken(api: Api) -> None:
    engine = ScriptEngine(pause=0.005)
    with running(parts_of(engine), max_num_queued_reqs=1) as url, httpx.Client(base_url=url) as http:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 490, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as first:
            chunks = first.iter_bytes()
            next(chunks)
            assert http.post("/v1/completions", json=body).status_code == 503
        rejected = parsed(http.get("/metrics").text)
        assert rejected["vllm:admission_rejections_total/max_num_queued_reqs"] == 1
        assert rejected["vllm:admission_rejections_total/max_num_reqs_per_key"] == 0


def test_metric_the_page_answers_while_the_model_loads() -> None:
    loaded = threading.Event()
    with running(parts_of(ScriptEngine(), loaded), wait=False) as url, httpx.Client(base_url=url) as http:
        assert http.get("/health").status_code == 503
        answer = http.get("/metrics")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        page = parsed(answer.text)
        assert page["octavo:engine_up"] == 0
        assert page["http_requests_total//health/GET/5xx"] == 1
        assert page["process_resident_memory_bytes"] > 1e6
        loaded.set()
        until(lambda: http.get("/health").status_code == 200)
        assert parsed(http.get("/metrics").text)["octavo:engine_up"] == 1


def test_metric_cache_settings_are_labels(api: Api) -> None:
    page = api.http.get("/metrics").text
    (line,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1\.0$", page, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["enable_prefix_caching"]) == ("16", "100", "True")
    assert (labels["cache_dtype"], labels["kv_cache_dtype"]) == ("float16", "auto")  # what is used, and the flag


def test_metric_old_names_tell_the_same(api: Api) -> None:
    api.engine.numbers.prefix_queries, api.engine.numbers.prefix_hits = 40, 10
    page = numbers(api)
    for old, new in (
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:gpu_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
        ("vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
        ("vllm:time_per_output_token_seconds_sum", "vllm:inter_token_latency_seconds_sum"),
    ):
        assert page[old] == page[new]
    assert page["vllm:gpu_prefix_cache_hits_total"] == 10 and page["vllm:gpu_prefix_cache_hit_rate"] == 0.25
    assert page["vllm:num_requests_swapped"] == page["vllm:cpu_cache_usage_perc"] == 0


def numbers_of(engine: EngineNumbers) -> dict[str, float]:
    return {
        "/".join([s.name, *(v for k, v in s.labels.items() if k in ("reason", "group"))]): s.value
        for metric in engine.collect()
        for s in metric.samples
        if "le" not in s.labels
    }


def test_metric_counters_survive_the_engine() -> None:
    engine = EngineNumbers({"model_name": "m", "engine": "0"}, EngineConfig(model="m"))
    first = EngineStats(steps=10, preemptions=2, step_seconds=1.5, running=3, blocks_total=50, blocks_used=25)
    first.step_tokens.add(100)
    engine.take(first, 0, True)
    page = numbers_of(engine)
    assert page["octavo:engine_steps_total"] == 10 and page["vllm:kv_cache_usage_perc"] == 0.5
    engine.take(None, 0, False)  # it has died
    page = numbers_of(engine)
    assert page["octavo:engine_steps_total"] == 10 and page["octavo:engine_up"] == 0
    assert page["vllm:num_requests_running"] == page["vllm:kv_cache_usage_perc"] == 0, "gauges are of this moment"
    engine.take(None, 1, False)  # and loads again
    assert numbers_of(engine)["octavo:engine_steps_total"] == 10
    second = EngineStats(steps=1, running=1, blocks_total=50)
    second.step_tokens.add(8)
    engine.take(second, 1, True)
    engine.take(second, 1, True, replayed=4)
    page = numbers_of(engine)
    assert page["octavo:engine_steps_total"] == 11 and page["vllm:num_preemptions_total"] == 2
    assert page["octavo:engine_step_seconds_total"] == 1.5 and page["octavo:engine_restarts_total"] == 1
    assert page["vllm:iteration_tokens_total_count"] == 2 and page["vllm:iteration_tokens_total_sum"] == 108
    assert page["vllm:num_requests_running"] == 1 and page["octavo:requests_replayed_total"] == 4
    engine.take(EngineStats(steps=5), 3, True)  # two restarts without a word between them
    assert numbers_of(engine)["octavo:engine_steps_total"] == 16


def test_metric_waiting_blocks_and_waste() -> None:
    engine = EngineNumbers({"model_name": "m", "engine": "0"}, EngineConfig(model="m"))
    groups = [BlockUse(100, 30, 40), BlockUse(20, 5, 5)]
    engine.take(
        EngineStats(waiting=5, held_back=2, kv_slots_allocated=560, kv_slots_filled=420, groups=groups), 0, True
    )
    page = numbers_of(engine)
    assert page["vllm:num_requests_waiting_by_reason/capacity"] == 3
    assert page["vllm:num_requests_waiting_by_reason/deferred"] == 2
    assert [page[f"octavo:kv_blocks_{name}/0"] for name in ("total", "used", "cached")] == [100, 30, 40]
    assert page["octavo:kv_blocks_used/1"] == 5
    assert page["octavo:kv_cache_filled_ratio"] == 0.75


class _Replaced:
    """An engine that dies while its numbers are on their way, and has been started again when they come."""

    restarts = replayed = 0
    status = Status("ready")

    async def stats(self) -> EngineStats:
        self.restarts += 1
        return EngineStats(steps=7)


def test_numbers_of_an_engine_that_has_been_replaced_meanwhile_count_once() -> None:
    metrics = Metrics(EngineConfig(model="m"))
    engine = _Replaced()
    metrics.watch(engine)  # type: ignore[arg-type]
    for _ in range(3):
        asyncio.run(metrics.refresh())
        assert metrics.engine.now().steps == 0


class _Hung:
    """An engine that answers, until it is in the middle of a long step."""

    restarts = replayed = 0
    status = Status("ready")
    hung = False

    async def stats(self) -> EngineStats:
        if self.hung:
            raise asyncio.TimeoutError
        return EngineStats(steps=7)

    def generate(self, *_: Any) -> AsyncIterator[Any]:
        raise NotImplementedError

    async def start(self) -> Any: ...

    async def abort(self, request_id: str, choice: int | None = None) -> None: ...

    async def close(self) -> None: ...


def test_metric_an_engine_without_an_answer_keeps_its_numbers() -> None:
    metrics, engine = Metrics(EngineConfig(model="tiny")), _Hung()

    def page() -> dict[str, float]:
        return parsed(asyncio.run(metrics.page()).decode())

    assert page()["octavo:engine_up"] == 0
    metrics.watch(engine)
    assert page()["octavo:engine_steps_total"] == 7
    engine.hung = True
    assert page()["octavo:engine_steps_total"] == 7 and page()["octavo:engine_up"] == 1
    engine.status = Status("restarting", "it died")
    assert page()["octavo:engine_steps_total"] == 7 and page()["octavo:engine_up"] == 0
