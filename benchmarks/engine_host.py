"""What a step costs on the host: milliseconds of `plan` and `commit` while sequences decode.

    python benchmarks/engine_host.py

The executor answers at once with the same token, so all time is the scheduler's. The aim is under 2 ms for plan and
commit together, for many short sequences and for few long ones alike: nothing in a step may grow with the context.
"""

from __future__ import annotations

import statistics
import time

from octavo.engine import Engine, build_engine
from octavo.sampling_params import SamplingParams
from octavo.types import KVGroup, Request, Sampled, StepPlan, StepResult


class Instant:
    """Answers every plan with token 1."""

    def __init__(self, plan: StepPlan) -> None:
        self._rows = tuple(Sampled((1,)) if work.sample else Sampled() for work in plan.work)

    def result(self) -> StepResult:
        return StepResult(self._rows)


class InstantExecutor:
    def submit(self, plan: StepPlan) -> Instant:
        return Instant(plan)

    def close(self) -> None:
        pass


def decoding(sequences: int, length: int, groups: tuple[KVGroup, ...], waiting: int) -> Engine:
    """An engine with `sequences` of `length` tokens decoding, and `waiting` more that have no place."""
    blocks = sequences * (length // 16 + 40)
    engine = build_engine(
        InstantExecutor(),
        groups=groups,
        blocks=(blocks,) * len(groups),
        max_num_seqs=sequences,
        max_num_batched_tokens=1 << 20,
        max_model_len=1 << 20,
        watermark=0.0,
        clock=lambda: 0.0,
    )
    for i in range(sequences + waiting):
        prompt = tuple((i * 7919 + j) % 50000 for j in range(length))
        engine.add(Request(id=str(i), prompt=prompt, sampling=SamplingParams(), seed=i, max_tokens=512))
    while engine.stats().running < sequences:
        engine.step()
    return engine


def measure(engine: Engine, steps: int = 200) -> tuple[list[float], list[float]]:
    """Milliseconds of processor time of each plan and of each commit."""
    plans, commits = [], []
    for _ in range(steps):
        began = time.thread_time()
        plan = engine.scheduler.plan()
        planned = time.thread_time()
        result = engine.executor.submit(plan).result()
        computed = time.thread_time()
        engine.scheduler.commit(plan, result)
        plans.append((planned - began) * 1e3)
        commits.append((time.thread_time() - computed) * 1e3)
    return plans, commits


def main() -> None:
    full, window = KVGroup((0,)), KVGroup((1,), window=512)
    print(f"{'':44}{'plan':>8}{'commit':>8}{'both':>8}{'p99':>8}  ms")
    for sequences, length, groups, waiting in (
        (256, 300, (full,), 0),
        (256, 300, (full, window), 0),
        (32, 100_000, (full,), 0),
        (32, 100_000, (full, window), 0),
        (256, 300, (full,), 1000),
    ):
        plans, commits = measure(decoding(sequences, length, groups, waiting))
        both = sorted(a + b for a, b in zip(plans, commits, strict=True))
        name = f"{sequences} x {length} tokens, {len(groups)} KV groups, {waiting} waiting"
        print(
            f"{name:44}{statistics.median(plans):8.2f}{statistics.median(commits):8.2f}"
            f"{statistics.median(both):8.2f}{both[len(both) * 99 // 100]:8.2f}"
        )


if __name__ == "__main__":
    main()
