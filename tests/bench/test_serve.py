"""`octavo bench serve` against real servers: the table, the result file, the timeline, what goes wrong."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.api.cli import main
from octavo.bench.client import Ask, Outcome
from octavo.bench.options import ServeOptions
from octavo.bench.serve import starts_of
from octavo.bench.timeline import page
from tests.api.harness import MODEL, SAID, ScriptEngine, parts_of, running
from tests.realmodels import smollm2_gguf


@contextmanager
def benching(engine: ScriptEngine | None = None, **options: Any) -> Iterator[Any]:
    """Gives a function from flags to an exit status."""
    with running(parts_of(engine or ScriptEngine(pause=0.001)), **options) as url:

        def bench(*flags: str) -> int:
            return main(["bench", "serve", "--base-url", url, "--disable-tqdm", *flags])

        yield bench


def result_of(folder: Path) -> dict[str, Any]:
    [file] = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def table_of(text: str) -> dict[str, str]:
    rows = (line.rpartition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in rows}


RANDOM = ("--num-prompts", "7", "--random-input-len", "40", "--random-output-len", "12", "--ignore-eos")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptEngine(pause=0.001)
    with benching(engine) as bench:
        assert bench(*RANDOM, "--max-concurrency", "2", "--goodput", "ttft:60000", "--metric-percentiles", "50,99") == 0
    out = capsys.readouterr().out
    rows = table_of(out)
    assert rows["Successful requests"] == "7" and rows["Failed requests"] == "0"
    assert rows["Maximum request concurrency"] == rows["Peak concurrent requests"] == "2"
    assert rows["Total input tokens"] == str(7 * 40) and rows["Total generated tokens"] == str(7 * 12)
    assert float(rows["Request goodput (req/s)"]) == float(rows["Request throughput (req/s)"]) > 0
    assert "Request rate configured (RPS)" not in rows
    for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert float(rows[f"P50 {metric} (ms)"]) == float(rows[f"Median {metric} (ms)"])
        assert 0 < float(rows[f"Mean {metric} (ms)"]) <= float(rows[f"P99 {metric} (ms)"]) * 1.01
    titles = [line.strip("-= ") for line in out.splitlines() if line[:3] in ("===", "---")]
    assert titles == [
        *("Serving Benchmark Result", "Time to First Token", "Time per Output Token (excl. 1st token)"),
        *("Inter-token Latency", "End-to-end Latency", ""),
    ]
    assert {(len(request.prompt), request.max_tokens) for request in engine.seen} == {(40, 12)}
    assert {request.sampling.temperature for request in engine.seen} == {0}


def test_the_result_file_has_the_names_of_vllm(tmp_path: Path) -> None:
    flags = ("--save-result", "--result-dir", str(tmp_path / "new"), "--label", "mine", "--metadata", "gpu=none")
    with benching() as bench:
        rates = ("--request-rate", "200", "--burstiness", "2", "--max-concurrency", "4")
        assert bench(*RANDOM, *flags, *rates, "--goodput", "e2el:60000") == 0
    result = result_of(tmp_path / "new")
    assert result["model_id"] == result["tokenizer_id"] == MODEL and result["gpu"] == "none"
    assert (result["backend"], result["endpoint_type"], result["label"]) == ("openai", "openai", "mine")
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == (200, 2, 4)
    assert (result["num_prompts"], result["completed"], result["failed"]) == (7, 7, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (280, 84)
    assert result["output_throughput"] == pytest.approx(84 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"] and result["goodput"] == {"e2el": 60000}
    assert result["duration"] >= 7 / 200
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99")} <= result.keys()
    assert "ttfts" not in result


def test_all_about_each_request(tmp_path: Path) -> None:
    with benching() as bench:
        assert bench(*RANDOM, "--save-result", "--save-detailed", "--result-dir", str(tmp_path)) == 0
    result = result_of(tmp_path)
    assert result["request_rate"] == "inf" and result["errors"] == [""] * 7
    assert result["input_lens"] == [40] * 7 and result["output_lens"] == [12] * 7
    assert all(SAID.startswith(text.rstrip("\ufffd")) for text in result["generated_texts"])
    assert len(result["itls"][0]) < 12 and result["start_times"][0] == 0
    mean = sum(result["ttfts"]) / 7
    assert result["mean_ttft_ms"] == pytest.approx(1000 * mean)


def test_results_are_added_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    flags = ("--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl")
    with benching() as bench:
        for label in ("a", "b"):
            assert bench(*RANDOM, *flags, "--label", label) == 0
    assert [json.loads(line)["label"] for line in file.read_text().splitlines()] == ["a", "b"]


def test_warm_up_requests_are_others_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptEngine()
    with benching(engine) as bench:
        assert bench(*RANDOM, "--num-warmups", "3") == 0
    assert table_of(capsys.readouterr().out)["Successful requests"] == "7"
    assert len(engine.seen) == 10 and len({request.prompt for request in engine.seen}) == 10


def test_sampling_and_extra_fields_reach_the_engine() -> None:
    engine = ScriptEngine()
    flags = ("--temperature", "0.5", "--top-k", "7", "--extra-body", '{"seed": 5}', "--extra-body.min_p", "0.25")
    with benching(engine) as bench:
        assert bench(*RANDOM, *flags) == 0
    for request in engine.seen:
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.min_p) == (0.5, 7, 0.25)
        assert request.seed == 5


@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_conversations_send_their_history(backend: str, tmp_path: Path) -> None:
    engine = ScriptEngine()
    flags = ("--dataset-name", "multi-turn", "--num-prompts", "6", "--multi-turn-num-turns", "3", "--ignore-eos")
    flags = (*flags, "--random-input-len", "9", "--random-output-len", "2", "--backend", backend)
    with benching(engine) as bench:
        assert bench(*flags, "--save-result", "--result-dir", str(tmp_path)) == 0
    assert result_of(tmp_path)["completed"] == 6
    longest = max((request.prompt for request in engine.seen), key=len)
    earlier = [request.prompt for request in engine.seen if longest[: len(request.prompt)] == request.prompt]
    assert len(earlier) == 3
    # what the engine said, tokens 256 and 257, comes back as the bytes of "Alpha beta"
    assert bytes(token for token in longest if token < 256).count(b"Alpha beta") == 2
    if backend == "vllm":
        assert [len(prompt) for prompt in sorted(earlier, key=len)] == [9, 9 + 10 + 9, 9 + 10 + 9 + 10 + 9]


def test_the_backend_tgi(tmp_path: Path) -> None:
    flags = ("--num-prompts", "3", "--random-input-len", "10", "--random-output-len", "5", "--backend", "tgi")
    with benching() as bench:
        assert bench(*flags, "--save-result", "--save-detailed", "--result-dir", str(tmp_path)) == 0
    result = result_of(tmp_path)
    assert (result["backend"], result["model_id"], result["completed"]) == ("tgi", MODEL, 3)
    assert result["input_lens"] == [10] * 3 and result["output_lens"] == [5] * 3
    assert {text.rstrip("\ufffd") for text in result["generated_texts"]} == {"Alpha beta, DEF gamma "}


def test_starts_are_those_of_conversations() -> None:
    options = ServeOptions(request_rate=2.0, seed=1)
    starts = starts_of(options, [Ask("a", 1), Ask("b", 1, after=0), Ask("c", 1), Ask("d", 1, after=2)])
    assert starts[1] == starts[3] == 0.0 and 0 < starts[0] < starts[2] == pytest.approx(1.0)
    ramp = ServeOptions(ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=9.0)
    assert len(set(starts_of(ramp, [Ask("a", 1)] * 5))) == 5
    assert starts_of(ServeOptions(), [Ask("a", 1)] * 2) == [0.0, 0.0]


# -- what goes wrong


def test_some_requests_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "custom.jsonl"
    file.write_text('{"prompt": "x", "output_tokens": 2}\n{"prompt": "x", "output_tokens": 9999}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "4")
    with benching() as bench:
        assert bench(*flags, "--save-result", "--save-detailed", "--result-dir", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert table_of(said.out)["Failed requests"] == "2"
    assert said.err.startswith("failed 2 times: HTTP 400: This model's maximum context length is 512 tokens")
    assert sum("HTTP 400" in error for error in result_of(tmp_path)["errors"]) == 2


def test_no_request_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with benching() as bench:
        assert bench(*RANDOM[:2], "--random-output-len", "9999", "--random-input-len", "9") == 1
    assert "failed 7 times: HTTP 400" in capsys.readouterr().err


def test_messages_need_the_chat_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "custom.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}], "output_tokens": 2}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "2")
    with benching() as bench:
        assert bench(*flags) == 1
        assert "openai takes a text or token ids as prompt" in capsys.readouterr().err
        assert bench(*flags, "--backend", "openai-chat") == 0


def test_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with benching(api_key=("secret",)) as bench:
        assert bench(*RANDOM) == 1
        assert "lists no model" in capsys.readouterr().err
        assert bench(*RANDOM, "--api-key", "secret") == 0
        monkeypatch.setenv("OCTAVO_API_KEY", "secret")
        assert bench(*RANDOM) == 0
        assert bench(*RANDOM, "--header", "Authorization=Bearer wrong", "--model", MODEL) == 1


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: http://127.0.0.1:1 lists no model. Start the server")
    assert main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0.1"]) == 1
    assert "is not ready after 0.1 s" in capsys.readouterr().err
    assert main(["bench", "serve", "--port", "1", "--model", "m"]) == 1
    assert "name the model's tokenizer with --tokenizer" in capsys.readouterr().err


def test_a_tokenizer_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = str(smollm2_gguf())
    with benching() as bench:
        assert bench(*RANDOM[:2], "--random-input-len", "15", "--random-output-len", "1", "--tokenizer", gguf) == 0
        assert bench(*RANDOM, "--tokenizer", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert int(table_of(said.out)["Total input tokens"]) > 7 * 30  # bytes: the served model has no words
    assert f"--tokenizer {tmp_path}: " in said.err


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    engine = ScriptEngine()
    with benching(engine) as bench:
        assert bench(*RANDOM, "--save-result", "--result-dir", str(tmp_path / "file")) == 1
    assert "cannot write to" in capsys.readouterr().err and not engine.seen


def test_wrong_options_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--goodput", "fast"])
    assert caught.value.code == 2
    assert "error: --goodput takes limits" in capsys.readouterr().err


def test_commands_of_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert "bench serve" in said and "run-batch" not in said
    assert main(["bench", "serv"]) == 2
    assert "there is no command bench serv. Did you mean octavo bench serve?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serve", "throughput", "latency", "startup"])
def test_each_flag_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", name, "--help=all"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert ("--config" in said) == (name != "serve") and "--num" in said


# -- the timeline


def shapes_of(text: str) -> tuple[ElementTree.Element, dict[str, list[ElementTree.Element]]]:
    """The drawing in a page, and the pieces of each row by what its tooltip says."""
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    space = "{http://www.w3.org/2000/svg}"
    rows = {str(g.findtext(f"{space}title")): g.findall(f"{space}rect") for g in svg.findall(f"{space}g")}
    return svg, rows


def test_the_timeline_shows_waiting_and_gaps() -> None:
    quick = Outcome(10.0, 11.0, [11.0, 11.01, 11.02, 11.1, 12.0], 12.0, "abcde", 3, 5)
    failed = Outcome(10.5, ended=11.5, error="a <b> & c")
    text = page([failed, quick], (25, 50), "m & n")
    assert (
        "<title>Timeline: m &amp; n</title>" in text
        and "<script" not in text
        and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    )
    _, rows = shapes_of(text)
    assert list(rows) == ["Request 1: 3 tokens in, 5 out", "Request 2: a <b> & c"]
    waiting, fast, slow = rows["Request 1: 3 tokens in, 5 out"]
    assert len({piece.get("fill") for piece in (waiting, fast, slow)}) == 3
    width = [float(str(piece.get("width"))) for piece in (waiting, fast, slow)]
    assert width[0] == pytest.approx(50 * width[1], rel=0.05)  # 1 s of waiting, 20 ms of quick tokens
    assert width[2] == pytest.approx(49 * width[1], rel=0.05)  # 80 and 900 ms: one piece of one colour
    [piece] = rows["Request 2: a <b> & c"]
    assert float(str(piece.get("x"))) > float(str(waiting.get("x")))


def test_a_timeline_of_nothing_and_of_failures_only() -> None:
    assert "0 requests" in page([], (25,), "x")
    assert "1 requests" in page([Outcome(1.0, ended=1.0, error="x")], (), "x")


def test_the_timeline_is_written_beside_the_result(tmp_path: Path) -> None:
    with benching() as bench:
        assert bench(*RANDOM, "--plot-timeline", "--result-dir", str(tmp_path), "--result-filename", "r.json") == 0
    assert [file.name for file in tmp_path.iterdir()] == ["r.timeline.html"]
    _, rows = shapes_of((tmp_path / "r.timeline.html").read_text())
    assert len(rows) == 7
