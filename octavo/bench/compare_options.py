"""What the user may say to `octavo bench compare`."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.bench.options import BenchError, DataOptions, option

if TYPE_CHECKING:
    from octavo.bench.servers import Server

_KINDS = ("openai", "openai-chat", "tgi")
PORT = "{port}"
"""Where the free port goes in a command line."""


class Level(NamedTuple):
    """One load."""

    concurrency: int
    prompts: int


@dataclass(frozen=True, kw_only=True)
class CompareOptions(DataOptions):
    """`octavo bench compare`."""

    server: tuple[str, ...] = option((), "target", "Servers that run already, NAME=URL.", several=True)
    start: tuple[str, ...] = option(
        (),
        "target",
        'Servers to start and stop, "NAME=COMMAND": one argument each, with {port} where the free port goes.',
        several=True,
    )
    kind: tuple[str, ...] = option(
        (),
        "target",
        f"How to speak with a server, NAME=KIND, or KIND for all: {', '.join(_KINDS)}. Default: openai.",
        several=True,
    )
    model: tuple[str, ...] = option(
        (),
        "target",
        "Name of the model in requests, NAME=MODEL, or MODEL for all. Default: the first one that a server lists.",
        several=True,
    )
    api_key: tuple[str, ...] = option((), "target", "Keys to send, NAME=KEY, or KEY for all.", several=True)
    pid: tuple[str, ...] = option(
        (),
        "target",
        "Processes whose trees are measured, NAME=PID, where it is not the one that listens at the URL.",
        several=True,
    )
    tokenizer: str | None = option(
        None,
        "target",
        "Repository, folder or GGUF file whose tokenizer counts the tokens of prompts. Default: that of a server.",
    )
    start_timeout: float = option(
        600.0, "target", "Seconds after which a server that does not answer has failed.", kind=float, least=0.001
    )
    request_timeout: float = option(
        600.0, "target", "Seconds after which a request has failed.", kind=float, least=0.001
    )

    num_prompts: int = option(100, "prompts", "Requests for each load and round.", "--num-prompt", kind=int, least=1)
    num_prompts_each: str | None = option(
        None, "prompts", "Requests for each of the loads of --concurrency, such as 10,50,100. Default: --num-prompts."
    )
    random_input_len: int = option(128, "prompts", "Tokens of a random prompt.", "--input-len", kind=int, least=1)
    prompts: str | None = option(
        None, "prompts", "File of prompts, taken in order: short for --dataset-name custom --disable-shuffle."
    )
    max_tokens: int | None = option(
        None, "prompts", "Longest answer in tokens. Default: as the prompts say.", kind=int, least=1
    )
    repeat_prompts: bool = option(
        False,
        "prompts",
        "Send the same texts in every round, so that prefix caches answer. Default: each round has a mark before them.",
        kind=bool,
    )

    concurrency: str = option("1,10,100", "load", "Requests at a time, one or more numbers.")
    rounds: int = option(3, "load", "How often each server is measured, in turn with the others.", kind=int, least=1)
    one_at_a_time: bool = option(
        False,
        "load",
        "Started servers run during their turns only, one turn a round. Default: all stay up, the others idle.",
        kind=bool,
    )
    num_warmups: int = option(8, "load", "Requests to each server before it is measured.", kind=int, least=0)

    ignore_eos: bool = option(False, "sampling", "Answers have their full length.", kind=bool)
    temperature: float = option(0.0, "sampling", "0 always takes the most probable token.", kind=float, least=0)

    output_dir: str = option("octavo-compare", "results", "Folder for report.html, results.json and logs of servers.")
    json: bool = option(False, "results", "Print the results as JSON, without single requests.", kind=bool)

    def __post_init__(self) -> None:
        if self.prompts is not None:
            for name, value in {
                "dataset_name": "custom",
                "dataset_path": self.prompts,
                "disable_shuffle": True,
            }.items():
                object.__setattr__(self, name, value)
        super().__post_init__()
        if len(self.names) != len(set(self.names)):
            raise BenchError("two servers have the same name; each --server and --start needs one of its own.")
        if not self.names:
            raise BenchError('no servers: name them with --server NAME=URL or --start "NAME=COMMAND with {port}".')
        _ = self.levels, self._per_server  # all can be read

    @property
    def names(self) -> list[str]:
        """Of the servers, in their order."""
        return [name for name, _ in (*self._given("server"), *self._given("start"))]

    @property
    def levels(self) -> list[Level]:
        """Raises BenchError."""
        loads = _counts(self.concurrency, "--concurrency")
        each = _counts(self.num_prompts_each, "--num-prompts-each") if self.num_prompts_each else None
        if each is not None and len(each) != len(loads):
            raise BenchError(f"--num-prompts-each needs {len(loads)} numbers, one for each of {self.concurrency}.")
        if len(set(loads)) != len(loads):
            raise BenchError(f"--concurrency {self.concurrency} names a load twice.")
        return [Level(*pair) for pair in zip(loads, each or [self.num_prompts] * len(loads), strict=True)]

    @property
    def data(self) -> DataOptions:
        """The prompts for the load that needs most of them."""
        return dataclasses.replace(self, num_prompts=max(level.prompts for level in self.levels))

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of every request in OpenAI's names."""
        found: dict[str, Any] = {"temperature": self.temperature}
        return {**found, "ignore_eos": True} if self.ignore_eos else found

    def servers(self) -> list[Server]:
        """Raises BenchError."""
        from octavo.bench.client import Target
        from octavo.bench.servers import Server

        about = self._per_server
        commands = dict(self._given("start"))
        urls = dict(self._given("server"))
        return [
            Server(
                name,
                Target(
                    urls.get(name, ""),
                    about["kind"].get(name, "openai"),  # type: ignore[arg-type]  # one of _KINDS
                    about["model"].get(name),
                    about["api_key"].get(name),
                ),
                commands.get(name),
                int(about["pid"][name]) if name in about["pid"] else None,
            )
            for name in self.names
        ]

    def _given(self, flag: str) -> list[tuple[str, str]]:
        """Names and values of --server or --start. Raises BenchError."""
        found = []
        for text in getattr(self, flag):
            name, equals, value = text.partition("=")
            if not equals or not name.strip() or not value.strip() or "/" in name:
                raise BenchError(f"--{flag} takes NAME={'URL' if flag == 'server' else 'COMMAND'}, got {text!r}.")
            if flag == "start":
                _check_command(name, value)
            found.append((name.strip(), value.strip()))
        return found

    @property
    def _per_server(self) -> Mapping[str, Mapping[str, str]]:
        """Values of --kind, --model, --api-key and --pid by option and server. Raises BenchError."""
        found: dict[str, dict[str, str]] = {}
        for about in ("kind", "model", "api_key", "pid"):
            by_name: dict[str, str] = {}
            for text in getattr(self, about):
                name, equals, value = text.partition("=")
                if equals and name in self.names:
                    by_name[name] = value
                elif equals and about != "api_key":  # the only one whose values may hold a =
                    raise BenchError(f"--{about} {text}: no server is called {name!r}; {', '.join(self.names)} are.")
                else:
                    by_name = {**dict.fromkeys(self.names, text), **by_name}
            found[about] = by_name
        for kind in found["kind"].values():
            if kind not in _KINDS:
                raise BenchError(f"--kind takes {', '.join(_KINDS)}, got {kind!r}.")
        for pid in found["pid"].values():
            if not pid.isdecimal():
                raise BenchError(f"--pid takes NAME=PID, got {pid!r}.")
        return found


def _check_command(name: str, command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BenchError(f"--start {name}: the command line cannot be read: {error}.") from None
    if not any(PORT in word for word in words):
        raise BenchError(f"--start {name}: {{port}} is missing; write it where the port goes, as in --port {{port}}.")


def _counts(text: str, flag: str) -> list[int]:
    """Whole numbers of at least 1. Raises BenchError."""
    found = []
    for part in text.split(","):
        value = float(part) if part.strip().isdecimal() else math.nan
        if not value >= 1:
            raise BenchError(f"{flag} takes whole numbers of at least 1, such as 1,10,100, got {text!r}.")
        found.append(int(value))
    return found
