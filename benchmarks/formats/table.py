"""Figures of all formats as a table for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks.formats.apart import Figures
from benchmarks.formats.speeds import STREAMS


def number(row: Figures, key: str, form: str) -> str:
    """Of what was measured in several rounds, the median."""
    rounds = [one[key] for one in row.get("speeds", []) if key in one]
    value = row.get(key, median(rounds) if rounds else None)
    return "–" if value is None else format(value, form)


def markdown(found: Mapping[str, Figures]) -> str:
    rows = [
        "| format | written by | bits per weight | file, MiB | in memory, MiB | loading adds, MiB | KL, top-1: float32 "
        "activations | activations | KL, top-1: default | load, s | tok/s, 1 stream | 32 streams |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        title = f"`{name}`" if name.startswith("--") else name
        exact, by_default = (
            f"{number(row, a + 'kl', '.1e')}, {number(row, a + 'top1', '.1%')}" if a + "kl" in row else "–"
            for a in ("", "default_")
        )
        cells = (
            title,
            row.get("by", "–"),
            number(row, "bits", ".2f"),
            number(row, "file_mib", ".0f"),
            number(row, "memory_mib", ".0f"),
            number(row, "rss_mib", ".0f"),
            exact,
            row.get("activations", "–"),
            by_default,
            number(row, "load_s", ".1f"),
            *(number(row, f"tok_s_{streams}", ".0f") for streams in STREAMS),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
