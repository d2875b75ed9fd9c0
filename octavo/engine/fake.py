"""A make-believe model and an executor that runs it: no weights, no arrays, but every block counts.

Where a model keeps keys and values, `FakeExecutor` keeps a rolling hash of the history, per KV group, block and offset.
A token is drawn from a hash of all that its query reads through the block tables, of the token history the slot was
given, and of the request's seed and choice. So a wrong block, a stale copy, a lost or doubled token or a mixed-up slot
changes what comes out, and `FakeModel.continuation` says, one token at a time and without blocks, what is right.

For tests of the engine, and of everything above it that needs an engine but no model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from octavo.types import Enter, KVGroup, Request, Sampled, StepPlan, StepResult, TokenLogprobs, Work

Answer = Callable[[Request, int, list[int]], "int | None"]
"""(request, choice, output tokens so far) -> the next token, or None for the one the hash draws."""

POISON = 0x5EED


class Member(NamedTuple):
    """One row of a step, as fault functions see it."""

    request: Request
    choice: int
    work: Work


class FakeModel:
    """What the fake computes: pure functions of the history.

    Args:
        groups: KV groups; a window makes a query read only that far back.
        vocab_size: ids drawn are in [0, vocab_size).
        answer: says the next token itself, to make the output a given text.
    """

    def __init__(
        self, groups: tuple[KVGroup, ...] = (KVGroup((0,)),), vocab_size: int = 50, answer: Answer | None = None
    ) -> None:
        self.groups = groups
        self.vocab_size = vocab_size
        self.answer = answer

    def roll(self, group: int, past: int, token: int) -> int:
        """The "KV" of a token: a hash of everything up to it. `past` is that of the token before, 0 for none."""
        return hash((group, past, token))

    def first(self, group: int, position: int) -> int:
        """First position that a query at `position` reads."""
        window = self.groups[group].window
        return max(0, position - window + 1) if window else 0

    def state(self, request: Request, choice: int, history: list[int], reads: tuple[tuple[int, ...], ...]) -> int:
        """All that the draw of the token after `history` depends on."""
        return hash((request.seed, choice, request.adapter, tuple(history), reads))

    def draw(self, request: Request, choice: int, history: list[int], state: int) -> int:
        """The next token."""
        outputs = history[len(request.prompt) :]
        if self.answer is not None and (token := self.answer(request, choice, outputs)) is not None:
            return token
        token = hash((state, 1)) % self.vocab_size
        masked = request.masked_ids if len(outputs) < request.sampling.min_tokens else ()
        while token in masked:
            token = (token + 1) % self.vocab_size
        return token

    def score(self, token: int, state: int, count: int, drawn: bool) -> TokenLogprobs:
        """Made-up logprobs: a drawn token is the most probable one, a scored one has rank 1 to 3."""
        width = self.vocab_size if count < 0 else min(count, self.vocab_size)
        best = -1.0 - (hash((state, 2)) % 1000) / 1000
        rank = 1 if drawn else 1 + hash((state, 3)) % 3
        shift = token - (rank - 1)
        top = tuple(((shift + i) % self.vocab_size, best - i / 8) for i in range(width))
        return TokenLogprobs(token, best - (rank - 1) / 8, rank, top)

    def continuation(self, request: Request, choice: int = 0) -> list[int]:
        """Output tokens of a choice, computed one by one: the truth that an engine must reach."""
        history = list(request.prompt)
        values: list[list[int]] = [[] for _ in self.groups]
        while len(history) - len(request.prompt) < request.max_tokens:
            for group, rolled in enumerate(values):
                for token in history[len(rolled) :]:
                    rolled.append(self.roll(group, rolled[-1] if rolled else 0, token))
            reads = tuple(tuple(v[self.first(g, len(v) - 1) :]) for g, v in enumerate(values))
            token = self.draw(request, choice, history, self.state(request, choice, history, reads))
            history.append(token)
            late = len(history) - len(request.prompt) > request.sampling.min_tokens
            if late and (token in request.eos_ids or token in request.stop_ids):
                break
        return history[len(request.prompt) :]


class _Slot:
    """What a runner keeps of a sequence."""

    def __init__(self, enter: Enter, groups: int) -> None:
        self.request = enter.request
        self.choice = enter.choice
        self.history = list(enter.tokens)
        self.tables: list[dict[int, int]] = [{} for _ in range(groups)]
        self.failed: str | None = None
        """Error of an earlier row: no token was drawn, so a work planned meanwhile fails with it too."""


class _Future:
    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor
        self.outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        while self.outcome is None:
            self._executor.run_next()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeExecutor:
    """Runs plans on a `FakeModel`, strictly in order.

    Args:
        model: what to compute.
        block_size: tokens per block, as the engine's.
        eager: run a plan when it is submitted; otherwise when a result is asked for.
        step_seconds: real time each step takes.
        step_fault: given the members of a step, an exception makes it raise that, after garbage has been written
            wherever the step would have written.
        row_fault: given one member, a text makes its row fail with it, its "KV" being garbage.
    """

    def __init__(
        self,
        model: FakeModel | None = None,
        block_size: int = 16,
        *,
        eager: bool = True,
        step_seconds: float = 0.0,
        step_fault: Callable[[list[Member]], Exception | None] | None = None,
        row_fault: Callable[[Member], str | None] | None = None,
    ) -> None:
        self.model = model or FakeModel()
        self.block_size = block_size
        self.eager = eager
        self.step_seconds = step_seconds
        self.step_fault = step_fault
        self.row_fault = row_fault
        self.closed = False
        self._slots: dict[int, _Slot] = {}
        self._values: dict[tuple[int, int], list[int]] = {}
        """(group, block) -> rolling hash per offset."""
        self._queue: deque[tuple[StepPlan, _Future]] = deque()

    def submit(self, plan: StepPlan) -> _Future:
        future = _Future(self)
        self._queue.append((plan, future))
        if self.eager:
            self.run_next()
        return future

    def close(self) -> None:
        self.closed = True

    def run_next(self) -> None:
        """Run the oldest plan that has not been run."""
        plan, future = self._queue.popleft()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        try:
            future.outcome = self._run(plan)
        except Exception as error:
            future.outcome = error

    # -- a step -------------------------------------------------------------------------------------------------
    def _run(self, plan: StepPlan) -> StepResult:
        for slot in plan.leave:
            self._slots.pop(slot, None)
        for enter in plan.enter:
            if enter.slot in self._slots:
                raise RuntimeError(f"slot {enter.slot} is entered, but nothing has left it")
            self._slots[enter.slot] = _Slot(enter, len(self.model.groups))
        members = []
        for work in plan.work:
            row = self._slots[work.slot]
            for table, (first, blocks) in zip(row.tables, work.blocks, strict=False):
                table.update(enumerate(blocks, first))
            members.append(Member(row.request, row.choice, work))
        for work in reversed(plan.work):  # their order is not promised to anybody
            self._copy(work)
        if self.step_fault is not None and (error := self.step_fault(members)) is not None:
            for work in plan.work:
                self._poison(work)
            raise error
        errors = []
        for member, work in zip(members, plan.work, strict=True):
            row = self._slots[work.slot]
            if row.failed is None and self.row_fault is not None:
                row.failed = self.row_fault(member)
            errors.append(row.failed)
            if row.failed is None:
                self._write(work)
            else:
                self._poison(work)
        rows = [
            self._read(work) if failed is None else Sampled(error=failed)
            for work, failed in zip(plan.work, errors, strict=True)
        ]
        return StepResult(tuple(rows))

    def _block(self, group: int, block: int) -> list[int]:
        return self._values.setdefault((group, block), [POISON] * self.block_size)

    def _copy(self, work: Work) -> None:
        for group, source, destination in work.copies:
            self._values[group, destination] = list(self._block(group, source))

    def _poison(self, work: Work) -> None:
        row, size = self._slots[work.slot], self.block_size
        for group, table in enumerate(row.tables):
            for position in range(work.start, work.start + work.n):
                self._block(group, table.get(position // size, -1))[position % size] = POISON

    def _write(self, work: Work) -> None:
        """Compute the "KV" of the work's tokens from that of the token before, as the tables show it."""
        row, size = self._slots[work.slot], self.block_size
        row.history[work.start : work.start + len(work.tokens)] = work.tokens
        for group, table in enumerate(row.tables):
            before = work.start - 1
            past = self._block(group, table.get(before // size, -1))[before % size] if work.start else 0
            for position in range(work.start, work.start + work.n):
                past = self.model.roll(group, past, row.history[position])
                self._block(group, table.get(position // size, -1))[position % size] = past

    def _reads(self, row: _Slot, position: int) -> tuple[tuple[int, ...], ...]:
        """What a query at `position` sees in each group."""
        size, reads = self.block_size, []
        for group, table in enumerate(row.tables):
            first = self.model.first(group, position)
            seen: list[int] = []
            for index in range(first // size, position // size + 1):
                seen += self._block(group, table.get(index, -1))
            base = first // size * size
            reads.append(tuple(seen[first - base : position + 1 - base]))
        return tuple(reads)

    def _state(self, row: _Slot, position: int) -> int:
        """Of the draw of the token after `position`."""
        return self.model.state(row.request, row.choice, row.history[: position + 1], self._reads(row, position))

    def _read(self, work: Work) -> Sampled:
        row, sampling = self._slots[work.slot], self._slots[work.slot].request.sampling
        scores = []
        if work.prompt_logprobs:
            for position in range(work.start, min(work.start + work.n, len(row.request.prompt) - 1)):
                state = self._state(row, position)
                scores.append(self.model.score(row.history[position + 1], state, sampling.prompt_logprobs or 0, False))
        if not work.sample:
            return Sampled(prompt_logprobs=tuple(scores))
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        last = work.start + work.n - 1 - work.drafts
        while True:
            position = last + len(tokens)
            state = self._state(row, position)
            token = self.model.draw(row.request, row.choice, row.history[: position + 1], state)
            tokens.append(token)
            logprobs.append(self.model.score(token, state, sampling.logprobs or 0, True))
            if len(tokens) > work.drafts or row.history[position + 1] != token:
                break
        row.history[last + 1 :] = tokens
        asked = sampling.logprobs is not None
        return Sampled(tuple(tokens), tuple(logprobs) if asked else None, tuple(scores))
