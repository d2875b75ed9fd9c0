"""Local: plans run on one thread of this process, in order; the native step releases the GIL."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from octavo.runtime.runner import Runner
from octavo.types import StepPlan, StepResult


class Local:
    """The `Executor` of one device in this process."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-step")

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self.thread.submit(self.runner.run, plan)

    def close(self) -> None:
        self.thread.shutdown()
