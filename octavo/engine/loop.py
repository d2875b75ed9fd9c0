"""The engine loop: keep plans in flight, retire the oldest, hand out the news."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from octavo.engine.limits import ChunkCap, InFlight, Limit, SequenceBudget, TokenBudget
from octavo.engine.memory import KVMemory
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import Sequence
from octavo.types import BlockUse, Delta, EngineStats, Executor, Future, KVGroup, Request, StepPlan, StepResult

Observer = Callable[[StepPlan, float], None]
"""Called after each step that went well, with its plan and its seconds."""
Announce = Callable[[list[str]], None]
"""Called before a step is submitted, with the ids of all requests then in flight, and with none when the engine falls
idle: whoever looks after the engine learns who was there when it died."""


class _Failed:
    """The future of a plan that could not even be submitted."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def result(self) -> StepResult:
        raise self.error


class Engine:
    """Requests in, deltas out; `depth` plans in flight. depth 1 waits for each step, 2 plans the next step while the
    device works on this one, as many as there are stages is pipeline parallelism.

    Not thread-safe: whoever owns it calls its methods one at a time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 1,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.observers = list(observers)
        self.announce: Announce | None = None
        self._clock = clock
        self._flying: deque[tuple[StepPlan, Future, float]] = deque()
        self._retired = 0.0
        """When the last step was done: a plan behind another one starts then."""

    def add(self, request: Request) -> None:
        """Take a request. Raises ValueError, with a sentence for the caller, if it can never run or its id is in
        use by a live one."""
        self.scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice; the next step tells with finish "abort". No-op if unknown or finished."""
        self.scheduler.abort(request_id, choice)

    def isolate(self, request_id: str, tokens: int) -> None:
        """Run a request apart from all others until each of its choices has made `tokens` new tokens."""
        self.scheduler.isolate(request_id, tokens)

    @property
    def idle(self) -> bool:
        """Nothing to compute, nothing in flight, nothing to tell."""
        return not self._flying and self.scheduler.idle

    def step(self) -> list[Delta]:
        """Plan and submit what fits, wait for the oldest plan, return the news."""
        deltas = self._step()
        if self.announce is not None and self.idle:
            self.announce([])
        return deltas

    def _step(self) -> list[Delta]:
        began = self._clock()
        while len(self._flying) < self.depth and (plan := self.scheduler.plan()):
            if self.announce is not None:
                self.announce(self.scheduler.in_flight())
            submitted = self._clock()
            self._flying.append((plan, self._submit(plan), submitted))
        waiting = self._clock()
        if not self._flying:
            return self.scheduler.ledger.take()
        plan, future, submitted = self._flying.popleft()
        try:
            result = future.result()
            done = self._clock()
            deltas = self.scheduler.commit(plan, result)
        except Exception as error:
            return self._fail(error)
        seconds = done - max(submitted, self._retired)
        self._retired = done
        for observer in self.observers:
            observer(plan, seconds)
        stats = self.scheduler.stats
        stats.step_seconds += seconds
        stats.host_seconds += waiting - began + self._clock() - done
        return deltas

    def stats(self) -> EngineStats:
        """A snapshot: gauges of this moment, totals since the start."""
        scheduler, roster, memory = self.scheduler, self.scheduler.roster, self.scheduler.memory
        now = scheduler.stats
        stats = msgspec.structs.replace(
            now,
            finished=dict(now.finished),
            step_tokens=now.step_tokens.copy(),
            choice_preemptions=now.choice_preemptions.copy(),
        )
        stats.running = len(roster.running)
        stats.waiting = sum(len(family.live) for family in roster.families.values()) - stats.running
        stats.held_back = stats.waiting - len(roster.waiting)
        stats.blocks_total, stats.blocks_used = memory.total, memory.used
        stats.kv_slots_allocated, stats.kv_slots_filled = memory.used * memory.size, memory.filled
        stats.groups = [BlockUse(pool.count, pool.used, pool.cached) for pool in memory.pools]
        stats.extra = {"computed_tokens": scheduler.computed_tokens}
        return stats

    def close(self) -> None:
        """Stop: what is in flight is waited for and forgotten."""
        self._drain()
        self.executor.close()

    def _submit(self, plan: StepPlan) -> Future:
        try:
            return self.executor.submit(plan)
        except Exception as error:  # told when its turn comes, like a failure of the step itself
            return _Failed(error)

    def _fail(self, error: Exception) -> list[Delta]:
        self._drain()
        self._retired = self._clock()
        return self.scheduler.fail(error)

    def _drain(self) -> None:
        """Wait for the plans behind a failed one: built on it, their results mean nothing."""
        while self._flying:
            _, future, _ = self._flying.popleft()
            try:
                future.result()
            except Exception:  # noqa: S112
                continue


def build_engine(
    executor: Executor,
    *,
    groups: tuple[KVGroup, ...],
    blocks: tuple[int, ...],
    block_size: int = 16,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    policy: str = "fcfs",
    depth: int = 1,
    watermark: float = 0.01,
    drafter: Callable[[Sequence], list[int]] | None = None,
    limits: Iterable[Limit] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """An engine with the usual limits.

    Args:
        groups, blocks: the KV groups and how many blocks each has.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once; slots are 0 … max_num_seqs - 1.
        max_num_batched_tokens: tokens in a step at most.
        max_model_len: prompt and output tokens of a sequence at most.
        policy: "fcfs", or "priority" (lower `Request.priority` first, then arrival).
        depth: plans in flight.
        watermark: share of the blocks that stays free when a sequence is admitted.
        drafter: guesses next tokens of a sequence; it then waits for each of its steps.
        limits: more limits, asked after the usual ones.

    Raises:
        ValueError: a number or the policy makes no sense.
    """
    if policy not in ("fcfs", "priority"):
        raise ValueError(f'The scheduling policy is "fcfs" or "priority", not {policy!r}.')
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("max_model_len", max_model_len),
        ("block_size", block_size),
        ("depth", depth),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    cap = ChunkCap()
    rules: list[Limit] = [
        InFlight(1 if drafter else depth),
        TokenBudget(max_num_batched_tokens),
        SequenceBudget(max_num_seqs),
    ]
    if enable_chunked_prefill:
        rules.append(cap)
    scheduler = Scheduler(
        KVMemory(groups, blocks, block_size),
        [*rules, *limits],
        slots=max_num_seqs,
        max_model_len=max_model_len,
        max_step_tokens=max_num_batched_tokens,
        caching=enable_prefix_caching,
        chunking=enable_chunked_prefill,
        by_priority=policy == "priority",
        watermark=watermark,
        drafter=drafter,
        clock=clock,
    )
    return Engine(scheduler, executor, depth, [cap.observe], clock)
