"""The arithmetic of a comparison: summaries, agreement, findings and warnings, from results made by hand."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from octavo.bench import charts, report, verdict
from octavo.bench.machine import Gpus
from octavo.bench.servers import without_secrets


def request(index: int = 0, text: str = "Yes.", tokens: int = 10, **fields: Any) -> dict[str, Any]:
    base = {"index": index, "asked_s": 0.0, "ttft_ms": 50.0, "tpot_ms": 10.0, "e2el_ms": 140.0, "gaps_ms": [10.0] * 9}
    base |= {"events": 10, "prompt_tokens": 20, "output_tokens": tokens, "error": None, "text": text}
    return {**base, **fields}


def turn(server: str, round: int, speed: float, requests: list[dict[str, Any]] | None = None, **fields: Any) -> Any:
    requests = requests or [request()]
    failed = sum(item["error"] is not None for item in requests)
    figures = {"output_throughput": speed, "total_token_throughput": 3 * speed, "request_throughput": speed / 10}
    return {
        "server": server,
        "round": round,
        "concurrency": 4,
        "begun_s": 0.0,
        "wall_s": 1.0,
        "complete": True,
        "problem": None,
        "before": {"load_average": 0.1, "busy_cores": 0.0, "probe_ms": 20.0},
        "figures": {**figures, "failed": failed},
        "memory": {
            "peak_resident": 2**30,
            "peak_private": 2**29,
            "proportional": None,
            "peak_gpu": None,
            "peak_gpu_of_all": None,
        },
        "cores": {"server": 1.5, "client": 0.1, "others": 0.0, "stolen": 0.0, "idle_servers": {}},
        "samples": [],
        "requests": requests,
        **fields,
    }


def results(*turns: Any, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "interrupted": False,
        "setup": {"levels": [{"concurrency": 4, "prompts": 1}], "rounds": 2, "machine": {"threads": 2}},
        "servers": [{"name": name, "failure": None} for name in dict.fromkeys(item["server"] for item in turns)],
        "turns": list(turns),
        "notes": [],
        **fields,
    }
    found["summary"] = verdict.summary(found)
    found["agreement"] = verdict.agreement(found)
    return found


# -- summaries


def test_a_row_has_the_median_of_the_rounds_and_the_latencies_of_all_requests() -> None:
    first = [request(ttft_ms=value) for value in (10.0, 20.0)]
    second = [request(ttft_ms=30.0), request(ttft_ms=900.0, error="HTTP 500", output_tokens=3)]
    (row,) = results(turn("a", 1, 100, first), turn("a", 2, 130, second), turn("a", 3, 120))["summary"]
    assert row["output_tok_s"] == {"median": 120, "min": 100, "max": 130, "rounds": [100, 130, 120]}
    assert row["requests"] == 5 and row["errors"] == 1 and row["output_tokens"] == 40
    assert row["latency_ms"]["ttft"]["mean"] == pytest.approx((10 + 20 + 30 + 50) / 4)
    assert row["latency_ms"]["ttft"]["p50"] == pytest.approx(25)
    assert row["memory_peak"] == 2**30 and row["gpu_peak"] is None and row["cores"] == pytest.approx(1.5)


def test_turns_that_were_given_up_do_not_count() -> None:
    found = results(turn("a", 1, 100), turn("a", 2, 1, complete=False, problem="died"), turn("b", 1, 1, complete=False))
    assert found["summary"][0]["rounds"] == 1 and found["summary"][0]["output_tok_s"]["min"] == 100
    assert found["summary"][1] == {"server": "b", "concurrency": 4, "rounds": 0}


# -- who is faster


def test_a_difference_larger_than_the_spread_is_told() -> None:
    found = results(*(turn("a", i, speed) for i, speed in ((1, 100), (2, 110))), turn("b", 1, 50), turn("b", 2, 54))
    assert verdict.findings(found["summary"]) == ["4 requests at a time: a writes 105.0 tokens/s, 2.02 times b's 52.0."]


def test_a_difference_within_the_spread_is_none() -> None:
    found = results(turn("a", 1, 100), turn("a", 2, 140), turn("b", 1, 101), turn("b", 2, 103))
    assert verdict.findings(found["summary"]) == [
        "4 requests at a time: a writes 120.0 tokens/s, not told apart from b (102.0) by these rounds."
    ]


def test_one_round_is_said_to_be_one() -> None:
    found = results(turn("a", 1, 100), turn("b", 1, 50))
    assert verdict.findings(found["summary"])[0].endswith("2.00 times b's 50.0 (one round only).")


# -- agreement


@pytest.mark.parametrize(
    "one, two, wanted",
    [
        ({1: "abc"}, {2: "abc"}, {"compared": 0}),
        (
            {1: "the same", 2: "abcdX", 3: "only here"},
            {1: "the same", 2: "abcdYZ"},
            {
                "compared": 2,
                "identical": 0.5,
                "same_beginning": 0.5,  # the second pair is shorter than 16 characters and differs
                "common_prefix_median": 6.0,  # of 8 and 4
                "common_share_median": pytest.approx((1 + 4 / 6) / 2),
            },
        ),
        (
            {1: "0123456789abcdef, then this"},
            {1: "0123456789abcdef, and that"},
            {
                "compared": 1,
                "identical": 0.0,
                "same_beginning": 1.0,
                "common_prefix_median": 18,
                "common_share_median": pytest.approx(18 / 27),
            },
        ),
        (
            {1: "", 2: ""},
            {1: "", 2: "x"},
            {
                "compared": 2,
                "identical": 0.5,
                "same_beginning": 0.5,
                "common_prefix_median": 0.0,
                "common_share_median": 0.5,
            },
        ),
    ],
)
def test_agreement_of_answers(one: dict[int, str], two: dict[int, str], wanted: dict[str, Any]) -> None:
    assert verdict.agree(one, two) == wanted


def test_answers_are_compared_prompt_by_prompt_and_failed_ones_not_at_all() -> None:
    ours = turn("a", 1, 1, [request(0, "red"), request(1, "green"), request(2, "blue", error="late")])
    theirs = turn("b", 1, 1, [request(0, "red"), request(1, "grey"), request(2, "blue")])
    (pair,) = results(ours, theirs, turn("b", 2, 1, [request(0, "red")]))["agreement"]
    assert pair["servers"] == ["a", "b"] and pair["compared"] == 2 and pair["identical"] == 0.5


@pytest.mark.parametrize(
    "identical, beginning, words",
    [
        (1.0, 1.0, "answer alike: the same model"),
        (0.4, 0.9, "begin alike and part later"),
        (0.1, 0.5, "agree now and then"),
        (0.0, 0.1, "answer differently: not the same model"),
    ],
)
def test_what_agreement_means(identical: float, beginning: float, words: str) -> None:
    pair = {"servers": ["a", "b"], "compared": 9, "identical": identical, "same_beginning": beginning}
    assert words in verdict.judge(pair)


# -- warnings


def test_quiet_and_equal_runs_give_no_warnings() -> None:
    turns = [turn(name, round, speed) for name, speed in (("a", 100), ("b", 99)) for round in (1, 2)]
    assert verdict.warnings(results(*turns)) == []


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"before": {"load_average": 1, "busy_cores": 0.6, "probe_ms": 20.0}}, "was not quiet: up to 0.6 cores"),
        ({"before": {"load_average": 1, "busy_cores": 0, "probe_ms": 30.0}}, "took up to 1.50 times as long"),
        (
            {"cores": {"server": 1, "client": 0.1, "others": 0.7, "stolen": 0.0, "idle_servers": {}}},
            "used up to 0.7 cores",
        ),
        (
            {"cores": {"server": 1, "client": 0.1, "others": 0, "stolen": 0.5, "idle_servers": {}}},
            "The hypervisor kept up to 0.50 cores",
        ),
        (
            {"cores": {"server": 1, "client": 0.1, "others": 0, "stolen": 0, "idle_servers": {"b": 0.9}}},
            "b used 0.90 cores while others were measured",
        ),
        (
            {"cores": {"server": 1, "client": 1.9, "others": 0, "stolen": 0, "idle_servers": {}}},
            "the load client itself used 1.0 of its one core",
        ),
        ({"figures": {**turn("a", 1, 150)["figures"]}}, "the rounds are 40% of their median apart"),
        ({"requests": [request(tokens=5)]}, "output tokens per request differ (a 7.5, b 10.0)"),
        ({"requests": [request(tokens=10, prompt_tokens=30)]}, "prompt tokens per request differ (a 25.0, b 20.0)"),
        ({"requests": [request(events=2)]}, "a sends 1.7 tokens per event"),
        ({"requests": [request(text="No!")]}, "agree now and then"),
        (
            {"memory": {**turn("a", 1, 1)["memory"], "peak_gpu_of_all": 5 * 2**30}},
            "GPU memory of a is that of all programs",
        ),
    ],
)
def test_what_speaks_against_the_figures_is_said(fields: dict[str, Any], words: str) -> None:
    turns = [turn(name, round, 100) for name in ("a", "b") for round in (1, 2)]
    turns[0] |= fields
    found = verdict.warnings(results(*turns))
    assert [warning for warning in found if words in warning], found


def test_failures_come_first_and_notes_last() -> None:
    failed = [request(), request(error="HTTP 503: full")]
    found = results(turn("a", 1, 100, failed), turn("b", 1, 100), interrupted=True, notes=["by the way"])
    found["servers"][1]["failure"] = {"reason": "was ended by signal 9", "when": "in round 1"}
    found["setup"]["rounds"] = 1
    warnings = verdict.warnings(found)
    assert warnings[0].startswith("The comparison was interrupted")
    assert warnings[1] == "b was ended by signal 9 (in round 1); its later turns were left out."
    assert warnings[2] == "a, 4 at a time, round 1: 1 of 2 requests failed: HTTP 503: full"
    assert warnings[-2].startswith("One round only") and warnings[-1] == "by the way"


# -- GPUs


class Driver(ModuleType):
    """What pynvml would tell of two GPUs on which processes 7 and 8 run."""

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str | bytes:
        return ("Card", b"Older card")[gpu]

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, used=(30, 50)[gpu])

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[SimpleNamespace]:
        found = [SimpleNamespace(pid=7, usedGpuMemory=10), SimpleNamespace(pid=8, usedGpuMemory=20)]
        return found[: gpu + 1]


def test_gpu_memory_is_that_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver("pynvml"))
    gpus = Gpus()
    assert [gpu["name"] for gpu in gpus.devices()] == ["Card", "Older card"]
    assert gpus.used_by([7, 99]) == 20 and gpus.used_by([7, 8]) == 40 and gpus.used() == 80
    assert gpus.used_by([99]) is None, "processes of a container have other numbers; nobody knows"


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().devices() == [] and Gpus().used_by([1]) is None and Gpus().used() is None


# -- how it is shown


def test_the_table_is_in_columns() -> None:
    found = results(turn("a", 1, 1234.5), turn("long-name", 1, 9.876, complete=False))
    lines = report.table(found).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["4", "a", "1,234", "1,234-1,234", "123", *["50.0"] * 2, *["10.0"] * 2] + [
        *["140"] * 2,
        "10.0",
        "0",
        "1,024",
        "MiB",
    ]
    assert lines[2].split() == ["4", "long-name", "not", "measured"]
    assert lines[0].index("server") == lines[1].index("a ") == lines[2].index("long-name")


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1, "1.00"),
        (9.876, "9.88"),
        (99.94, "99.9"),
        (123.4, "123"),
        (1234567, "1,234,567"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert charts.number(value) == text


@pytest.mark.parametrize(
    "highest, wanted",
    [(100, [0, 25, 50, 75, 100]), (7, [0, 2, 4, 6, 8]), (0.3, [0, 0.1, 0.2, 0.3]), (0, [0, 1]), (3, [0, 1, 2, 3])],
)
def test_axes_begin_at_0_and_have_round_numbers(highest: float, wanted: list[float]) -> None:
    assert charts.ticks(highest) == pytest.approx(wanted)


def test_logarithmic_axes_have_powers_of_ten() -> None:
    assert charts.log_ticks(3, 4000) == pytest.approx([10, 100, 1000])
    assert charts.log_ticks(8, 120) == pytest.approx([10, 30, 100])
    assert charts.spans_decades([1.0] * 50 + [40.0]) and not charts.spans_decades([10.0, 20.0, 200.0])


def test_curves_of_many_values_keep_their_ends() -> None:
    corners = charts._steps([float(value) for value in range(10_000)])
    assert len(corners) < 400 and corners[0] == (0.0, 0.0) and corners[-1] == (9999.0, 1.0)
    assert sorted(corners) == corners
    assert all(abs(share - value / 9999) < 0.01 for value, share in corners)


@pytest.mark.parametrize(
    "command, shown",
    [
        ("serve --api-key abc --port 1", "serve --api-key *** --port 1"),
        ("serve --api-key=abc --port 1", "serve --api-key=*** --port 1"),
        ("x --api-key a=1 b=2 --server c=3", "x --api-key *** *** --server c=3"),
        ("x --hf-token t", "x --hf-token ***"),
        ("x --port 1 key", "x --port 1 key"),
    ],
)
def test_keys_are_not_shown(command: str, shown: str) -> None:
    assert without_secrets(command) == shown
