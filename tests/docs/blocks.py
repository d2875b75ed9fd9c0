"""The fenced blocks of a page, and what their markers say is to be done with them.

A marker is an HTML comment on the line before a block, which no reader sees:

    <!-- run -->            a command or a program that ends; its status must be 0
    <!-- serves -->         a command that goes on; the next block waits until a server of it answers
    <!-- serves: CMD -->    the same, but CMD is run: what is left of the command when all is installed
    <!-- output -->         what the block before has printed; ... stands for anything
    <!-- file: NAME -->     the content of a file that later blocks read
    <!-- from: PATH -->     a part of a file of the repository
    <!-- not run: WHY -->   a command that cannot run in a test; `NOT_RUN` has the reasons
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = frozenset({"bash", "sh", "shell", "console", "python", "py", "pycon"})
"""Languages whose blocks a reader is to run."""

NOT_RUN: dict[str, frozenset[str]] = {
    "installs from a package index": frozenset({"pip", "python", "python3", "scripts/serve", "sudo", ".venv/bin/pip"}),
    "needs a Docker daemon": frozenset({"docker"}),
    "needs a cluster": frozenset({"kubectl"}),
    "needs systemd, as root": frozenset({"sudo", "systemctl", "journalctl", "systemd-analyze"}),
    "needs a terminal": frozenset({"octavo"}),
    "needs a model from a hub": frozenset({"octavo", "hf"}),
    "runs the tests themselves": frozenset({"scripts/test", "scripts/check"}),
    "builds this site, which a test of its own does": frozenset({"scripts/docs"}),
    "takes minutes": frozenset({"scripts/bench", "python"}),
}
"""Why a command is not run, and the first words of the commands that may say so."""

KINDS = frozenset({"run", "serves", "output", "file", "from", "not run"})

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[\w+-]*)(?P<rest>.*)$")
_MARKER = re.compile(r"^ *<!-- (?P<kind>run|serves|output|file|from|not run)(?:: (?P<value>.+?))? -->$")
_NEEDS_VALUE = frozenset({"file", "from", "not run"})
_TAKES_VALUE = _NEEDS_VALUE | {"serves"}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    line: int
    """Of its fence, counted from 1."""
    language: str
    text: str
    kind: str = ""
    """Of its marker; empty where it has none."""
    value: str = ""

    @property
    def commands(self) -> list[str]:
        """The first words of its lines, without comments and lines that go on the one before."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        lines = [line.strip() for line in joined.splitlines()]
        return [line.split()[0] for line in lines if line and not line.startswith("#")]


class Unreadable(ValueError):
    """A page whose blocks or markers cannot be read; the text has the line."""


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page in Markdown, in order.

    Raises:
        Unreadable: a fence without an end, a marker without a block, or one that lacks its value.
    """
    found: list[Block] = []
    marker: re.Match[str] | None = None
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        opened = _FENCE.match(line)
        if opened:
            found.append(_block(number, opened, marker, lines))
            marker = None
        elif marker is not None:
            raise Unreadable(f"line {number}: no block follows the marker {marker[0].strip()}")
        else:
            marker = _MARKER.match(line)
            if marker and marker["kind"] not in (_TAKES_VALUE if marker["value"] else KINDS - _NEEDS_VALUE):
                raise Unreadable(f"line {number}: {marker[0].strip()} lacks its value, or has one too many")
    if marker is not None:
        raise Unreadable("the last line is a marker without a block")
    return found


def _block(number: int, opened: re.Match[str], marker: re.Match[str] | None, lines) -> Block:  # type: ignore[no-untyped-def]
    indent, fence = opened["indent"], opened["fence"]
    body = []
    for _, line in lines:
        if line.strip() == fence:
            kind, value = (marker["kind"], marker["value"] or "") if marker else ("", "")
            return Block(number, opened["language"], "".join(f"{part}\n" for part in body), kind, value)
        body.append(line.removeprefix(indent))
    raise Unreadable(f"line {number}: the block has no end")


def pages() -> list[Path]:
    """Every page that holds blocks for readers."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
