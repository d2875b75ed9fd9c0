"""What follows from the deaths of an engine: who is suspected, who is to blame, when to try again.

Plain bookkeeping, without processes or clocks of its own. The rule: a request that was being computed when the engine
died is a suspect and runs apart from all others when it is replayed; one that the engine dies of again, alone, is to
blame and ends. So a request can take the engine down at most twice, and the others lose nothing but time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

STABLE_SECONDS = 30.0
"""An engine that has lived so long was no failed start: the deaths before it are not counted any more."""
SECOND_DELAY = 0.5
LONGEST_DELAY = 30.0
FAILING = 5
"""Deaths in a row from which no new requests are taken."""
HOPELESS = 10
"""Deaths in a row after which the waiting requests end too."""
PARDONED_KILLS = 2
"""Times a request may be there when the engine is killed from outside before it counts: an operator's kill is not its
fault, the kernel's, when memory runs out, may be."""
MOST_STRIKES = 5
"""Faults a request may be present at in company; one that only shows in company is never seen alone."""


class Death(NamedTuple):
    """How an engine ended."""

    reason: str
    """For the user: goes on after "the engine stopped: "."""
    present: Collection[str] = ()
    """Requests that were being computed."""
    killed: bool = False
    """By SIGKILL, which no program does to itself."""


class History:
    """The deaths so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_a_row = 0
        """Deaths with no long life between them."""
        self._clock = clock
        self._ready: float | None = None
        self._strikes: Counter[str] = Counter()
        self._kills: Counter[str] = Counter()

    def ready(self) -> None:
        """A new engine has loaded its model."""
        self._ready = self._clock()

    def died(self, death: Death, open_requests: Collection[str]) -> list[str]:
        """The engine has died; returns which of the open requests are to blame. They must not be replayed."""
        if self._ready is not None and self._clock() - self._ready >= STABLE_SECONDS:
            self.in_a_row = 0
        self._ready = None
        self.in_a_row += 1
        for counter in (self._strikes, self._kills):
            for gone in counter.keys() - set(open_requests):
                del counter[gone]
        present = [request for request in death.present if request in open_requests]
        guilty = [request for request in present if self._strike(request, death, len(death.present) == 1)]
        if guilty:  # one cause less: this is not the same death again and again
            self.in_a_row = 1
        return guilty

    def _strike(self, request: str, death: Death, alone: bool) -> bool:
        """Count a death against a request; whether it is to blame."""
        if death.killed:
            self._kills[request] += 1
            if self._kills[request] <= PARDONED_KILLS:
                return False
        self._strikes[request] += 1
        return self._strikes[request] >= (2 if alone else MOST_STRIKES)

    def alone(self, request: str) -> int:
        """Tokens that a request must make apart from all others when it is replayed: 0 if it is no suspect, and more
        each time the engine has died of it in company after it had passed alone."""
        strikes = self._strikes[request]
        return 16 ** (strikes - 1) if strikes else 0

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: none at first, then twice as long each time."""
        if self.in_a_row < 2:
            return 0.0
        return min(LONGEST_DELAY, SECOND_DELAY * 2.0 ** (self.in_a_row - 2))

    @property
    def failing(self) -> bool:
        return self.in_a_row >= FAILING

    @property
    def hopeless(self) -> bool:
        return self.in_a_row >= HOPELESS
