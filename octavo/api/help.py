"""What --help prints, and docs/options.md: the flags of a command in one line each, in full, or as tables."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from octavo.api.flags import GROUPS, Command, Flag
from octavo.unbuilt import NO_MEANING, UNBUILT

_COLUMN = 38
"""Where descriptions begin in the short help."""
_LONGEST_DEFAULT = 26
"""Characters of the defaults that the short help shows."""


def show(command: Command, word: str, parser: argparse.ArgumentParser) -> None:
    """Print the help that `--help=word` asks for: "" (one line per flag), all, listgroup, markdown, a group, or a flag
    or part of its name. A word that names nothing ends the program with exit status 2."""
    name = word.lstrip("-").replace("_", "-").lower()
    group = name.removesuffix("config").rstrip("-")
    lines: Iterable[str]
    if not word:
        lines = short(command)
    elif name == "all":
        lines = _sections(command.flags)
    elif name == "listgroup":
        lines = _groups(command)
    elif name == "markdown" and command.name == "serve":
        lines = markdown(command)
    elif not word.startswith("-") and any(flag.group == group for flag in command.flags):
        lines = _sections(flag for flag in command.flags if flag.group == group)
    else:
        lines = _matching(command, name, parser)
    print("\n".join(lines), flush=True)  # so that a reader that has enough is noticed here


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 72), 120)


def short(command: Command) -> Iterator[str]:
    """One line per flag, cut to the width of the terminal."""
    yield f"usage: octavo {command.name} {command.usage}"
    yield ""
    yield from textwrap.wrap(command.description, _width())
    yield ""
    for positional in command.positionals:
        yield _line(positional.name, positional.help, "")
    for group, flags in _by_group(command.flags):
        yield ""
        yield f"{group}: {GROUPS[group]}"
        for flag in flags:
            yield _line(_name(flag), flag.help, flag.default)
    yield ""
    yield "More: --help=all, --help=GROUP, --help=FLAG or part of its name; --help=listgroup lists the groups."
    if not command.options:
        yield "In [brackets]: defaults."
        return
    yield "In [brackets]: defaults. Flags are also keys of the --config file, and variables of the environment:"
    yield "--max-num-seqs is OCTAVO_MAX_NUM_SEQS. The command line wins over the file, the file over the environment."


def _line(name: str, help: str, default: str) -> str:
    end = f" [{default}]" if default and default != "off" and len(default) <= _LONGEST_DEFAULT else ""
    room = _width() - _COLUMN - len(end)
    text = help.removesuffix(".")
    if len(text) > room:
        text = text[: room - 1].rstrip(" ,;:") + "…"
    return f"  {name:{_COLUMN - 3}} {text}{end}"


def _name(flag: Flag) -> str:
    """How a flag is written, short enough for a column."""
    if flag.kind is bool:
        return flag.names[0].replace("--", "--[no-]", 1) if flag.default == "on" else flag.names[0]
    name = ", ".join((*(name for name in flag.names[1:] if len(name) == 2), flag.names[0]))
    value = flag.metavar if len(name) + len(flag.metavar) < _COLUMN - 4 else flag._replace(choices=()).metavar
    return f"{name} {value}{' ...' if flag.several else ''}"


def _by_group(flags: Iterable[Flag]) -> Iterator[tuple[str, list[Flag]]]:
    kept = list(flags)
    for group in GROUPS:
        if found := [flag for flag in kept if flag.group == group]:
            yield group, found


def _sections(flags: Iterable[Flag]) -> Iterator[str]:
    for group, found in _by_group(flags):
        yield f"{group}: {GROUPS[group]}"
        for flag in found:
            yield from _full(flag)
        yield ""


def _full(flag: Flag) -> Iterator[str]:
    """All about one flag."""
    names = [*flag.names, *(["--no-" + flag.names[0][2:]] if flag.kind is bool else [])]
    value = f" {flag.metavar}{' ...' if flag.several else ''}" if flag.metavar else ""
    yield f"  {', '.join(names)}{value}"
    notes = [flag.help]
    if flag.default:
        notes.append(f"Default: {flag.default}.")
    if flag.variable:
        notes.append(f"Environment: {flag.variable}.")
    yield from textwrap.wrap(" ".join(notes), _width(), initial_indent="      ", subsequent_indent="      ")


def _groups(command: Command) -> Iterator[str]:
    for group, flags in _by_group(command.flags):
        yield f"  {group:15} {len(flags):2} flags: {GROUPS[group]}"


def _matching(command: Command, word: str, parser: argparse.ArgumentParser) -> list[str]:
    """All about the flag `word`, or about all whose names contain it; vLLM's others too."""
    texts = {flag.names: list(_full(flag)) for flag in command.flags}
    for row in UNBUILT:
        texts[row.flags] = [f"  {', '.join(row.flags)} (vLLM's)", f"      {row.sentence}"]
    for old in NO_MEANING:
        texts[old.flags] = [f"  {', '.join(old.flags)} (vLLM's)", f"      Has no effect here: {old.reason}."]
    exact = [text for names, text in texts.items() if word in {name.lstrip("-") for name in names}]
    found = exact or [text for names, text in texts.items() if any(word in name for name in names)]
    if not found:
        known = [*GROUPS, *(name.removeprefix("--") for names in texts for name in names if name.startswith("--"))]
        near = difflib.get_close_matches(word, known, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "--help=listgroup lists the groups."
        parser.error(f"--help={word} names no flag and no group. {hint}")
    return [line for text in found for line in text]


def markdown(command: Command) -> Iterator[str]:
    """docs/options.md."""
    yield "# Options"
    yield ""
    yield "Made by `octavo serve --help=markdown > docs/options.md`."
    yield ""
    yield "Every flag is also a key of the file that `--config` names, and an environment variable; the command line"
    yield "wins over the file, and the file over the environment."
    for group, flags in _by_group(command.flags):
        yield ""
        yield f"## {group.capitalize()}: {GROUPS[group]}"
        yield ""
        yield "| flag | default | environment | what it does |"
        yield "|---|---|---|---|"
        for flag in flags:
            names = ", ".join(f"`{name}`" for name in flag.names)
            choices = f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}." if flag.choices else ""
            yield f"| {names} | {_cell(flag.default)} | `{flag.variable}` | {_cell(flag.help)}{choices} |"
    yield ""
    yield "## Flags of vLLM that are refused"
    yield ""
    yield "Their effect is not built. A value that asks for nothing (such as `-tp 1`) is accepted."
    yield ""
    yield "| flag | why, and what to do |"
    yield "|---|---|"
    for row in UNBUILT:
        yield f"| {', '.join(f'`{name}`' for name in row.flags)} | {_cell(row.sentence)} |"
    yield ""
    yield "## Flags of vLLM without an effect"
    yield ""
    yield "They are accepted with a warning."
    yield ""
    yield "| flag | why |"
    yield "|---|---|"
    for old in NO_MEANING:
        yield f"| {', '.join(f'`{name}`' for name in old.flags)} | {_cell(old.reason)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
