"""The figures as tables: Markdown for pages, JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.peers.models import MODELS
from benchmarks.peers.results import Cell, Results, Spread
from benchmarks.peers.workloads import BATCHES, CURVE
from octavo.bench.charts import number


class Column(NamedTuple):
    title: str
    workload: str
    figure: str
    form: Callable[[float], str] = number


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _small(value: float) -> str:
    return f"{value:.1e}"


def _seconds(milliseconds: float) -> str:
    return number(milliseconds / 1000)


SERVE = (
    Column("ready, s", "single", "ready_s"),
    Column("one stream, tok/s", "single", "decode_tok_s"),
    Column("prompt of 512, tok/s", "prefill512", "prefill_tok_s"),
    Column("prompt of 3,000, tok/s", "prefill3000", "prefill_tok_s"),
    Column("100 at once, out tok/s", "burst100", "out_tok_s"),
    Column("latency p50, s", "burst100", "e2el_p50", _seconds),
    Column("p95, s", "burst100", "e2el_p95", _seconds),
    Column("memory, MiB", "burst100", "peak_mib"),
    Column("64 with one beginning, wall s", "prefix64", "wall_s"),
)
TABLES: dict[str, tuple[Column, ...]] = {
    "One server, one kind of load at a time": SERVE,
    "Output tokens per second with so many streams at a time": tuple(
        Column(str(streams), f"closed{streams}", "out_tok_s") for streams in CURVE
    ),
    "Many requests at once, output tokens per second": tuple(
        Column(str(count), f"burst{count}", "out_tok_s") for count in (100, 200, 400)
    ),
    "32 requests at once, quiet and beside a program that keeps one core busy, output tokens per second": (
        Column("quiet", "burst32", "out_tok_s"),
        Column("busy neighbour", "burst32-noisy", "out_tok_s"),
    ),
    "Beside the same model in float32": (
        Column("likeliest token the same", "parity", "top1", _percent),
        Column("KL divergence at least", "parity", "kl", _small),
    ),
    "Without a server, tokens per second": tuple(
        Column(title, workload, "tok_s")
        for title, workload in zip(("decode, 1", "8", "32 sequences", "prompt of 512"), BATCHES, strict=True)
    ),
}
"""By title."""


def markdown(results: Results) -> str:
    """All tables, ready for a page."""
    return "\n\n".join([heading(results), *(table(results, title, columns) for title, columns in TABLES.items())])


def heading(results: Results) -> str:
    """Where, when and with which engines was measured."""
    setup = results.setup
    about, roofs = setup.get("machine", {}), setup.get("roofs", {})
    engines = ", ".join(f"{name} {version}" for name, version in setup.get("engines", {}).items())
    flags = ", ".join(about.get("cpu_flags") or ())
    memory = (about.get("memory_bytes") or 0) / 2**30
    lines = [
        f"{about.get('cpu')}, {about.get('usable_threads')} threads ({flags}), {memory:.0f} GiB, {about.get('os')}; "
        f"{setup.get('date')}. {engines}.",
        "Medians of the rounds, with their lowest and highest in brackets.",
    ]
    if roofs:
        lines.insert(
            1,
            f"The machine reads {roofs['read_gb_s']:.0f} GB/s and does {roofs['float32_gop_s']:.0f} GOP/s of float32, "
            f"{roofs['int8_gop_s']:.0f} of 8-bit integers.",
        )
    return "\n".join(lines)


def table(results: Results, title: str, columns: Sequence[Column]) -> str:
    """Failures are told under it."""
    rows = [f"### {title}", "", f"| engine | weights | {' | '.join(column.title for column in columns)} |"]
    rows.append("|---" * (len(columns) + 2) + "|")
    told = []
    for model, peer in results.entrants({column.workload for column in columns}, list(MODELS)):
        cells = []
        for column in columns:
            cell = Cell(model, peer, column.workload)
            cells.append(_written(results.spread(cell, column.figure), column.form))
            failed = results.spread(cell, "failed")
            if failed is not None and failed.high:
                told.append(f"{peer}, {model}, {column.workload}: up to {failed.high:.0f} requests failed.")
            if cell in results.failures:
                told.append(f"{peer}, {model}, {column.workload}: {results.failures[cell]}")
        name = model.split(" ")[0]
        if any(cell != "–" for cell in cells) or told:
            rows.append(f"| {peer} | {name}, {MODELS[model].title} | {' | '.join(cells)} |")
    return "\n".join([*rows, *([""] if told else []), *(f"- {line}" for line in dict.fromkeys(told))])


def _written(spread: Spread | None, form: Callable[[float], str]) -> str:
    if spread is None:
        return "–"
    middle, low, high = (form(value) for value in spread)
    return middle if low == high else f"{middle} ({low}–{high})"


def as_json(results: Results) -> dict[str, Any]:
    """Every figure of every cell."""
    cells = []
    for cell, rounds in results.rounds.items():
        figures = {name: results.spread(cell, name) for name in next(iter(rounds.values()))}
        spreads = {name: spread._asdict() for name, spread in figures.items() if spread is not None}
        cells.append({**cell._asdict(), "rounds": len(rounds), "figures": spreads})
    failures = [{**cell._asdict(), "reason": reason} for cell, reason in results.failures.items()]
    return {"setup": results.setup, "cells": cells, "failures": failures}
