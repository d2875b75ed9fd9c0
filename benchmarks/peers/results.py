"""Figures as they come, a line each in a file, so that a comparison can be stopped and go on; and what they come to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

Figures = dict[str, float]


class Cell(NamedTuple):
    """What is measured once in each round."""

    model: str
    peer: str
    workload: str


class Spread(NamedTuple):
    """Of the rounds of a cell."""

    median: float
    low: float
    high: float


@dataclass
class Results:
    """All figures of a file. A failure is kept as its reason, and is measured again when the comparison goes on."""

    path: Path
    setup: dict[str, Any] = field(default_factory=dict)
    """The machine, its roofs, versions of the engines."""
    rounds: dict[Cell, dict[int, Figures]] = field(default_factory=dict)
    failures: dict[Cell, str] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Results:
        """Of a file that may not exist yet; a line that was cut short by a stop is left out."""
        results = Results(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "setup" in said:
                results.setup |= said["setup"]
            else:
                cell = Cell(*said["cell"])
                results._put(cell, said["round"], said.get("figures"), said.get("failure"))
        return results

    def _put(self, cell: Cell, number: int, figures: Figures | None, failure: str | None) -> None:
        if figures is None:
            self.failures[cell] = str(failure)
            return
        self.rounds.setdefault(cell, {})[number] = figures
        self.failures.pop(cell, None)

    def has(self, cell: Cell, number: int) -> bool:
        return number in self.rounds.get(cell, {})

    def add(self, cell: Cell, number: int, figures: Figures) -> None:
        self._put(cell, number, figures, None)
        self._write({"cell": cell, "round": number, "figures": figures})

    def fail(self, cell: Cell, number: int, reason: str) -> None:
        self._put(cell, number, None, reason)
        self._write({"cell": cell, "round": number, "failure": reason})

    def say(self, **about: Any) -> None:
        """Add to `setup`, where it is something new."""
        if any(self.setup.get(key) != value for key, value in about.items()):
            self.setup |= about
            self._write({"setup": about})

    def _write(self, said: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if cut else "") + json.dumps(said) + "\n")

    def spread(self, cell: Cell, figure: str) -> Spread | None:
        """None where no round has that figure."""
        values = [found[figure] for found in self.rounds.get(cell, {}).values() if found.get(figure) is not None]
        return Spread(median(values), min(values), max(values)) if values else None

    def entrants(self, workloads: Iterable[str], models: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Model and peer of all that were measured under one of some workloads, in the order of `models`."""
        wanted = set(workloads)
        cells = [cell for cell in (*self.rounds, *self.failures) if cell.workload in wanted and cell.model in models]
        ordered = sorted(cells, key=lambda cell: models.index(cell.model))
        yield from dict.fromkeys((cell.model, cell.peer) for cell in ordered)
