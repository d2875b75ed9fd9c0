"""/metrics."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Api
from tests.api.harness import until
from tests.api.test_abort import send


def numbers(api: Api) -> dict[str, float]:
    return parsed(api.http)


def parsed(http: httpx.Client) -> dict[str, float]:
    """Every sample of the page, by name and finish reason."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                assert sample.labels["model_name"] == "tiny"
                found[f"{sample.name}/{reason}" if reason else sample.name] = sample.value
    return found


def change(api: Api, before: dict[str, float], name: str) -> float:
    return numbers(api)[name] - before[name]


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


def test_metric_failed_requests_are_counted(api: Api) -> None:
    before = numbers(api)
    api.engine.fail_after = 2
    assert api.completion().status_code == 500
    assert change(api, before, "vllm:request_success_total/error") == 1


def test_metric_names_dashboards_ask_for(api: Api) -> None:
    names = set(numbers(api))
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_params_n_count",
        "octavo:kv_cache_filled_ratio",
        "vllm:request_time_per_output_token_seconds_count",
    } <= names
