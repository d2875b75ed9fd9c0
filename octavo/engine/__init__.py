"""The engine core: requests become sequences, sequences become plans, results become deltas. No arrays, no devices."""

from octavo.engine.loop import Engine, build_engine
from octavo.engine.scheduler import Scheduler

__all__ = ["Engine", "Scheduler", "build_engine"]
