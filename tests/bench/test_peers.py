"""The comparison with other engines, without them: what is asked, how figures are kept, tables and pictures."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.peers import __main__ as command
from benchmarks.peers import engines, measuring, models, plots, tables
from benchmarks.peers.engines import ENGINES, Engine, LlamaCpp, Next, Over, PeerError, Running, next_of
from benchmarks.peers.models import MODELS, SHAPES, Model, Shape
from benchmarks.peers.reference import places
from benchmarks.peers.results import Cell, Results, Spread
from benchmarks.peers.workloads import load_of
from octavo import LLM, SamplingParams
from octavo.bench.client import Ask, Outcome, Target


def test_workloads_depend_on_name_and_round_alone() -> None:
    assert load_of("burst100", 1, False) == load_of("burst100", 1, False) != load_of("burst100", 2, False)
    burst = load_of("burst100", 1, False)
    assert burst.concurrency == len(burst.asks) == 100
    assert 80 < np.mean([ask.max_tokens for ask in burst.asks]) < 115
    assert all(16 <= ask.max_tokens <= 256 for ask in burst.asks)
    closed = load_of("closed4", 1, False)
    assert (closed.concurrency, len(closed.asks)) == (4, 8)
    assert [len(str(ask.prompt).split()) for ask in load_of("prefill512", 1, False).asks] == [512] * 4
    beginnings = {str(ask.prompt).partition(".")[0] for ask in load_of("prefix64", 1, False).asks}
    assert len(beginnings) == 1 and len(beginnings.pop().split()) == 1000
    assert load_of("burst32", 1, False).asks != load_of("burst32-noisy", 1, False).asks  # no prefix cache helps
    assert len(load_of("burst100", 1, True).asks) == 8
    with pytest.raises(ValueError, match="no workload is called 'bursts'"):
        load_of("bursts", 1, False)


def test_results_are_kept_and_failures_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "results.jsonl"
    first = Results.read(path)
    one, other = Cell("smollm2", "octavo", "single"), Cell("smollm2", "vllm", "single")
    first.say(date="2026-11-30")
    first.add(one, 1, {"out_tok_s": 10.0})
    first.add(one, 2, {"out_tok_s": 30.0})
    first.fail(other, 1, "it ended")
    with path.open("a") as file:
        file.write('{"cell": ["smollm2", "octavo", "sin')  # stopped while it wrote
    again = Results.read(path)
    assert again.setup == {"date": "2026-11-30"} and again.failures == {other: "it ended"}
    assert again.has(one, 2) and not again.has(one, 3) and not again.has(other, 1)
    again.add(other, 1, {"out_tok_s": 5.0})
    again.add(one, 3, {"out_tok_s": 11.0})
    last = Results.read(path)
    assert last.failures == {}
    assert last.spread(one, "out_tok_s") == Spread(11.0, 10.0, 30.0) and last.spread(one, "kl") is None
    assert list(last.entrants(["single"], ["smollm2"])) == [("smollm2", "octavo"), ("smollm2", "vllm")]


def test_rounds_begin_with_another_engine_each() -> None:
    cells = command.plan(["serve", "many"], ["octavo", "llama.cpp"], ["smollm2"], ["burst100", "single"])
    assert cells == [Cell("smollm2", peer, load) for peer in ("octavo", "llama.cpp") for load in ("single", "burst100")]
    both = ["single", "burst100"]
    octavo, other = ("smollm2", "octavo", both), ("smollm2", "llama.cpp", both)
    assert list(command.turns(cells, 1)) == [octavo, other]
    assert list(command.turns(cells, 2)) == [other, octavo]
    every = command.plan(command.PARTS, [], [], [])
    assert len(every) == len(set(every)) and {cell.peer for cell in every} == set(ENGINES)
    assert {cell.model for cell in every} == set(MODELS)
    names = [model.split(" ")[0] for model, _, _ in command.turns(every, 2)]
    assert [name for i, name in enumerate(names) if name != names[i - 1]] == ["smollm2", "gemma3", *SHAPES]


def answer(asked: float, gaps: Sequence[float], prompt_tokens: int = 8) -> Outcome:
    times = [float(asked + sum(gaps[: i + 1])) for i in range(len(gaps))]
    return Outcome(asked, times[0], times, times[-1], "x", prompt_tokens, len(times))


def test_figures_of_outcomes() -> None:
    failed = dataclasses.replace(answer(0, [9.0]), error="HTTP 500")
    found = measuring.figures_of([answer(0, [2.0, 0.5, 0.5]), answer(1, [2.0, 0.25, 0.25, 0.5]), failed])
    assert found["decode_tok_s"] == 2.0  # the usual gap is 0.5 s
    assert found["prefill_tok_s"] == 4.0
    assert (found["failed"], found["output_tokens"], found["prompt_tokens"]) == (1, 7, 16)
    assert found["out_tok_s"] == pytest.approx(7 / 9) and found["ttft_p50"] == 2000
    with pytest.raises(PeerError, match="no request was answered: HTTP 500"):
        measuring.figures_of([failed])


def test_what_engines_say_comes_next() -> None:
    openai = {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5, "token_id:11": -1.5}]}
    top = [{"id": 7, "logprob": -0.5}, {"id": 11, "logprob": -1.5}]
    llama = {"content": [{"id": 7, "token": "a", "logprob": -0.5, "top_logprobs": top}]}
    assert next_of(openai) == next_of(llama) == Next(7, {7: -0.5, 11: -1.5})


def test_divergence_over_the_tokens_that_are_told() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    assert measuring.divergence(Next(0, {0: np.log(0.5), 1: np.log(0.25)}), logits) == pytest.approx(0, abs=1e-7)
    swapped = measuring.divergence(Next(0, {0: np.log(0.25), 1: np.log(0.5)}), logits)
    assert swapped == pytest.approx(0.25 * np.log(2), rel=1e-5)
    assert places(1000)[0] == 16 and places(1000)[-1] == 320


class Pretended(Running):
    """Answers at once, in make-believe times."""

    most = 100
    """Requests at a time with which it is not too slow."""

    def __init__(self, pid: int) -> None:
        self.pid, self.ready_s, self.stopped = pid, 1.5, False
        self.loads = 0

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Outcome]:
        self.loads += 1
        if concurrency > self.most:
            raise Over
        return [answer(float(i), [0.5] * ask.max_tokens) for i, ask in enumerate(asks)]

    def next_token(self, ids: Sequence[int]) -> Next:
        return Next(0, None)

    def stop(self) -> None:
        self.stopped = True


class PretendedEngine(Engine):
    def __init__(self, name: str, wrong: bool) -> None:
        self.name, self.wrong, self.runs = name, wrong, list[Pretended]()

    def version(self) -> str:
        return "1.0"

    def start(self, model: Model, way: str, log: Path) -> Running:
        if self.wrong:
            raise PeerError(f"{self.name} does not start")
        self.runs.append(Pretended(1))
        return self.runs[-1]


def test_a_comparison_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = PretendedEngine("octavo", False), PretendedEngine("llama.cpp", True)
    monkeypatch.setattr(command, "ENGINES", {"octavo": good, "llama.cpp": bad})
    monkeypatch.setattr(command, "home", lambda: tmp_path)
    monkeypatch.setattr(command, "SETTLE", 0.0)
    monkeypatch.setattr(measuring, "roofs", lambda: {"read_gb_s": 20.0, "float32_gop_s": 200.0, "int8_gop_s": 800.0})
    words = ["--parts", "serve", "--models", "smollm2", "--workloads", "single,burst100", "--rounds", "2", "--short"]
    command.main(words)
    assert len(good.runs) == 2 and all(run.stopped and run.loads == 4 for run in good.runs)
    bad.wrong = False
    command.main([*words, "--write", str(tmp_path / "out")])
    assert len(good.runs) == 2 and len(bad.runs) == 2
    said = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [(cell["peer"], cell["workload"], cell["rounds"]) for cell in said["cells"]] == [
        (peer, load, 2) for peer in ("octavo", "llama.cpp") for load in ("single", "burst100")
    ]
    assert said["failures"] == [] and said["setup"]["engines"] == {"octavo": "1.0", "llama.cpp": "1.0"}
    assert "| octavo | smollm2, Q4_1 | 1.50 | 2.00 | – |" in (tmp_path / "out" / "table.md").read_text()
    assert "llama.cpp, single: llama.cpp does not start" in capsys.readouterr().out


def test_a_workload_that_takes_too_long_is_told_and_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = PretendedEngine("octavo", False)
    monkeypatch.setattr(Pretended, "most", 4)
    monkeypatch.setattr(command, "ENGINES", {"octavo": slow})
    monkeypatch.setattr(command, "home", lambda: tmp_path)
    monkeypatch.setattr(command, "SETTLE", 0.0)
    monkeypatch.setattr(measuring, "roofs", lambda: {"read_gb_s": 20.0, "float32_gop_s": 200.0, "int8_gop_s": 800.0})
    words = ["--parts", "serve,noise", "--models", "smollm2", "--rounds", "1", "--short", "--write", str(tmp_path)]
    command.main([*words, "--workloads", "burst32,burst100,single"])
    # In the order single, burst100, burst32: started again after each that took too long.
    assert len(slow.runs) == 2 and all(run.stopped for run in slow.runs)
    page = (tmp_path / "table.md").read_text()
    assert "| octavo | smollm2, Q4_1 | 1.50 | 2.00 | – | – | over 180 s |" in page
    assert "- octavo, smollm2, burst100: ended after 180 s in at least one round." in page
    command.main([*words, "--workloads", "burst32,burst100,single"])
    assert len(slow.runs) == 2  # it is not measured again


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LONGEST", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        served = object.__new__(engines.Served)
        served._target = Target(f"http://127.0.0.1:{silent.getsockname()[1]}", model="m")
        with pytest.raises(Over, match="over 0 s"):
            served.load([Ask("Hello", 4)] * 2, 2)


@pytest.fixture
def stored(tmp_path: Path) -> Results:
    """Two rounds of two engines."""
    results = Results(tmp_path / "results.jsonl")
    results.say(
        machine={"cpu": "A CPU", "usable_threads": 2, "cpu_flags": ["avx2"], "memory_bytes": 2**34, "os": "Linux"},
        roofs={"read_gb_s": 20.0, "float32_gop_s": 200.0, "int8_gop_s": 800.0},
        date="2026-11-30",
        engines={"octavo": "0.1.0", "llama.cpp": "b11434"},
    )
    for number in (1, 2):
        for peer, speed in (("octavo", 200.0), ("llama.cpp", 100.0)):
            for streams in (1, 8, 100):
                figures = {"out_tok_s": speed * streams**0.5 * number, "failed": float(streams == 100)}
                results.add(Cell("smollm2", peer, f"closed{streams}"), number, figures)
            for rows in (1, 8):
                cell = Cell("llama-3.2-1b Q8_0", peer, f"decode{rows}")
                results.add(cell, number, {"tok_s": speed / 10 * rows, "weight_bytes": 1.3e9})
        results.add(Cell("smollm2", "octavo", "parity"), number, {"top1": 0.96, "kl": 0.0021})
        for workload, speed in (("burst32", 300.0), ("burst32-noisy", 150.0)):
            results.add(Cell("smollm2", "octavo", workload), number, {"out_tok_s": speed * number})
        results.add(Cell("smollm2 bfloat16", "vllm", "burst32"), number, {"out_tok_s": 70.0, "tpot_p50": 400.0})
    results.fail(Cell("smollm2 float32", "vllm", "closed8"), 1, "was ended by signal 9")
    return results


def test_tables(stored: Results) -> None:
    text = tables.markdown(stored)
    assert "A CPU, 2 threads (avx2), 16 GiB, Linux; 2026-11-30. octavo 0.1.0, llama.cpp b11434." in text
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "| octavo | smollm2, Q4_1 | 300 (200–400) | – | – | 849 (566–1,131) |" in text
    assert "| octavo | smollm2, Q4_1 | 96.0% | 2.1e-03 |" in text
    assert "| llama.cpp | llama-3.2-1b, Q8_0 | 10.0 | 80.0 | – | – |" in text
    assert "- vllm, smollm2 float32, closed8: was ended by signal 9" in text
    assert "- octavo, smollm2, closed100: up to 1 requests failed." in text
    assert rows["| vllm"] == "| vllm | smollm2, bfloat16 | 70.0 | 400 |"
    assert "| octavo | smollm2, Q4_1 | 450 (300–600) | 225 (150–300) | 50.0% |" in text


def test_pictures(stored: Results, tmp_path: Path) -> None:
    written = plots.write(stored, tmp_path / "plots")
    assert [path.name for path in written] == ["concurrency-smollm2.png", "roofline-llama-3.2-1b.png"]
    for path in written:
        pixels = imread(path)
        assert pixels.shape[0] > 500 and pixels.shape[1] > 800
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100
    curve = plots.curves(stored, [("smollm2", "octavo")])[("smollm2", "octavo")]
    assert curve[0] == (1, 300.0, 200.0, 400.0)
    entrant = ("llama-3.2-1b Q8_0", "octavo")
    (x1, y1, *_), (x8, y8, *_) = plots.rises(stored, [entrant])[entrant]
    weights = models.parameters("llama-3.2-1b Q8_0", True)
    assert weights == pytest.approx(1.236e9, rel=0.001)  # as published
    assert x1 == pytest.approx(2 * weights / 1.3e9) and x8 == pytest.approx(8 * x1)
    assert y1 == pytest.approx(20 * 2 * weights / 1e9) and y8 == pytest.approx(8 * y1)


def test_published_sizes() -> None:
    assert models.parameters("smollm2", True) == pytest.approx(134.5e6, rel=0.001)
    assert models.parameters("qwen2.5-0.5b int4", True) == pytest.approx(494e6, rel=0.001)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_files_of_a_shape(arch: str, tmp_path: Path) -> None:
    shape = Shape(arch, 256, 512, 2, 4, 2, 49152 + 64, 1e4, arch == "qwen2")
    file, folder = tmp_path / "m.gguf", tmp_path / "folder"
    models.write_gguf(shape, "Q4_K", file)
    models.write_folder(shape, folder)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert (kinds["blk.1.ffn_down.weight"], kinds["token_embd.weight"]) == ("Q4_K", "Q6_K")
    assert ("blk.0.attn_q.bias" in kinds) == shape.bias
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for path in (file, folder):
        with LLM(str(path), max_model_len=64, kv_cache_memory_bytes="16MiB") as llm:
            assert llm.info.vocab_size == shape.vocab
            (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3


def test_llama_cpp_has_slots_for_the_load() -> None:
    ways = {load: LlamaCpp().way(load) for load in ("burst100", "closed8", "prefill3000", "single")}
    assert ways == {"burst100": "many", "closed8": "many", "prefill3000": "few", "single": "few"}
    assert measuring.speed_said({"speed_tg": 1.0, "speed_pp": 2.0}, True) == 1.0


def test_roofs_of_this_machine() -> None:
    found = measuring.roofs()
    assert list(found) == ["read_gb_s", "float32_gop_s", "int8_gop_s"]
    assert all(value > 0.1 for value in found.values())
