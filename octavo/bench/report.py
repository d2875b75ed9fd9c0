"""The results of a comparison for people: a table for the terminal, and one page of HTML that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from octavo.bench import charts
from octavo.bench.charts import Bar, Block, Series
from octavo.bench.verdict import Results, complete, findings, judge, values_of

LATENCIES = (
    ("ttft", "Time to the first token (TTFT)", "How long a user waits until something appears."),
    ("itl", "Time between tokens (ITL)", "How steadily an answer flows: the time between two events with text."),
    ("e2el", "Whole answer (E2E)", "From sending a request to the end of its answer."),
)
_MIB = 2**20


def write(results: Results, folder: Path) -> tuple[Path, Path]:
    """Write results.json and report.html into a folder; returns their paths."""
    raw, page = folder / "results.json", folder / "report.html"
    raw.write_text(json.dumps(results, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    page.write_text(html(results), encoding="utf-8")
    return raw, page


# -- for the terminal


_COLUMNS = (
    *("at once", "server", "out tok/s", "(rounds)", "req/s"),
    *("TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99"),
    *("out tok/req", "errors", "memory"),
)


def table(results: Results) -> str:
    """The summary in columns; times are milliseconds."""
    lines = [_COLUMNS]
    for row in results["summary"]:
        cells = (str(row["concurrency"]), row["server"])
        if not row["rounds"]:
            lines.append((*cells, "not measured", *[""] * (len(_COLUMNS) - 3)))
            continue
        speed = row["output_tok_s"]
        latencies = (
            charts.number(row["latency_ms"][metric][percent]) if metric in row["latency_ms"] else "-"
            for metric, _, _ in LATENCIES
            for percent in ("p50", "p99")
        )
        done = row["requests"] - row["errors"]
        lines.append(
            (
                *cells,
                charts.number(speed["median"]),
                f"{charts.number(speed['min'])}-{charts.number(speed['max'])}",
                charts.number(row["requests_s"]["median"]),
                *latencies,
                charts.number(row["output_tokens"] / done) if done else "-",
                str(row["errors"]),
                memory(row["memory_peak"]),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def memory(size: float | None) -> str:
    """Bytes in MiB or GiB."""
    if size is None:
        return "unknown"
    mib = size / _MIB
    return f"{mib:,.0f} MiB" if mib < 10_240 else f"{mib / 1024:,.1f} GiB"


# -- the page


def html(results: Results) -> str:
    """One page: plots, tables, setup and warnings; it asks nothing of the network and runs no script."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = charts.number
    environment.filters["memory"] = memory
    series = {server["name"]: Series(server["name"], index) for index, server in enumerate(results["servers"])}
    return environment.get_template("report.html.jinja").render(
        results=results,
        series=series,
        setup=results["setup"],
        findings=findings(results["summary"]),
        judgements=[(pair, judge(pair)) for pair in results["agreement"]],
        groups=_groups(results),
        best={
            level["concurrency"]: max(
                (row["output_tok_s"]["median"] for row in _rows(results, level["concurrency"])), default=None
            )
            for level in results["setup"]["levels"]
        },
        plots=_Plots(results, series),
        latencies=LATENCIES,
        processor=_processor(results["setup"]["machine"]),
    )


def _processor(machine: Mapping[str, Any]) -> str:
    threads = machine["usable_threads"] or machine["threads"]
    limit = f", limited to {machine['cpu_limit']:g}" if machine["cpu_limit"] else ""
    return f"{machine['cpu'] or 'unknown CPU'}, {threads} threads{limit}"


def _rows(results: Results, concurrency: int) -> list[Results]:
    return [row for row in results["summary"] if row["concurrency"] == concurrency and row["rounds"]]


def _groups(results: Results) -> list[tuple[int, list[Results]]]:
    """The rows of the summary by load, those without rounds included."""
    return [
        (level["concurrency"], [row for row in results["summary"] if row["concurrency"] == level["concurrency"]])
        for level in results["setup"]["levels"]
    ]


class _Plots:
    """The plots of a page, as the template asks for them."""

    def __init__(self, results: Results, series: Mapping[str, Series]) -> None:
        self._results = results
        self._series = series
        self._levels = [level["concurrency"] for level in results["setup"]["levels"]]

    def throughput(self) -> list[tuple[str, Markup]]:
        """A plot for each load."""
        return [
            (_heading(level), Markup(charts.bars("throughput", self._speeds(rows), "output tokens per second")))
            for level in self._levels
            if (rows := _rows(self._results, level))
        ]

    def _speeds(self, rows: Iterable[Results]) -> list[Bar]:
        return [
            Bar(self._series[row["server"]], speed["median"], speed["min"], speed["max"], speed["rounds"])
            for row in rows
            for speed in [row["output_tok_s"]]
        ]

    def distribution(self, metric: str) -> list[tuple[str, Markup]]:
        """Plots of one latency, one for each load; all of them in the same unit."""
        found = {
            level: [
                (series, [value for turn in complete(self._results, name, level) for value in values_of(turn, metric)])
                for name, series in self._series.items()
            ]
            for level in self._levels
        }
        every = [value for curves in found.values() for _, values in curves for value in values]
        if not every:
            return []
        unit, scale = ("s", 1000.0) if max(every) > 5000 else ("ms", 1.0)
        name = metric.removesuffix("l").upper() if metric == "e2el" else metric.upper()
        return [
            (
                _heading(level),
                Markup(
                    charts.shares(
                        f"{metric} distribution",
                        [(series, [value / scale for value in values]) for series, values in curves],
                        f"{name}, {unit}",
                        charts.spans_decades(value for _, values in curves for value in values),
                    )
                ),
            )
            for level, curves in found.items()
            if any(values for _, values in curves)
        ]

    def over_concurrency(self) -> list[tuple[str, Markup]]:
        """How speeds and waiting change with the load; nothing for a single load."""
        if len(self._levels) < 2:
            return []
        wanted: Sequence[tuple[str, str, Callable[[Results], tuple[float, float, float] | None]]] = (
            ("All answers together", "output tokens/s", _speed),
            ("A single answer", "output tokens/s", _speed_of_one),
            ("Wait for the first token", "TTFT, ms", _wait),
        )
        return [
            (
                title,
                Markup(charts.lines("speed over concurrency", self._through(value), label, "requests at a time")),
            )
            for title, label, value in wanted
        ]

    def _through(
        self, value: Callable[[Results], tuple[float, float, float] | None]
    ) -> list[tuple[Series, list[tuple[float, float, float, float]]]]:
        return [
            (
                series,
                [
                    (row["concurrency"], *found)
                    for level in sorted(self._levels)
                    for row in _rows(self._results, level)
                    if row["server"] == name and (found := value(row)) is not None
                ],
            )
            for name, series in self._series.items()
        ]

    def memory(self) -> list[tuple[str, Markup]]:
        """Bars of what each server needs at most, of main memory and of GPUs'; those of unknown ones are left out."""
        kinds = (
            ("memory_peak", "Most resident memory of the tree of processes"),
            ("memory_proportional", "The same after a turn, shared pages counted once"),
            ("gpu_peak", "Most GPU memory"),
        )
        return [
            (title, Markup(charts.bars("memory", bars, "MiB")))
            for key, title in kinds
            if (bars := list(self._sizes(key)))
        ]

    def _sizes(self, key: str) -> Iterable[Bar]:
        for name, series in self._series.items():
            found = [row[key] for row in self._results["summary"] if row["server"] == name and row.get(key)]
            if found:
                yield Bar(series, max(found) / _MIB, max(found) / _MIB, max(found) / _MIB)

    def timeline(self) -> Markup:
        """Who was at work when."""
        blocks = [
            Block(
                self._series[turn["server"]],
                turn["begun_s"],
                turn["begun_s"] + turn["wall_s"],
                str(turn["concurrency"]),
                f"{turn['server']}, {turn['concurrency']} at a time, round {turn['round']}: "
                + (f"{turn['figures']['output_throughput']:,.1f} tokens/s" if turn["complete"] else turn["problem"]),
                not turn["complete"],
            )
            for turn in self._results["turns"]
        ]
        return Markup(charts.timeline("timeline", list(self._series.values()), blocks, self._results["took_s"]))

    def traces(self) -> list[tuple[str, Markup]]:
        """Memory and CPU of the servers while they were at work."""
        found = []
        for title, unit, value in (
            ("Resident memory", "MiB", _resident),
            ("CPU", "cores busy", _cores),
        ):
            series = [
                (
                    series,
                    [value(turn) for turn in self._results["turns"] if turn["server"] == name and turn["samples"]],
                )
                for name, series in self._series.items()
            ]
            if any(pieces for _, pieces in series):
                kind = f"{title.lower()} over time"
                found.append((title, Markup(charts.traces(kind, series, self._results["took_s"], unit))))
        return found


def _heading(concurrency: int) -> str:
    return "1 request at a time" if concurrency == 1 else f"{concurrency} requests at a time"


def _speed(row: Results) -> tuple[float, float, float]:
    found = row["output_tok_s"]
    return found["median"], found["min"], found["max"]


def _speed_of_one(row: Results) -> tuple[float, float, float] | None:
    found = row["latency_ms"].get("tpot")
    if found is None or not found["p50"]:
        return None
    return tuple(1000 / found[percent] if found[percent] else 0.0 for percent in ("p50", "p75", "p25"))  # type: ignore[return-value]


def _wait(row: Results) -> tuple[float, float, float] | None:
    found = row["latency_ms"].get("ttft")
    return None if found is None else (found["p50"], found["p50"], found["p95"])


def _resident(turn: Results) -> list[tuple[float, float]]:
    return [(at, resident / _MIB) for at, resident, _, _ in turn["samples"]]


def _cores(turn: Results) -> list[tuple[float, float]]:
    """Between each two samples that are not too close for the kernel's clock."""
    points: list[tuple[float, float]] = []
    before = turn["samples"][0]
    for sample in turn["samples"][1:]:
        if (seconds := sample[0] - before[0]) >= 0.1:
            points.append(((sample[0] + before[0]) / 2, max(0.0, sample[2] - before[2]) / seconds))
            before = sample
    return points
