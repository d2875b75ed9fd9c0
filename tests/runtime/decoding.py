"""An engine that decodes 100 sequences, and what each line of its steps allocates.

    python -m tests.runtime.decoding MODEL TEMPERATURE

prints a JSON object of "file:line" -> bytes. It is a process of its own because allocations are counted in all threads:
where other tests run too, theirs would be charged to lines of the step.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any

from octavo.runtime.executor import Local
from octavo.types import StepPlan, StepResult
from tests.runtime.rig import Rig, ids, request

SEQUENCES = 100
BLOCKS = 400
STEPS = 16
"""As many as a block has tokens: each sequence begins one in the course of them."""


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


def decoding(path: Path, temperature: float = 0.0) -> Rig:
    """Each of its sequences begins a block 14 steps from now, and 16 steps later."""
    rig = Rig(path, max_num_seqs=SEQUENCES, max_num_batched_tokens=2048, blocks=BLOCKS, threads=1, witness=False)
    executor = rig.engine.executor
    assert isinstance(executor, Local)
    rig.engine.executor = Inline(executor)
    for i in range(SEQUENCES):
        rig.engine.add(request(str(i), ids(i, 17), max_tokens=40, temperature=temperature))
    while rig.engine.stats().generation_tokens < 2 * SEQUENCES:
        rig.engine.step()
    return rig


def allocations(rig: Rig) -> dict[str, int]:
    """Of "file:line" the most bytes that it took at once, in `STEPS` steps that come after as many traced ones. "kept"
    are those that stay of each step, and "planted" those of a line that takes 4,000."""
    engine = rig.engine
    most: dict[tuple[str, int], int] = {}
    last: tuple[str, int] | None = None
    before = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last, before
        _, peak = tracemalloc.get_traced_memory()
        if last is not None:
            # Who traces a call makes a frame object of it, which there is not otherwise.
            size = peak - before - (sys.getsizeof(frame) if event == "call" else 0)
            most[last] = max(most.get(last, 0), size)
        where = (frame.f_back or frame) if event == "return" else frame
        last = where.f_code.co_filename, where.f_lineno
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        if event == "return":  # the frame object goes now
            before -= sys.getsizeof(frame)
        return trace

    def plant() -> None:
        bytes(4000)

    tracemalloc.start()
    engine.step()
    start, _ = tracemalloc.get_traced_memory()
    for _ in range(3):
        engine.step()
    end, _ = tracemalloc.get_traced_memory()
    sys.settrace(trace)
    for _ in range(STEPS):  # when code is traced for the first time, tables of its lines are made
        engine.step()
    most.clear()
    used = engine.stats().blocks_used
    for _ in range(STEPS):
        engine.step()
    plant()
    sys.settrace(None)
    tracemalloc.stop()
    assert engine.stats().blocks_used == used + SEQUENCES, "no blocks were begun"
    planted = most.pop((__file__, plant.__code__.co_firstlineno + 1))
    return {
        **{f"{file}:{line}": size for (file, line), size in most.items()},
        "kept": (end - start) // 3,
        "planted": planted,
    }


def main() -> None:
    # What the garbage collector does, it does at any line.
    gc.disable()
    rig = decoding(Path(sys.argv[1]), float(sys.argv[2]))
    json.dump(allocations(rig), sys.stdout)
    rig.close()


if __name__ == "__main__":
    main()
