"""`octavo bench compare`: the same prompts to several servers in turn.

Rounds are interleaved and only one server is loaded at any time, so that a machine that becomes slower does so for all
of them. What happens to a server becomes part of the results; it never ends the comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import octavo
from octavo.bench import report, servers, verdict
from octavo.bench.client import Ask, Outcome, Prompt, Target, body_of, load
from octavo.bench.compare_options import CompareOptions, Level
from octavo.bench.data import asks_of
from octavo.bench.figures import Figures, e2el, itls, tpot, ttft
from octavo.bench.machine import Gpus, Quiet, busy_seconds, machine, quiet, stolen_seconds
from octavo.bench.options import BenchError
from octavo.bench.servers import Server, ServerError, Started, Usage, Watch
from octavo.bench.tokens import Count, counter

_SETTLE = 5.0
"""Seconds that the machine has to become quiet before a turn."""
_WARM_TOKENS = 16
"""Longest answer of a request that warms a server up."""
_RECOVERY = 60.0
"""Seconds that a server has to become ready again after requests have failed."""
_FAILURES_IN_A_ROW = 3
"""Requests that fail one after the other, beside those at a time, until a turn is given up."""
_GIVEN_UP = 2
"""Turns in a row that are given up until a server is left out."""


class Turn(NamedTuple):
    """One server under one load."""

    round: int
    """From 1."""
    level: Level
    server: int
    """Its index."""


def schedule(servers: int, levels: Sequence[Level], rounds: int, one_at_a_time: bool) -> list[Turn]:
    """Who is loaded when: A B C, B C A, ...; with `one_at_a_time` all loads of a server in one go, as changing costs a
    start."""
    turns = []
    for number in range(rounds):
        order = [(number + place) % servers for place in range(servers)]
        if one_at_a_time:
            turns += [Turn(number + 1, level, server) for server in order for level in levels]
        else:
            turns += [Turn(number + 1, level, server) for level in levels for server in order]
    return turns


def marked(asks: Sequence[Ask], mark: str) -> list[Ask]:
    """The same requests with a mark before each text, so that no prefix cache knows them; of token ids as they are."""
    return [replace(ask, prompt=_marked(ask.prompt, mark)) if ask.after is None else ask for ask in asks]


def _marked(prompt: Prompt, mark: str) -> Prompt:
    if isinstance(prompt, str):
        return f"{mark} {prompt}"
    if prompt and isinstance(prompt[0], dict) and isinstance(prompt[0].get("content"), str):
        first, *others = prompt
        return [{**first, "content": f"{mark} {first['content']}"}, *others]
    return prompt


def fingerprint(asks: Sequence[Ask]) -> str:
    """SHA-256 of prompts, lengths and sampling."""
    return hashlib.sha256(json.dumps([dataclasses.asdict(ask) for ask in asks]).encode()).hexdigest()


@dataclass
class Entrant:
    """A server in the comparison, and what has become of it."""

    server: Server
    target: Target
    log: Path | None = None
    started: Started | None = None
    pid: int | None = None
    up: bool = False
    """Whether it is found and warm."""
    failure: dict[str, Any] | None = None
    starts: list[dict[str, float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    idle_bytes: int | None = None
    """Resident memory before it was first loaded."""
    given_up: int = 0
    """Turns in a row that were given up."""

    @property
    def exit_status(self) -> int | None:
        """How it ended, if we started it and it has ended."""
        return None if self.started is None else self.started.exit_status

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.server.name,
            "kind": self.target.kind,
            "url": None if self.server.command else self.target.url,
            "command": servers.without_secrets(self.server.command) if self.server.command else None,
            "model": self.target.model,
            "versions": self.versions,
            "pid": self.pid,
            "starts": self.starts,
            "idle_bytes": self.idle_bytes,
            "log": None if self.log is None else self.log.name,
            "failure": self.failure,
        }


@dataclass
class _Before:
    """Clocks at the beginning of a turn."""

    idle: Mapping[str, Usage]
    busy: float = field(default_factory=busy_seconds)
    stolen: float = field(default_factory=stolen_seconds)
    client: float = field(default_factory=time.process_time)
    at: float = field(default_factory=time.perf_counter)


class Comparison:
    """Runs the turns; `results` has what is known so far at any time."""

    def __init__(self, options: CompareOptions, say: Callable[[str], None], command: str = "") -> None:
        """
        Args:
            say: gets a line about what is being done.
            command: how the comparison was called, for the report.
        """
        self._options = options
        self._say = say
        self._folder = Path(options.output_dir)
        self._gpus = Gpus()
        self._begun = time.perf_counter()
        self._asks: list[Ask] = []
        self._notes: list[str] = []
        self._turns: list[dict[str, Any]] = []
        self._interrupted = False
        self._entrants = [self._entrant(server) for server in options.servers()]
        self._setup: dict[str, Any] = {
            "octavo": octavo.__version__,
            "begun": datetime.now().astimezone().isoformat(" ", "seconds"),
            "command": servers.without_secrets(command),
            "machine": machine(),
            "levels": [level._asdict() for level in options.levels],
            "rounds": options.rounds,
            "one_at_a_time": options.one_at_a_time,
            "repeat_prompts": options.repeat_prompts,
            "sampling": options.sampling,
            "prompts": {"source": _source(options), "sha256": "", "max_tokens": None},
        }

    def _entrant(self, server: Server) -> Entrant:
        log = None if server.command is None else self._folder / f"{server.name}.log"
        return Entrant(server, replace(server.target), log)

    def run(self) -> dict[str, Any]:
        """Measure until all turns are done, or until KeyboardInterrupt; started servers have been stopped then.

        Raises:
            BenchError: the prompts cannot be made, or do not suit a server.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for entrant in self._entrants:
            if entrant.log is not None:
                entrant.log.unlink(missing_ok=True)
        options = self._options
        turns = schedule(len(self._entrants), options.levels, options.rounds, options.one_at_a_time)
        try:
            with contextlib.ExitStack() as stack:  # stops all of them, also when the user has no patience with one
                for entrant in self._entrants:
                    stack.callback(self._stop, entrant)
                if not options.one_at_a_time:
                    for entrant in self._entrants:
                        self._bring_up(entrant)
                for turn in turns:
                    self._take(turn)
        except KeyboardInterrupt:
            self._interrupted = True
        return self.results()

    def results(self) -> dict[str, Any]:
        """All of it, as results.json holds it."""
        found: dict[str, Any] = {
            "format": 1,
            "interrupted": self._interrupted,
            "took_s": self._now(),
            "setup": self._setup,
            "servers": [entrant.as_json() for entrant in self._entrants],
            "turns": self._turns,
            "notes": self._notes,
        }
        found["summary"] = verdict.summary(found)
        found["agreement"] = verdict.agreement(found)
        found["warnings"] = verdict.warnings(found)
        return found

    def _now(self) -> float:
        """Seconds since the comparison began."""
        return time.perf_counter() - self._begun

    # -- servers

    def _bring_up(self, entrant: Entrant) -> None:
        """Find or start a server and warm it up; what goes wrong is noted with it."""
        if entrant.up or entrant.failure:
            return
        name, command = entrant.server.name, entrant.server.command
        begun = time.perf_counter()
        try:
            if command is not None:
                assert entrant.log is not None
                self._say(f"{name}: starting")
                entrant.started, port = servers.start(command, entrant.log)
                entrant.target.url = f"http://127.0.0.1:{port}"
            servers.wait_ready(entrant.target, self._options.start_timeout, entrant.started)
            ready = time.perf_counter() - begun
            if entrant.target.model is None:
                entrant.target.model = servers.find_model(entrant.target)
            if not self._asks:
                self._make_asks(entrant)
            self._warm_up(entrant, marked(self._asks[:1], "Warm-up."))
        except ServerError as error:
            self._fail(entrant, str(error), "before its first turn")
            self._stop(entrant)
            return
        if command is not None:
            entrant.starts.append({"ready_s": ready, "first_answer_s": time.perf_counter() - begun})
        entrant.versions = servers.versions(entrant.target)
        entrant.pid = self._pid(entrant)
        used = servers.usage(entrant.pid)
        if used is not None and entrant.idle_bytes is None:
            entrant.idle_bytes = used.resident
        entrant.up = True
        with contextlib.suppress(ServerError):  # a load that it cannot take shows in its turn
            self._warm_up(entrant, marked(self._asks[1 : 1 + self._options.num_warmups], "Warm-up."))

    def _pid(self, entrant: Entrant) -> int | None:
        if entrant.server.pid is not None:
            return entrant.server.pid
        return servers.listener(entrant.target.url) if entrant.started is None else entrant.started.process.pid

    def _warm_up(self, entrant: Entrant, asks: Sequence[Ask]) -> None:
        """Raises ServerError when an answer is none."""
        short = [
            replace(ask, max_tokens=min(ask.max_tokens, _WARM_TOKENS), extra=self._options.sampling)
            for ask in asks
            if ask.after is None
        ]
        for outcome in asyncio.run(load(entrant.target, short, timeout=self._options.request_timeout)):
            if outcome.error is not None:
                raise ServerError(f"does not answer a first request: {outcome.error}")

    def _make_asks(self, entrant: Entrant) -> None:
        """The prompts, measured with the tokenizer of the first server that runs."""
        options = self._options
        asks = asks_of(options.data, self._count(entrant.target))
        if options.max_tokens is not None:
            asks = [replace(ask, max_tokens=options.max_tokens) for ask in asks]
        self._asks = [replace(ask, extra={**ask.extra, **options.sampling}) for ask in asks]
        for other in self._entrants:
            for ask in self._asks:
                try:
                    body_of(other.target, ask)
                except ValueError as error:
                    raise BenchError(f"{other.server.name}: {error}; choose its --kind, or other prompts.") from None
        self._setup["prompts"] |= {
            "count": len(self._asks),
            "sha256": fingerprint(self._asks),
            "max_tokens": max(ask.max_tokens for ask in self._asks),
        }
        if not options.repeat_prompts and any(_marked(ask.prompt, "-") == ask.prompt for ask in self._asks):
            self._notes.append(
                "Prompts of token ids are the same in every round, so prefix caches may have answered for them."
            )

    def _count(self, target: Target) -> Count:
        try:
            return counter(target, self._options.tokenizer)
        except BenchError:
            if self._options.tokenizer is not None:
                raise
        self._notes.append(
            "No tokenizer was named and the first server does not count tokens: lengths of prompts are in words."
        )
        return lambda text: len(text.split())

    def _fail(self, entrant: Entrant, reason: str, when: str) -> None:
        """Leave a server out from now on."""
        entrant.failure = {
            "reason": reason,
            "when": when,
            "time": datetime.now().astimezone().isoformat(" ", "seconds"),
            "log": servers.last_lines(entrant.log) if entrant.log is not None else [],
        }
        self._say(f"{entrant.server.name}: {reason} ({when})")

    def _stop(self, entrant: Entrant) -> None:
        entrant.up = False
        if entrant.started is not None:
            started, entrant.started = entrant.started, None
            started.stop()

    # -- turns

    def _take(self, turn: Turn) -> None:
        entrant = self._entrants[turn.server]
        if self._options.one_at_a_time:
            for other in self._entrants:
                if other is not entrant and other.server.command is not None:
                    self._stop(other)
        self._bring_up(entrant)
        if entrant.failure:
            return
        idle = {
            other.server.name: used
            for other in self._entrants
            if other is not entrant and other.up and (used := servers.usage(other.pid)) is not None
        }
        before = quiet(_SETTLE)
        outcomes: list[Outcome] = []
        clocks = _Before(idle)
        watch = Watch(entrant.pid, self._gpus, self._now)
        problem = "interrupted"
        try:
            with watch:
                problem = self._load(entrant, turn, outcomes)
        finally:
            if problem != "interrupted":
                problem = self._judge(entrant, turn, outcomes, problem)
            self._turns.append(self._record(entrant, turn, outcomes, before, clocks, watch, problem))

    def _load(self, entrant: Entrant, turn: Turn, outcomes: list[Outcome]) -> str:
        """Send the prompts of a turn; `outcomes` gets what comes. Returns why it was given up, or nothing."""
        asks = self._asks[: turn.level.prompts]
        if not self._options.repeat_prompts:
            asks = marked(asks, f"{turn.round}.{turn.level.concurrency}.")
        self._say(
            f"{entrant.server.name}: round {turn.round} of {self._options.rounds}, "
            f"{turn.level.concurrency} at a time, {len(asks)} prompts"
        )
        concurrency = turn.level.concurrency
        done, problem = asyncio.run(
            _until_it_fails(entrant.target, asks, concurrency, self._options.request_timeout, outcomes)
        )
        if done is not None:  # in the order of the prompts
            outcomes[:] = done
        return problem

    def _judge(self, entrant: Entrant, turn: Turn, outcomes: Sequence[Outcome], problem: str) -> str:
        """Why a turn does not count, or nothing; a server that has gone is left out from now on."""
        when = f"in round {turn.round}, with {turn.level.concurrency} requests at a time"
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        if not failed:
            entrant.given_up = 0
            return ""
        time.sleep(0.2)  # a process that dies closes its connections before its end can be seen
        status = entrant.exit_status
        if status is not None:
            reason = servers.ending(status)
        elif not self._is_still_there(entrant):
            reason = f"does not answer any more ({failed[-1]})"
        elif len(failed) == len(outcomes) or problem:
            entrant.given_up += 1
            problem = problem or f"all requests failed ({failed[-1]})"
            if entrant.given_up < _GIVEN_UP:
                self._notes.append(f"{entrant.server.name} {when}: {problem}; the turn does not count.")
                return problem
            reason = f"failed in {_GIVEN_UP} turns in a row: {problem}"
        else:
            entrant.given_up = 0
            return ""
        self._fail(entrant, reason, when)
        return reason

    def _is_still_there(self, entrant: Entrant) -> bool:
        """Whether a server answers; one that says that it cannot just now has some time to recover."""
        if not servers.is_there(entrant.target):
            return False
        try:
            servers.wait_ready(entrant.target, _RECOVERY, entrant.started)
        except ServerError:
            return False
        return True

    def _record(
        self,
        entrant: Entrant,
        turn: Turn,
        outcomes: Sequence[Outcome],
        before: Quiet,
        clocks: _Before,
        watch: Watch,
        problem: str,
    ) -> dict[str, Any]:
        wall = time.perf_counter() - clocks.at
        cores: dict[str, Any] = {
            "server": None if watch.cpu_seconds is None else watch.cpu_seconds / wall,
            "client": (time.process_time() - clocks.client) / wall,
            "stolen": (stolen_seconds() - clocks.stolen) / wall,
            "idle_servers": {
                other.server.name: max(0.0, used.cpu_seconds - clocks.idle[other.server.name].cpu_seconds) / wall
                for other in self._entrants
                if other.server.name in clocks.idle and (used := servers.usage(other.pid)) is not None
            },
        }
        everything = (busy_seconds() - clocks.busy) / wall
        known = None if cores["server"] is None else cores["server"] + cores["client"] + cores["stolen"]
        cores["others"] = None if known is None else max(0.0, everything - known)
        return {
            "server": entrant.server.name,
            "round": turn.round,
            "concurrency": turn.level.concurrency,
            "begun_s": clocks.at - self._begun,
            "wall_s": wall,
            "complete": not problem,
            "problem": problem or None,
            "before": dataclasses.asdict(before),
            "figures": Figures.of(outcomes, percentiles=verdict.PERCENTILES).as_json(),
            "memory": {
                "peak_resident": watch.peak("resident"),
                "peak_private": watch.peak("private"),
                "proportional": servers.proportional(entrant.pid),
                "peak_gpu": watch.peak("gpu"),
                "peak_gpu_of_all": watch.peak("gpu_of_all"),
                "processes": watch.peak("processes"),
            },
            "cores": cores,
            "samples": [[at, used.resident, used.cpu_seconds, used.gpu] for at, used in watch.samples],
            "sample_fields": ["seconds", "resident_bytes", "cpu_seconds", "gpu_bytes"],
            "requests": [_request(index, outcome, clocks.at) for index, outcome in enumerate(outcomes)],
        }


async def _until_it_fails(
    target: Target, asks: Sequence[Ask], concurrency: int, timeout: float, outcomes: list[Outcome]
) -> tuple[list[Outcome] | None, str]:
    """Send all, and give up when many requests in a row fail: a server that has gone is not asked a thousand times.

    Args:
        outcomes: gets them as they come.

    Returns:
        The outcomes in the order of the prompts and nothing, or None and why it was given up.
    """
    in_a_row = 0
    too_many = max(concurrency, _FAILURES_IN_A_ROW)
    sending: asyncio.Task[list[Outcome]]

    def done(outcome: Outcome) -> None:
        nonlocal in_a_row
        outcomes.append(outcome)
        in_a_row = in_a_row + 1 if outcome.error is not None else 0
        if in_a_row >= too_many and len(outcomes) < len(asks):
            sending.cancel()

    sending = asyncio.ensure_future(load(target, asks, concurrency=concurrency, on_done=done, timeout=timeout))
    try:
        return await sending, ""
    except asyncio.CancelledError:
        if in_a_row < too_many:  # cancelled by Ctrl-C
            raise
        return None, f"{in_a_row} requests in a row failed ({outcomes[-1].error})"


def _request(index: int, outcome: Outcome, begun: float) -> dict[str, Any]:
    return {
        "index": index,
        "asked_s": round(outcome.asked - begun, 6),
        "ttft_ms": _rounded(ttft(outcome)),
        "tpot_ms": _rounded(tpot(outcome)),
        "e2el_ms": _rounded(e2el(outcome)),
        "gaps_ms": [round(gap, 3) for gap in itls(outcome)],
        "events": len(outcome.times),
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "error": outcome.error,
        "text": outcome.text,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _source(options: CompareOptions) -> str:
    """Where the prompts come from, in words."""
    if options.dataset_path:
        return f"{options.dataset_name}, {options.dataset_path}"
    return f"{options.dataset_name}, seed {options.seed}"


# -- the command


def compare(options: CompareOptions, command: str = "") -> int:
    """Run it, write the report, print the table (or JSON). Returns the exit status: 0, 1 when a server failed, 130
    after Ctrl-C, 143 after SIGTERM.

    Raises:
        BenchError: it cannot be run as it was asked for.
    """
    comparison = Comparison(options, lambda line: print(line, file=sys.stderr, flush=True), command)
    ended_by: list[int] = []
    with _as_interrupt(signal.SIGTERM, ended_by):
        results = comparison.run()
    raw, page = report.write(results, Path(options.output_dir))
    if options.json:
        print(json.dumps(without_requests(results), ensure_ascii=False))
    else:
        print(report.table(results))
        for line in (*verdict.findings(results["summary"]), *map(verdict.judge, results["agreement"])):
            print(line)
        for warning in results["warnings"]:
            print(f"warning: {warning}")
    print(f"{page} has the plots, {raw} the raw figures.", file=sys.stderr)
    if results["interrupted"]:
        return 128 + (ended_by[0] if ended_by else signal.SIGINT)
    return 1 if any(server["failure"] for server in results["servers"]) else 0


def without_requests(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results without what was measured of each request."""
    turns = [
        {name: value for name, value in turn.items() if name not in ("requests", "samples")}
        for turn in results["turns"]
    ]
    return {**results, "turns": turns}


@contextlib.contextmanager
def _as_interrupt(number: int, seen: list[int]) -> Iterator[None]:
    """A signal raises KeyboardInterrupt in the block, and is added to `seen`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signalled: int, frame: Any) -> None:
        seen.append(signalled)
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
