"""Random lives of engines: kills, crashes, aborts and new requests in any order; every token is still the right one.

The real `Process`, its records and its bookkeeping run with the real scheduler over a make-believe model; only the
process between them is played here, so that hundreds of deaths take seconds and each seed plays the same again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from queue import Empty
from typing import Any

import pytest

from octavo import client as client_module
from octavo import recovery
from octavo.client import Process
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.info import ModelInfo
from octavo.recovery import Death
from octavo.types import Delta, KVGroup, Request
from octavo.wire import Close, Failed, FromEngine, Ready, ToEngine, drive
from tests.engine.workload import FULL, SIZE, Case, check, draw_requests, make_engine
from tests.engine.workload import drive as undisturbed

WINDOWED = (FULL, KVGroup((1,), window=7))
ROUNDS = 4000
"""Steps after which everything must have come to its end."""


class Crash(BaseException):
    """The process ends here."""


class _OneRound:
    """An inbox that lets `drive` take what is there, run one step and return."""

    def __init__(self, messages: deque[ToEngine]) -> None:
        self._messages = messages
        self._over = False

    def get(self, wait: bool) -> ToEngine:
        if self._over:
            return Close()
        if self._messages:
            return self._messages.popleft()
        self._over = True
        if wait:
            return Close()
        raise Empty


class _Child:
    pid = 1


class PlayedLife:
    """One engine, which says what it says in the same order as a process would, but dies when `die` is called."""

    def __init__(self, engine: Engine, receive: Callable[[FromEngine], None]) -> None:
        self.child = _Child()
        self.last_words: str | None = None
        self.engine = engine
        self.engine.announce = self._announce
        self.present: list[str] = []
        self._receive = receive
        self._inbox: deque[ToEngine] = deque()
        self._said: deque[FromEngine] = deque()
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    @property
    def dead(self) -> bool:
        return self._death.done()

    def _announce(self, ids: list[str]) -> None:
        self.present = ids

    def post(self, message: ToEngine) -> None:
        if not self.dead:
            self._inbox.append(message)

    def say(self, message: FromEngine) -> None:
        self._said.append(message)

    def deliver(self, count: int) -> None:
        """Some of what was said arrives."""
        while self._said and count:
            self._receive(self._said.popleft())
            count -= 1

    def round(self) -> None:
        if self.dead:
            return
        try:
            drive(self.engine, _OneRound(self._inbox), self.say)  # type: ignore[arg-type]
            check(self.engine)
        except Crash:
            self.die(Death("it crashed", list(self.present)))

    def die(self, death: Death, heard: int = 1 << 30) -> None:
        """The end; of what was said and is on its way the first `heard` messages arrive."""
        if not self.dead:
            self.deliver(heard)
            self._said.clear()
            self._death.set_result(death)

    async def end(self, patience: float) -> Death:
        return await self._death

    async def close(self) -> None:
        self.die(Death("closed"))


class Play:
    """One random schedule."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng = random.Random(seed)
        self.case = Case(
            seed,
            groups=rng.choice(((FULL,), WINDOWED)),
            blocks=rng.choice((40, 200)),
            depth=rng.choice((1, 2)),
            caching=rng.random() < 0.8,
            by_priority=rng.random() < 0.3,
            requests=rng.choice((4, 15)),
            slots=rng.choice((3, 16)),
        )
        self.model = FakeModel(self.case.groups)
        self.asked = draw_requests(self.case, rng)
        self.truth = {(one.id, c): self.model.continuation(one, c) for one in self.asked for c in range(one.n)}
        calm = undisturbed(make_engine(self.case, rng, FakeExecutor(self.model, SIZE)), self.asked)
        assert calm.tokens == self.truth
        self.scores, self.first = calm.logprobs, calm.first
        self.kills = rng.choice((0.0, 0.02, 0.2))
        self.unloadable = rng.choice((0.0, 0.3))
        self.step_faults = rng.choice((0.0, 0.0, 0.05))
        self.aborts = rng.choice((0.0, 0.02))
        self.culprits = {one.id for one in self.asked if rng.random() < rng.choice((0.0, 0.1))}
        self.lives: list[PlayedLife] = []
        self.kinds: Counter[str] = Counter()
        monkeypatch.setattr(client_module, "_spawn", lambda config, builder: None)
        monkeypatch.setattr(client_module._Life, "start", self._start)
        monkeypatch.setattr(recovery, "SECOND_DELAY", 0.0)
        monkeypatch.setattr(recovery, "HOPELESS", 1 << 30)
        monkeypatch.setattr(recovery, "FAILING", 1 << 30)
        # Kills by chance must convict nobody; crashes must.
        monkeypatch.setattr(recovery, "PARDONED_KILLS", 1 << 30)
        monkeypatch.setattr(recovery, "MOST_STRIKES", 1 << 30)

    async def _start(self, child: None, receive: Callable[[FromEngine], None]) -> PlayedLife:
        executor = FakeExecutor(self.model, SIZE, step_fault=self._fault)
        life = PlayedLife(make_engine(self.case, self.rng, executor), receive)
        if self.lives and self.rng.random() < self.unloadable:
            life.say(Failed("no memory"))
            asyncio.get_running_loop().call_soon(life.die, Death("no memory"))
        else:
            life.say(Ready(ModelInfo(model="fake", max_model_len=200, vocab_size=50)))
        self.lives.append(life)
        return life

    def _fault(self, members: list[Member]) -> Exception | None:
        for member in members:
            if (
                member.request.id in self.culprits
                and member.work.start + member.work.n > len(member.request.prompt) + 2
            ):
                self.kinds["crash"] += 1
                raise Crash
        return RuntimeError("the device is unwell") if self.rng.random() < self.step_faults else None

    async def run(self) -> None:
        process = Process(EngineConfig(model="fake"), "nobody:asks")
        starting = asyncio.create_task(process.start())
        await asyncio.sleep(0)
        self.lives[0].deliver(1)
        await starting
        waiting = deque(self.asked)
        streams: list[asyncio.Task[None]] = []
        for number in range(ROUNDS):
            while waiting and self.rng.random() < 0.3:
                streams.append(asyncio.create_task(self._stream(process, waiting.popleft())))
            await asyncio.sleep(0)
            life = self.lives[-1]
            for _ in range(self.rng.choice((1, 1, 3))):
                life.round()
            if self.rng.random() < self.kills and number < ROUNDS / 4:
                self.kinds["kill"] += 1
                life.die(Death("killed", list(life.present), killed=True), self.rng.choice((0, 1, 1 << 30)))
            life.deliver(self.rng.choice((0, 1, 1 << 30)))
            for _ in range(self.rng.choice((1, 4))):
                await asyncio.sleep(0)
            if not waiting and all(stream.done() for stream in streams):
                break
        else:
            raise AssertionError(f"stuck: {process.status}, {[s.get_name() for s in streams if not s.done()]}")
        await asyncio.gather(*streams)
        while process._leaving or not self.lives[-1].engine.idle:
            await asyncio.sleep(0)
            self.lives[-1].round()
            self.lives[-1].deliver(1 << 30)
        assert not process._records and not process._leaving
        stats = self.lives[-1].engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert not self.lives[-1].engine.scheduler.suspects.active
        await process.close()

    async def _stream(self, process: Process, asked: Request) -> None:
        """One request, and maybe somebody who gives up a choice, or all of it."""
        tokens: dict[int, list[int]] = {choice: [] for choice in range(asked.n)}
        scores: dict[int, list[Any]] = {choice: [] for choice in range(asked.n)}
        finish: dict[int, Delta] = {}
        prompts = []
        given_up: set[int] = set()
        async for deltas in process.generate(asked):
            for delta in deltas:
                assert delta.choice not in finish, "news after the end"
                assert delta.start == len(tokens[delta.choice]) or not delta.tokens, "lost or doubled"
                tokens[delta.choice] += delta.tokens
                scores[delta.choice] += delta.logprobs or []
                if delta.prompt_logprobs is not None:
                    prompts.append(delta.prompt_logprobs)
                if delta.finish is not None:
                    finish[delta.choice] = delta
            if self.rng.random() < self.aborts:
                choice = self.rng.choice((None, *range(asked.n)))
                given_up |= set(range(asked.n)) if choice is None else {choice}
                await process.abort(asked.id, choice)
        self._judge(asked, tokens, scores, finish, prompts, given_up)

    def _judge(
        self,
        asked: Request,
        tokens: dict[int, list[int]],
        scores: dict[int, list[Any]],
        finish: dict[int, Delta],
        prompts: list[Any],
        given_up: set[int],
    ) -> None:
        assert sorted(finish) == list(range(asked.n)), "a choice has no end"
        for choice, end in finish.items():
            truth = self.truth[asked.id, choice]
            self.kinds[str(end.finish)] += 1
            if end.finish == "abort":
                assert choice in given_up
                assert tokens[choice] == truth[: len(tokens[choice])]
            elif end.finish == "error":
                assert asked.id in self.culprits or self.step_faults, f"{asked.id} is not to blame: {end.error}"
            else:
                assert tokens[choice] == truth
            if asked.sampling.logprobs is not None:
                assert scores[choice] == self.scores[asked.id, choice][: len(tokens[choice])]
        if asked.sampling.prompt_logprobs is not None and tokens[0]:
            assert prompts == [self.first[asked.id, 0].prompt_logprobs]


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_deaths_change_no_answer(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 20):
        play = Play(seed, monkeypatch)
        try:
            asyncio.run(play.run())
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {play.case}, {play.kinds}") from error
