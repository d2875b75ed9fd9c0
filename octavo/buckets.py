"""Histograms as plain counts, with the edges vLLM has: for the engine, the server's metrics and `LLM.get_metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

# fmt: off
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Seconds of whole requests and of their phases."""
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
"""Seconds to the first token."""
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""Seconds between two tokens."""
# fmt: on
TOKENS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))
"""Tokens of a prompt or an answer."""
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
"""Tokens of a step: 1, 8, 16, … 16384."""
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class Counts(msgspec.Struct):
    """How many values fell into each bucket, and their sum. A value belongs to the first of `bounds` that is not
    smaller; the last count is of those above all."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Counts:
        return cls(tuple(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def plus(self, other: Counts) -> Counts:
        """Both together; they have the same bounds."""
        return Counts(
            self.bounds, [a + b for a, b in zip(self.counts, other.counts, strict=True)], self.sum + other.sum
        )

    def copy(self) -> Counts:
        return Counts(self.bounds, list(self.counts), self.sum)

    def cumulative(self) -> list[int]:
        """Per bucket how many values are at most its bound; the last one is how many there are."""
        total, found = 0, []
        for count in self.counts:
            total += count
            found.append(total)
        return found
