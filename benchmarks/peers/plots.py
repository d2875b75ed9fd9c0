"""The figures as pictures (PNG): speed over streams at a time, and speed under the machine's roofs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.peers.models import MODELS, parameters
from benchmarks.peers.results import Cell, Results
from benchmarks.peers.workloads import BATCHES, CURVE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"octavo": "#0b6e4f", "llama.cpp": "#c1440e", "openvino": "#3056a0", "vllm": "#8a5a9e"}
MARKS = "osD^vPX*"
LETTERS = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}


def write(results: Results, folder: Path) -> list[Path]:
    """All pictures for which there are figures; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(LETTERS):
        for family, entrants in _families(results, [f"closed{streams}" for streams in CURVE]):
            if lines := curves(results, entrants):
                written.append(_saved(_concurrency(results, family, lines), folder / f"concurrency-{family}.png"))
        for family, entrants in _families(results, BATCHES):
            points = rises(results, entrants)
            if points and results.setup.get("roofs"):
                written.append(_saved(_roofline(results, family, points), folder / f"roofline-{family}.png"))
    return written


def _families(results: Results, workloads: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The first word of models' names, and the models and peers that have it."""
    entrants = results.entrants(workloads, list(MODELS))
    for family, members in itertools.groupby(entrants, lambda entrant: entrant[0].split(" ")[0]):
        yield family, list(members)


Curve = list[tuple[float, float, float, float]]
"""x, then the median, the lowest and the highest of the rounds."""


def curves(results: Results, entrants: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Curve]:
    """Output tokens per second over the streams at a time."""
    found: dict[tuple[str, str], Curve] = {}
    for model, peer in entrants:
        for streams in CURVE:
            spread = results.spread(Cell(model, peer, f"closed{streams}"), "out_tok_s")
            if spread is not None:
                found.setdefault((model, peer), []).append((streams, *spread))
    return found


def rises(results: Results, entrants: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Curve]:
    """Operations per second in GOP/s over operations per byte of weights, of engines without a server.

    A batch of M sequences does 2 M operations for a weight that it reads once.
    """
    found: dict[tuple[str, str], Curve] = {}
    for model, peer in entrants:
        for workload in BATCHES:
            cell = Cell(model, peer, workload)
            spread, size = results.spread(cell, "tok_s"), results.spread(cell, "weight_bytes")
            if spread is None or size is None:
                continue
            rows, head = (512, False) if workload == "prompt512" else (int(workload.removeprefix("decode")), True)
            operations = 2 * parameters(model, head)
            point = (rows * operations / size.median, *(1e-9 * value * operations for value in spread))
            found.setdefault((model, peer), []).append(point)
    return found


def _concurrency(results: Results, family: str, lines: Mapping[tuple[str, str], Curve]) -> Any:
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for (model, peer), curve in lines.items():
        _line(axes, curve, f"{peer}, {MODELS[model].title}", COLOURS[peer], "o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(CURVE, [str(streams) for streams in CURVE])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at a time (log scale)")
    axes.set_ylabel("output tokens per second, all together")
    axes.set_title(f"{family}, over HTTP but for OpenVINO")
    axes.legend(frameon=False)
    _footnote(figure, results)
    return figure


def _roofline(results: Results, family: str, points: Mapping[tuple[str, str], Curve]) -> Any:
    roofs = results.setup["roofs"]
    figure, axes = plt.subplots(figsize=(8.5, 5.5), layout="constrained")
    models = list(dict.fromkeys(model for model, _ in points))
    xs = [x for curve in points.values() for x, *_ in curve]
    left, right = min(xs) / 1.5, max(xs) * 1.5
    for name, top in (("8-bit integers", roofs["int8_gop_s"]), ("float32", roofs["float32_gop_s"])):
        ridge = top / roofs["read_gb_s"]
        axes.plot([left, ridge, right], [left * roofs["read_gb_s"], top, top], color="#444", lw=1, zorder=1)
        axes.annotate(f"{name}: {top:,.0f} GOP/s", (right, top), ha="right", va="bottom", color="#444")
    said = f"memory: {roofs['read_gb_s']:.0f} GB/s"
    axes.annotate(said, (left * 1.1, left * 1.2 * roofs["read_gb_s"]), rotation=35, color="#444")
    for (model, peer), curve in points.items():
        mark = MARKS[models.index(model) % len(MARKS)]
        _line(axes, curve, f"{peer}, {MODELS[model].title}", COLOURS[peer], mark)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte of weights (1, 8, 32 sequences, a prompt of 512)")
    axes.set_ylabel("GOP/s")
    axes.set_title(f"{family} under the roofs of the machine, without a server")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _footnote(figure, results)
    return figure


def _line(axes: Any, curve: Curve, label: str, colour: str, mark: str) -> None:
    xs, ys, lows, highs = zip(*curve, strict=True)
    below, above = ([abs(y - end) for y, end in zip(ys, ends, strict=True)] for ends in (lows, highs))
    axes.errorbar(xs, ys, [below, above], label=label, color=colour, marker=mark, ms=5, lw=1.5, capsize=2)


def _footnote(figure: Any, results: Results) -> None:
    about = results.setup.get("machine", {})
    engines = ", ".join(f"{name} {version}" for name, version in results.setup.get("engines", {}).items())
    text = f"{about.get('cpu')}, {about.get('usable_threads')} threads; {results.setup.get('date')}; {engines}"
    figure.supxlabel(text, fontsize=7, color="#666")


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
