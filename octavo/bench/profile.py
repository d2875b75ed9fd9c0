"""Where the time of steps went, by kind of operation, beside what the machine could have done in that time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.ops.contract import OpTime, Roofline

PLAN = "plan"
"""Every step has one: the cutting of its attention into work items."""
FORMS = ("float32", "int8", "int16", "bfloat16")
"""Types of the inputs of multiply-adds, in the order of `OpTime.operations`."""
KINDS = {"prefill": False, "decode": True}
"""Steps that have tokens of a prompt, and those that have one token of each sequence."""


class Profile:
    """A profile as a table and as plain data.

    Args:
        times: of all operations.
        roofline: of the machine.
        elapsed: seconds on the clock in which these steps ran, one after the other.
    """

    def __init__(self, times: Sequence[OpTime], roofline: Roofline, elapsed: float) -> None:
        self.times = sorted(times, key=lambda time: -time.seconds)
        self.roofline = roofline
        self.host = elapsed - sum(time.seconds for time in times)
        """Seconds in which no step ran: what Python does between two of them, where nothing hides it."""
        self.elapsed = elapsed

    def _of(self, decode: bool) -> tuple[int, list[OpTime]]:
        """Steps of a kind, and their operations, the longest first."""
        times = [time for time in self.times if time.decode == decode]
        return sum(time.calls for time in times if time.name == PLAN), times

    def table(self) -> str:
        """Per kind of steps a line for each operation."""
        lines = []
        for kind, decode in KINDS.items():
            steps, times = self._of(decode)
            if not steps:
                continue
            seconds = sum(time.seconds for time in times)
            lines += [
                f"{kind.capitalize()}: {_counted(steps)} of {1000 * seconds / steps:.3f} ms",
                f"  {'operation':34}{'calls':>7}{'ms':>10}{'share':>9}{'GB/s':>8}{'GOP/s':>9}{'of roofline':>13}",
            ]
            for time in times:
                rates = (f"{x / time.seconds / 1e9:.1f}" if x else "" for x in (time.bytes, sum(time.operations)))
                reached = self._reached(time)
                lines.append(
                    f"  {time.name:34}{time.calls / steps:7.4g}{1000 * time.seconds / steps:10.3f}"
                    f"{time.seconds / seconds:9.1%}{next(rates):>8}{next(rates):>9}"
                    f"{'' if reached is None else f'{reached:.0%}':>13}".rstrip()
                )
        steps = sum(self._of(decode)[0] for decode in KINDS.values())
        peaks = ", ".join(
            f"{peak / 1e9:.0f} GOP/s {form}"
            for form, peak in zip(FORMS, self.roofline.operations_per_second, strict=True)
        )
        lines += [
            f"Host, beside the steps: {1000 * self.host / max(1, steps):.3f} ms per step, "
            f"{self.host / self.elapsed:.1%} of the time",
            f"Roofline: {self.roofline.bytes_per_second / 1e9:.1f} GB/s read, {peaks}",
        ]
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """The same for a file; seconds, bytes and operations of all steps together."""
        peaks = dict(zip(FORMS, self.roofline.operations_per_second, strict=True))
        found: dict[str, Any] = {
            "host_seconds": self.host,
            "roofline": {"bytes_per_second": self.roofline.bytes_per_second, "operations_per_second": peaks},
        }
        for kind, decode in KINDS.items():
            steps, times = self._of(decode)
            found[kind] = {
                "steps": steps,
                "operations": [
                    {
                        "name": time.name,
                        "calls": time.calls,
                        "seconds": time.seconds,
                        "bytes": time.bytes,
                        "operations": dict(zip(FORMS, time.operations, strict=True)),
                        "of_roofline": self._reached(time),
                    }
                    for time in times
                ],
            }
        return found

    def _reached(self, time: OpTime) -> float | None:
        """The least time the machine would need, as share of the time it took; None for what has no count."""
        least = self.roofline.seconds(time)
        return least / time.seconds if least and time.seconds else None


def _counted(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"
