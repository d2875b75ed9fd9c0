"""Flags of the command line, made from the fields of `EngineConfig` and from tables: how they are read.

vLLM's spellings all work: --max_model_len, --flag=value, --no-switch, -tp 1, --json-flag.key value.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, NamedTuple, NoReturn

from octavo.config import TRUTH, ConfigError, EngineConfig, count, length, mapping, size
from octavo.unbuilt import NO_MEANING, UNBUILT, NoMeaning, Unbuilt, refuse

GROUPS = {
    "answers": "what is asked, and how answers are made",
    "target": "which server is measured",
    "prompts": "what is asked",
    "load": "how often, and how fast one after the other",
    "sampling": "how answers are drawn",
    "results": "which figures, and where they go",
    "model": "which model, and how it is read",
    "cache": "memory of keys and values",
    "scheduler": "what shares a step",
    "device": "where and how it computes",
    "server": "address, keys, TLS, browsers, start and end",
    "requests": "limits of requests, chat templates, what answers hold",
    "observability": "logs and traces",
}
"""The groups of flags in the order in which they are shown."""


class Flag(NamedTuple):
    """One flag, as the parser, the help and docs/options.md need it."""

    names: tuple[str, ...]
    """The first one is its name in full; its attribute of the parsed arguments follows from it."""
    group: str
    help: str
    kind: Callable[[str], Any] = str
    """Reads its text; bool for a switch."""
    choices: tuple[Any, ...] = ()
    several: bool = False
    default: str = ""
    """In words; empty where there is nothing to say."""
    variable: str = ""
    """The environment variable that sets it too."""
    value: str = ""
    """What its value is called in the help; empty: as its kind or its name says."""

    @property
    def dest(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")

    @property
    def metavar(self) -> str:
        """What stands for its value in the help; empty for a switch."""
        if self.kind is bool:
            return ""
        if self.choices:
            return "{" + ",".join(map(str, self.choices)) + "}"
        named = {int: "N", float: "N", count: "N", length: "N", mapping: "JSON"}
        return self.value or named.get(self.kind) or self.dest.rpartition("_")[2].upper()


def flag_of(option: Field[Any]) -> Flag:
    """The flag of a field whose metadata say what a flag needs."""
    about = option.metadata
    text, _, default = about["help"].partition(" Default: ")
    name = option.name.replace("_", "-")
    return Flag(
        (f"--{name}", *about["flags"]),
        about["group"],
        text,
        about["kind"],
        about["choices"],
        about["several"],
        default.removesuffix(".") or _in_words(option.default, about["kind"]),
        f"OCTAVO_{option.name.upper()}",
    )


def _in_words(default: Any, kind: Callable[[str], Any]) -> str:
    """A default as a user would write it; empty for those that mean "nothing"."""
    if default is MISSING or default in (None, "", ()):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ", ".join(default)
    if kind is size and default % 2**20 == 0:
        return f"{default >> 20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


OPTIONS: dict[str, Flag] = {option.name: flag_of(option) for option in fields(EngineConfig)}
"""The flags of the fields of `EngineConfig`, by field."""

CONFIG = Flag(
    ("--config",),
    "model",
    "YAML or JSON file of options: keys are names of flags. The command line wins over it.",
    variable="OCTAVO_CONFIG",
    value="FILE",
)


class Positional(NamedTuple):
    """An argument without a flag."""

    dest: str
    name: str
    """What it is called in the help."""
    help: str
    required: bool


@dataclass(frozen=True)
class Command:
    """A command of the program `octavo`."""

    name: str
    summary: str
    usage: str
    """What follows the name."""
    description: str
    positionals: tuple[Positional, ...]
    own: tuple[Flag, ...]
    """Flags that are no fields of `EngineConfig`."""
    options: tuple[str, ...]
    """The fields of `EngineConfig` it takes; flags of the others are refused."""
    run: Callable[[argparse.Namespace], int]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All its flags in the order of the groups; a short form that a flag of its own has is not another's."""
        taken = {name for flag in self.own for name in flag.names}
        shared = (*([CONFIG] if self.options else []), *(OPTIONS[name] for name in self.options))
        left = (flag._replace(names=tuple(name for name in flag.names if name not in taken)) for flag in shared)
        order = list(GROUPS)
        return tuple(sorted((*self.own, *left), key=lambda flag: order.index(flag.group)))


def parse(
    command: Command, arguments: Sequence[str], show: Callable[[Command, str, argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """The arguments of a command; what was not given is None. `namespace.parser` is for later errors, and
    `namespace.warnings` holds what to tell about flags that have no effect. `show` prints the help that is asked for.

    A wrong command line ends the program with exit status 2.
    """
    parser = _parser(command, show)
    namespace, unknown = parser.parse_known_args(list(_in_one_spelling(parser, arguments)))
    if unknown:
        _refuse_unknown(command, parser, unknown[0])
    namespace.parser = parser
    return namespace


def _parser(command: Command, show: Callable[[Command, str, argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    prog = f"octavo {command.name}"
    parser = argparse.ArgumentParser(prog=prog, usage=f"{prog} {command.usage}", add_help=False, allow_abbrev=False)
    parser.set_defaults(warnings=[])
    parser.add_argument("-h", "--help", nargs="?", const="", action=_Show, show=show, command=command)
    for positional in command.positionals:
        parser.add_argument(positional.dest, nargs=None if positional.required else "?", metavar=positional.name)
    for flag in command.flags:
        _add(parser, flag)
    for flag in _elsewhere(command):
        takes = "nothing" if flag.kind is bool else "several" if flag.several else "one"
        _add_hidden(parser, flag.names[:1], takes, str, _Elsewhere, command)
    own = {name for flag in command.own for name in flag.names}
    for row in UNBUILT:
        if own.intersection(row.flags):
            continue
        _add_hidden(parser, row.flags, "nothing" if row.kind is bool else "one", row.kind, _Refuse, row)
    for old in NO_MEANING:
        _add_hidden(parser, old.flags, old.takes, str, _Warn, old)
    return parser


def _elsewhere(command: Command) -> list[Flag]:
    """Flags of `octavo serve` that `command` does not have."""
    own = {name for flag in command.own for name in flag.names}
    return [flag for name, flag in OPTIONS.items() if name not in command.options and flag.names[0] not in own]


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.kind is bool:
        parser.add_argument(*flag.names, dest=flag.dest, action=argparse.BooleanOptionalAction, default=None)
        return
    action: Any = _Merge if flag.kind is mapping else "extend" if flag.several else "store"
    parser.add_argument(
        *flag.names,
        dest=flag.dest,
        action=action,
        type=_reader(flag.kind),
        default=None,
        choices=flag.choices or None,
        nargs="+" if flag.several else None,
    )


def _add_hidden(
    parser: argparse.ArgumentParser,
    names: tuple[str, ...],
    takes: str,
    kind: Callable[[str], Any],
    action: type[argparse.Action],
    about: Any,
) -> None:
    if takes == "nothing":
        switched_off = tuple("--no-" + name[2:] for name in names if name.startswith("--"))
        parser.add_argument(*names, *switched_off, action=action, nargs=0, dest=argparse.SUPPRESS, about=about)
    else:
        nargs = "+" if takes == "several" else None
        parser.add_argument(*names, action=action, nargs=nargs, type=kind, dest=argparse.SUPPRESS, about=about)


def _reader(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    read.__name__ = getattr(kind, "__name__", "value")
    return read


def _in_one_spelling(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Iterable[str]:
    """The arguments as argparse reads them: hyphens in names, `--flag.key value` as `--flag={"key": value}`, and
    `--switch=true` as `--switch`."""
    known = parser._option_string_actions
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
            return
        name, equals, text = argument.partition("=")
        base, dot, path = name.partition(".")
        if base.startswith("--"):
            base = base.replace("_", "-")
        action = known.get(base)
        if action is None:
            yield argument
        elif dot and action.nargs is None:
            value = text if equals else next(rest, None)
            yield base if value is None else f"{base}={json.dumps(_nested(path.split('.'), value))}"
        elif equals and action.nargs == 0 and text.lower() in TRUTH:
            yield base if TRUTH[text.lower()] else "--no-" + base.removeprefix("--")
        else:
            yield base + dot + path + equals + text


def _nested(keys: Sequence[str], text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _refuse_unknown(command: Command, parser: argparse.ArgumentParser, argument: str) -> NoReturn:
    """End the program because of an argument nobody knows; say which flag may have been meant."""
    name = argument.partition("=")[0].replace("_", "-")
    near = difflib.get_close_matches(name, [name for flag in command.flags for name in flag.names], n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" See octavo {command.name} --help."
    if not argument.startswith("-"):
        hint = " What belongs to no flag stands before the flags, several words in quotes."
    parser.error(f"unknown argument {argument}.{hint}")


class _Show(argparse.Action):
    """--help, --help=WORD."""

    def __init__(self, *args: Any, show: Callable[..., None], command: Command, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._show = show
        self._command = command

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        self._show(self._command, values or "", parser)
        parser.exit()


class _Merge(argparse.Action):
    """A flag that takes a JSON object: what is given again is added."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest, None) or {}, values))


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for key, value in second.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


class _Refuse(argparse.Action):
    """A flag of something not built: nothing is stored; a value with an effect ends the program."""

    def __init__(self, *args: Any, about: Unbuilt, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._row = about

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        value = not str(option_string).startswith("--no-") if self.nargs == 0 else values
        if sentence := refuse(self._row, value):
            parser.error(sentence)


class _Warn(argparse.Action):
    """A flag without a meaning here."""

    def __init__(self, *args: Any, about: NoMeaning, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._row = about

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.warnings = [*namespace.warnings, no_effect(self._row, self._row.flags[0])]


class _Elsewhere(argparse.Action):
    """A flag of `octavo serve`, given to another command."""

    def __init__(self, *args: Any, about: Command, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._command = about

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} is a flag of octavo serve; octavo {self._command.name} does not serve others.")


def no_effect(row: NoMeaning, name: str) -> str:
    return f"{name} has no effect here: {row.reason}."
