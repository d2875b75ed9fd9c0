"""What a step costs beside the native call: how often Python calls into native code, and what it allocates."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from octavo.devices.cpu.device import CpuModel
from octavo.runtime.executor import Local
from octavo.types import StepPlan, StepResult
from tests.models.tiny import make
from tests.runtime.rig import Rig, ids, request

SEQUENCES = 100
BYTES_EACH = 32
"""What a line may allocate for each sequence of a step: a few numbers or pointers."""
BLOCKS = 400
BYTES_EACH_BLOCK = 48
"""What a line of the block pool may allocate for each block that there is: its dictionaries are made anew when they
have become too small, a few times until all blocks are in them."""


class Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class Inline:
    """Runs plans at once, on the thread that asks: a tracer sees them."""

    def __init__(self, local: Local) -> None:
        self.runner = local.runner
        self.close = local.close

    def submit(self, plan: StepPlan) -> Done:
        return Done(self.runner.run(plan))


class Counted:
    """`inner`, with its calls counted."""

    def __init__(self, inner: Any, calls: Counter[str]) -> None:
        self.inner = inner
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.inner, name)


@pytest.fixture
def decoding(tmp_path: Path) -> Iterator[Rig]:
    """An engine that decodes 100 sequences; each of them begins a block 14 steps from now, and 16 steps later."""
    path, _ = make("llama", tmp_path)
    rig = Rig(path, max_num_seqs=SEQUENCES, max_num_batched_tokens=2048, blocks=BLOCKS, threads=1, witness=False)
    executor = rig.engine.executor
    assert isinstance(executor, Local)
    rig.engine.executor = Inline(executor)
    for i in range(SEQUENCES):
        rig.engine.add(request(str(i), ids(i, 17), max_tokens=40))
    while rig.engine.stats().generation_tokens < 2 * SEQUENCES:
        rig.engine.step()
    yield rig
    rig.close()


def test_native_calls_of_a_step(decoding: Rig) -> None:
    engine, calls = decoding.engine, Counter[str]()
    model = engine.executor.runner.model
    assert isinstance(model, CpuModel)
    model.model = Counted(model.model, calls)
    model.device.native = Counted(model.device.native, calls)
    for _ in range(5):
        assert len(engine.step()) == SEQUENCES
    assert calls == {"run": 5}


def test_allocations_of_a_step(decoding: Rig) -> None:
    engine = decoding.engine
    most: dict[tuple[str, int], int] = {}
    last: tuple[str, int] | None = None
    before = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last, before
        _, peak = tracemalloc.get_traced_memory()
        if last is not None:
            most[last] = max(most.get(last, 0), peak - before)
        last = frame.f_code.co_filename, frame.f_lineno
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        return trace

    tracemalloc.start()
    tracer = sys.gettrace()
    try:
        engine.step()
        kept, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            engine.step()
        after, _ = tracemalloc.get_traced_memory()
        # What stays is what was drawn: a token of each sequence and step.
        assert after - kept < 3 * BYTES_EACH * SEQUENCES
        sys.settrace(trace)
        blocks = engine.stats().blocks_used
        for _ in range(16):
            engine.step()
        sys.settrace(tracer)
        assert engine.stats().blocks_used == blocks + SEQUENCES
        most = {line: size for line, size in most.items() if "/octavo/" in line[0] or "/numpy/" in line[0]}
        assert len(most) > 100, "the steps were not traced"
        pool = {line: most.pop(line) for line in list(most) if line[0].endswith("/octavo/engine/blocks.py")}
        assert max(pool.values()) <= BYTES_EACH_BLOCK * BLOCKS, pool
        assert {line: size for line, size in most.items() if size > BYTES_EACH * SEQUENCES} == {}
    finally:
        sys.settrace(tracer)
        tracemalloc.stop()
