"""`octavo bench throughput`, `latency` and `startup`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.api.cli import main
from octavo.bench.offline import latency, throughput
from octavo.bench.options import BenchError, LatencyOptions, StartupOptions, ThroughputOptions
from octavo.bench.startup import forget, model_files
from octavo.config import EngineConfig
from octavo.ops.contract import OpTime, Roofline
from tests.api.harness import MODEL, ScriptEngine, make_info, make_tokenizer, tiny_text
from tests.realmodels import smollm2_gguf

QUIET: dict[str, Any] = {"disable_tqdm": True}


@pytest.fixture
def engine() -> ScriptEngine:
    return ScriptEngine()


@pytest.fixture
def llm(engine: ScriptEngine) -> Iterator[LLM]:
    """The scripted engine, in this process."""
    config = EngineConfig(model=MODEL)
    text, info = tiny_text(config), make_info(make_tokenizer())
    with LLM.of(config, engine, info, text.tokenizer, text.template, text.factory(info, config)) as llm:
        yield llm


def test_throughput_counts(llm: LLM, engine: ScriptEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ThroughputOptions(
        num_prompts=5, random_input_len=30, random_output_len=8, n=2, num_warmups=1, output_json=str(file), **QUIET
    )
    result = throughput(options, llm)
    assert result == json.loads(file.read_text())
    assert (result["num_requests"], result["failed"]) == (5, 0)
    assert (result["total_num_prompt_tokens"], result["total_num_output_tokens"]) == (5 * 30, 5 * 8 * 2)
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(230 / result["elapsed_time"])
    assert result["output_tokens_per_second"] == pytest.approx(80 / result["elapsed_time"])
    assert len(engine.seen) == 6 and all(request.max_tokens == 8 and not request.eos_ids for request in engine.seen)
    assert {request.sampling.temperature for request in engine.seen} == {1}
    said = capsys.readouterr().out
    assert f"Throughput: {result['requests_per_second']:.2f} requests/s, " in said
    assert "Total num prompt tokens:  150\nTotal num output tokens:  80" in said


def test_throughput_of_messages(llm: LLM, engine: ScriptEngine, tmp_path: Path) -> None:
    file = tmp_path / "custom.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}], "output_tokens": 3}
    file.write_text(json.dumps(row))
    options = {"dataset_name": "custom", "dataset_path": str(file), "num_prompts": 2, **QUIET}
    assert throughput(ThroughputOptions(**options), llm)["total_num_output_tokens"] == 6
    assert b"user\nhi" in bytes(token for token in engine.seen[0].prompt if token < 256)
    file.write_text(json.dumps(row) + '\n{"prompt": "x"}')
    with pytest.raises(BenchError, match="mixes prompts and messages"):
        throughput(ThroughputOptions(**options), llm)


def test_throughput_tells_of_failures(llm: LLM, engine: ScriptEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.fail_after = 2
    assert throughput(ThroughputOptions(num_prompts=3, random_input_len=9, **QUIET), llm)["failed"] == 3
    assert "Failed answers: 3" in capsys.readouterr().out


def test_prompts_that_do_not_fit(llm: LLM) -> None:
    with pytest.raises(BenchError, match="maximum context length is 512 tokens"):
        throughput(ThroughputOptions(num_prompts=1, random_input_len=600, **QUIET), llm)
    with pytest.raises(BenchError, match="maximum context length is 512 tokens"):
        latency(LatencyOptions(input_len=600, **QUIET), llm)
    with pytest.raises(BenchError, match="an answer has 12 tokens instead of 20"):
        latency(LatencyOptions(input_len=500, output_len=20, **QUIET), llm)


def test_conversations_are_for_servers() -> None:
    with pytest.raises(BenchError, match="octavo bench serve"):
        ThroughputOptions(dataset_name="multi-turn")


def test_several_answers_that_would_be_the_same() -> None:
    with pytest.raises(BenchError, match="leave out --n"):
        ThroughputOptions(n=2, temperature=0.0)


def test_latency_of_batches(llm: LLM, engine: ScriptEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = LatencyOptions(
        batch_size=3, input_len=11, output_len=4, num_iters_warmup=2, num_iters=5, output_json=str(file), **QUIET
    )
    result = latency(options, llm)
    assert result == json.loads(file.read_text())
    assert len(result["latencies"]) == 5
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 5)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(result["latencies"])[2]
    assert len(engine.seen) == 7 * 3 and len({request.prompt for request in engine.seen}) == 21
    assert {(len(request.prompt), request.max_tokens) for request in engine.seen} == {(11, 4)}
    special = llm.get_tokenizer().special_ids
    assert not any(token in special for request in engine.seen for token in request.prompt)
    assert f"Avg latency: {result['avg_latency']:.4f} seconds" in capsys.readouterr().out


class Timed:
    """Times nothing itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_profile(self) -> None:
        self.calls.append("start")

    def stop_profile(self) -> list[OpTime]:
        self.calls.append("stop")
        return [
            OpTime(False, "plan", 1, 0.001, 0, (0, 0, 0, 0)),
            OpTime(False, "linear Q4_0 int8", 10, 0.003, 1_000_000, (0, 600_000_000, 0, 0)),
            OpTime(True, "plan", 4, 0.004, 0, (0, 0, 0, 0)),
            OpTime(True, "attend", 40, 0.012, 60_000_000, (6_000_000, 0, 0, 0)),
        ]

    def roofline(self) -> Roofline:
        self.calls.append("roofline")
        return Roofline(10e9, (100e9, 400e9, 200e9, 150e9))


def test_a_profile_of_the_measured_batches(
    llm: LLM, engine: ScriptEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    timed = llm.profiled = Timed()
    file = tmp_path / "out.json"
    result = latency(LatencyOptions(num_iters=2, output_len=3, profile=True, output_json=str(file), **QUIET), llm)
    assert timed.calls == ["start", "stop", "roofline"]
    assert result == json.loads(file.read_text())
    host = sum(result["latencies"]) - 0.02
    assert result["profile"]["host_seconds"] == pytest.approx(host)
    peaks = result["profile"]["roofline"]["operations_per_second"]
    assert peaks == {"float32": 1e11, "int8": 4e11, "int16": 2e11, "bfloat16": 1.5e11}
    attend, plan = result["profile"]["decode"]["operations"]
    assert (plan["name"], plan["of_roofline"], attend["name"]) == ("plan", None, "attend")
    assert attend["of_roofline"] == pytest.approx(0.5)  # 6 ms of the memory, of 12
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Prefill: 1 step of 4.000 ms")
    assert [line.split() for line in lines[at + 2 : at + 8]] == [
        ["linear", "Q4_0", "int8", "10", "3.000", "75.0%", "0.3", "200.0", "50%"],
        ["plan", "1", "1.000", "25.0%"],
        ["Decode:", "4", "steps", "of", "4.000", "ms"],
        ["operation", "calls", "ms", "share", "GB/s", "GOP/s", "of", "roofline"],
        ["attend", "10", "3.000", "75.0%", "5.0", "0.5", "50%"],
        ["plan", "1", "1.000", "25.0%"],
    ]
    assert lines[at + 8].startswith(f"Host, beside the steps: {1000 * host / 5:.3f} ms per step, ")
    peaks = "100 GOP/s float32, 400 GOP/s int8, 200 GOP/s int16, 150 GOP/s bfloat16"
    assert lines[at + 9] == f"Roofline: 10.0 GB/s read, {peaks}"


def test_a_device_that_does_not_time_its_operations(llm: LLM, engine: ScriptEngine) -> None:
    with pytest.raises(BenchError, match="--profile: the device .* does not time its operations"):
        latency(LatencyOptions(profile=True, **QUIET), llm)
    assert not engine.seen


def test_a_file_that_cannot_be_written(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot write"):
        latency(LatencyOptions(num_iters=1, output_len=2, output_json=str(tmp_path), **QUIET), llm)


def test_the_commands_with_a_real_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, small = str(smollm2_gguf()), ("--kv-cache-memory-bytes", "64MiB", "--max-model-len", "256")
    quick = ("--input-len", "12", "--output-len", "3", "--disable-tqdm", "--output-json", str(tmp_path / "out.json"))
    assert main(["bench", "throughput", model, "--num-prompts", "3", *quick, *small]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["total_num_tokens"] == 3 * 15
    flags = ("--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0", "--profile")
    assert main(["bench", "latency", "--model", model, *flags, *quick, *small]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["latencies"]) == 2
    said = capsys.readouterr().out
    assert "Avg latency: " in said and "Prefill: 2 steps of " in said and "Decode: 4 steps of " in said
    profile = result["profile"]
    operations = {kind: {one["name"]: one for one in profile[kind]["operations"]} for kind in ("prefill", "decode")}
    # no count of a matrix depends on the rows but that of operations: 2 prompts of 12 tokens, then 2 tokens
    for name in ("linear Q4_1 int8", "gated Q4_1 int8"):
        first, later = operations["prefill"][name], operations["decode"][name]
        assert later["calls"] == 2 * first["calls"] and later["bytes"] == 2 * first["bytes"] > 0
        assert 2 * first["operations"]["int8"] == 12 * later["operations"]["int8"] > 0
        assert first["of_roofline"] > 0 and first["operations"]["float32"] == 0
    timed = sum(one["seconds"] for kind in operations.values() for one in kind.values())
    assert timed + profile["host_seconds"] == pytest.approx(sum(result["latencies"]))


def test_starts_of_a_real_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, file = str(smollm2_gguf()), tmp_path / "out.json"
    flags = ("--num-iters-cold", "1", "--num-iters-warm", "1", "--disable-tqdm", "--output-json", str(file))
    assert main(["bench", "startup", model, *flags, "--kv-cache-memory-bytes", "64MiB", "--hf-token", "t"]) == 0
    result = json.loads(file.read_text())
    for kind in ("cold", "warm"):
        [ready], [first] = result[f"{kind}_startup_times"], result[f"{kind}_first_token_times"]
        assert 0 < ready < first
        assert result[f"avg_{kind}_startup_time"] == result[f"{kind}_startup_percentiles"]["50"] == ready
        assert result[f"avg_{kind}_first_token_time"] == first
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *("Cold start (files read from disk)", "Warm start (files in memory)"),
    ]


def test_a_server_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(smollm2_gguf())
    assert main(["bench", "startup", model, "--disable-tqdm", "--kv-cache-memory-bytes", "1"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: the server ended with status 1: octavo: error: ")
    assert main(["bench", "startup", model, "--disable-tqdm", "--start-timeout", "0.05"]) == 1
    assert "was not ready after 0.05 s; --start-timeout lets it take longer" in capsys.readouterr().err
    assert main(["bench", "startup", "/not/there"]) == 1
    assert "There is no file or folder '/not/there'" in capsys.readouterr().err


def test_the_files_of_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "more/weights.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files = model_files(EngineConfig(model=str(tmp_path)))
    assert files == [tmp_path / "config.json", tmp_path / "more/weights.safetensors"]
    forget([*files, tmp_path / "gone"])
    assert files[0].read_text() == "x"


def test_no_starts_are_fine() -> None:
    assert StartupOptions(num_iters_cold=0).num_iters_warm == 3
    with pytest.raises(BenchError, match="--num-iters-warm must be at least 0"):
        StartupOptions(num_iters_warm=-1)
