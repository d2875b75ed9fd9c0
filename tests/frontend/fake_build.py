"""Engines without a model, for the tests of the transports: tokens are a function of prompt and position."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.engine import Engine, build_engine
from octavo.engine.fake import FakeExecutor, FakeModel, Member
from octavo.info import ModelInfo
from octavo.types import Delta, EngineStats, KVGroup, Request

OnProgress = Callable[[str, int, int], None]
GROUPS = (KVGroup((0,)),)
POISON = 666


def expected(request: Request, choice: int = 0) -> list[int]:
    """The tokens `ScriptedEngine` gives a choice that nobody aborts."""
    return [(sum(request.prompt) * 31 + choice * 7 + i * i) % 1000 for i in range(request.max_tokens)]


@dataclass
class ScriptedEngine:
    """One token per choice and step; a step takes `pause` seconds; step number `fail_at` raises."""

    pause: float = 0.0
    fail_at: int | None = None
    live: dict[str, tuple[Request, dict[int, int]]] = field(default_factory=dict)
    """Per request, the tokens given so far by choice."""
    news: list[Delta] = field(default_factory=list)
    """What the next step tells beside its tokens."""
    steps: int = 0
    given: int = 0
    closed: bool = False
    announce: Callable[[list[str]], None] | None = None

    @property
    def idle(self) -> bool:
        return not self.live and not self.news

    def add(self, request: Request) -> None:
        if request.id in self.live:
            raise ValueError(f"request id {request.id} is in use")
        if len(request.prompt) > 100:
            raise ValueError("the prompt is longer than 100 tokens")
        done = [len(request.resume[choice]) if request.resume else 0 for choice in range(request.n)]
        self.live[request.id] = (request, dict(enumerate(done)))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if request_id in self.live:
            left = self.live[request_id][1]
            for index in list(left) if choice is None else [choice]:
                self.news.append(Delta(request_id, index, start=left.pop(index), finish="abort"))
            if not left:
                del self.live[request_id]

    def isolate(self, request_id: str, tokens: int) -> None:
        pass

    def step(self) -> list[Delta]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the step went wrong")
        time.sleep(self.pause)
        deltas, self.news = self.news, []
        for request, done in list(self.live.values()):
            for choice, at in list(done.items()):
                done[choice] += 1
                last = done[choice] == request.max_tokens
                deltas.append(
                    Delta(
                        request.id,
                        choice,
                        start=at,
                        tokens=[expected(request, choice)[at]],
                        finish="length" if last else None,
                    )
                )
                if last:
                    del done[choice]
            if not done:
                del self.live[request.id]
        self.given += len(deltas)
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), steps=self.steps, generation_tokens=self.given)

    def close(self) -> None:
        self.closed = True


@dataclass
class Scripted:
    engine: ScriptedEngine | Engine
    info: ModelInfo


def fast(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    on_progress("reading weights", 1, 3)
    return Scripted(
        ScriptedEngine(), ModelInfo(model=config.model, max_model_len=config.max_model_len or 128, vocab_size=1000)
    )


def slow(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    return Scripted(ScriptedEngine(pause=0.005), fast(config, on_progress).info)


def failing(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    return Scripted(ScriptedEngine(pause=0.005, fail_at=20), fast(config, on_progress).info)


def broken(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    raise ValueError(f"no such model: {config.model}")


def hanging(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    on_progress("reading weights", 1, 3)
    while True:
        time.sleep(1)


def paged(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    """The real engine, short of memory, over a make-believe model."""
    return _paged(config, on_progress, FakeExecutor(FakeModel(GROUPS)))


def unhurried(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    """As `paged`, with steps of 4 ms."""
    return _paged(config, on_progress, FakeExecutor(FakeModel(GROUPS), step_seconds=0.004))


def aborting(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    """As `unhurried`; a step that computes the third output token of a prompt with `POISON` ends the process."""

    def fault(members: list[Member]) -> Exception | None:
        if any(_poisoned(member, POISON) for member in members):
            os.abort()
        return None

    return _paged(config, on_progress, FakeExecutor(FakeModel(GROUPS), step_seconds=0.004, step_fault=fault))


def sticking(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    """As `aborting`, but the step never ends."""

    def fault(members: list[Member]) -> Exception | None:
        while any(_poisoned(member, POISON) for member in members):
            time.sleep(1)
        return None

    return _paged(config, on_progress, FakeExecutor(FakeModel(GROUPS), step_seconds=0.004, step_fault=fault))


def crowded(config: EngineConfig, on_progress: OnProgress) -> Scripted:
    """As `aborting`, but only in the company of others."""

    def fault(members: list[Member]) -> Exception | None:
        if len(members) > 1 and any(_poisoned(member, POISON) for member in members):
            os.abort()
        return None

    return _paged(config, on_progress, FakeExecutor(FakeModel(GROUPS), step_seconds=0.004, step_fault=fault))


def _poisoned(member: Member, token: int) -> bool:
    return token in member.request.prompt and member.work.start + member.work.n >= len(member.request.prompt) + 3


def _paged(config: EngineConfig, on_progress: OnProgress, executor: FakeExecutor) -> Scripted:
    engine = build_engine(
        executor,
        groups=GROUPS,
        blocks=(60,),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=128,
    )
    return Scripted(engine, fast(config, on_progress).info)
