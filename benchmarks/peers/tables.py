"""The figures as tables: Markdown for pages, JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.peers.models import MODELS
from benchmarks.peers.results import Cell, Results
from benchmarks.peers.workloads import CURVE
from octavo.bench.charts import number


class Column(NamedTuple):
    title: str
    workload: str
    figure: str
    form: Callable[[float], str] = number
    over: str | None = None
    """The workload whose median the figure is divided by."""


class Table(NamedTuple):
    title: str
    columns: tuple[Column, ...]
    measured: frozenset[str]
    """Workloads of which one makes an engine a row."""
    models: tuple[str, ...] = tuple(MODELS)


def _table(title: str, *columns: Column, models: Sequence[str] = tuple(MODELS)) -> Table:
    return Table(title, columns, frozenset(column.workload for column in columns), tuple(models))


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _small(value: float) -> str:
    return f"{value:.1e}"


def _seconds(milliseconds: float) -> str:
    return number(milliseconds / 1000)


MANY = frozenset({"burst200", "burst400"})
TABLES = (
    _table(
        "One server, one kind of load at a time",
        Column("ready, s", "single", "ready_s"),
        Column("one stream, tok/s", "single", "decode_tok_s"),
        Column("prompt of 512, tok/s", "prefill512", "prefill_tok_s"),
        Column("prompt of 3,000, tok/s", "prefill3000", "prefill_tok_s"),
        Column("100 at once, out tok/s", "burst100", "out_tok_s"),
        Column("latency p50, s", "burst100", "e2el_p50", _seconds),
        Column("p95, s", "burst100", "e2el_p95", _seconds),
        Column("memory, MiB", "burst100", "peak_mib"),
        Column("64 with one beginning, wall s", "prefix64", "wall_s"),
    ),
    _table(
        "Output tokens per second with so many streams at a time",
        *(Column(str(streams), f"closed{streams}", "out_tok_s") for streams in CURVE),
    ),
    _table(
        "Many requests at once, output tokens per second",
        *(Column(str(count), f"burst{count}", "out_tok_s") for count in (100, 200, 400)),
    )._replace(measured=MANY),
    _table(
        "32 requests at once with weights in floats, output tokens per second",
        Column("out tok/s", "burst32", "out_tok_s"),
        Column("one token of a stream, ms", "burst32", "tpot_p50"),
        models=("smollm2 float32", "smollm2 bfloat16"),
    ),
    _table(
        "32 requests at once beside a program that keeps one core busy, output tokens per second",
        Column("quiet", "burst32", "out_tok_s"),
        Column("busy neighbour", "burst32-noisy", "out_tok_s"),
        Column("share of quiet", "burst32-noisy", "out_tok_s", _percent, "burst32"),
    )._replace(measured=frozenset({"burst32-noisy"})),
    _table(
        "Beside the same model in float32",
        Column("likeliest token the same", "parity", "top1", _percent),
        Column("KL divergence at least", "parity", "kl", _small),
    ),
    _table(
        "Without a server, tokens per second",
        Column("decode, 1 sequence", "decode1", "tok_s"),
        Column("8", "decode8", "tok_s"),
        Column("32", "decode32", "tok_s"),
        Column("prompt of 512", "prompt512", "tok_s"),
    ),
)


def markdown(results: Results) -> str:
    """All tables, ready for a page."""
    return "\n\n".join([heading(results), *(written(results, table) for table in TABLES)])


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


def written(results: Results, table: Table) -> str:
    """Failures are told under it."""
    rows = [f"### {table.title}", "", f"| engine | weights | {' | '.join(column.title for column in table.columns)} |"]
    rows.append("|---" * (len(table.columns) + 2) + "|")
    told = []
    for model, peer in results.entrants(table.measured, table.models):
        cells = []
        for column in table.columns:
            cell = Cell(model, peer, column.workload)
            cells.append(_cell(results, cell, column))
            if over := results.spread(cell, "over_s"):
                told.append(f"{peer}, {model}, {column.workload}: ended after {over.high:.0f} s in at least one round.")
            failed = results.spread(cell, "failed")
            if failed is not None and failed.high:
                told.append(f"{peer}, {model}, {column.workload}: up to {failed.high:.0f} requests failed.")
            if cell in results.failures:
                told.append(f"{peer}, {model}, {column.workload}: {results.failures[cell]}")
        rows.append(f"| {peer} | {model.split(' ')[0]}, {MODELS[model].title} | {' | '.join(cells)} |")
    return "\n".join([*rows, *([""] if told else []), *(f"- {line}" for line in dict.fromkeys(told))])


def _cell(results: Results, cell: Cell, column: Column) -> str:
    spread = results.spread(cell, column.figure)
    if spread is None:
        over = results.spread(cell, "over_s")
        return "–" if over is None else f"over {over.high:.0f} s"
    if column.over is not None:
        whole = results.spread(cell._replace(workload=column.over), column.figure)
        return "–" if whole is None else column.form(spread.median / whole.median)
    middle, low, high = (column.form(value) for value in spread)
    return middle if low == high else f"{middle} ({low}–{high})"


def as_json(results: Results) -> dict[str, Any]:
    """Every figure of every cell."""
    cells = []
    for cell, rounds in results.rounds.items():
        names = dict.fromkeys(name for found in rounds.values() for name in found)
        figures = {name: results.spread(cell, name) for name in names}
        spreads = {name: spread._asdict() for name, spread in figures.items() if spread is not None}
        cells.append({**cell._asdict(), "rounds": len(rounds), "figures": spreads})
    failures = [{**cell._asdict(), "reason": reason} for cell, reason in results.failures.items()]
    return {"setup": results.setup, "cells": cells, "failures": failures}
