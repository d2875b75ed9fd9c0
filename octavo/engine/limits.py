"""Limits: rules that shrink what a sequence gets in a step, refuse the sequence, or end the step."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

from octavo.engine.sequence import Sequence
from octavo.types import StepPlan

END = -1
"""Answer of a limit that ends the step."""


class Limit(Protocol):
    """One rule. `begin` opens a step; `clip` answers how many of the next `n` > 0 tokens of a sequence may be
    computed (0 refuses the sequence, END ends the step) and changes nothing; `take` books what was planned."""

    def begin(self, in_flight: int) -> None:
        """`in_flight` is the number of plans submitted and not committed."""

    def clip(self, seq: Sequence, n: int) -> int: ...

    def take(self, seq: Sequence, n: int) -> None: ...


class TokenBudget:
    """At most `tokens` tokens in a step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._left = tokens

    def begin(self, in_flight: int) -> None:
        self._left = self.tokens

    def clip(self, seq: Sequence, n: int) -> int:
        left = self._left
        return n if n <= left else left or END

    def take(self, seq: Sequence, n: int) -> None:
        self._left -= n


class SequenceBudget:
    """At most `count` sequences in a step."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._left = count

    def begin(self, in_flight: int) -> None:
        self._left = self.count

    def clip(self, seq: Sequence, n: int) -> int:
        return n if self._left else END

    def take(self, seq: Sequence, n: int) -> None:
        self._left -= 1


class Adapters:
    """At most `count` different adapters in a step (0, no adapter, is not counted)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._seen: set[int] = set()

    def begin(self, in_flight: int) -> None:
        self._seen.clear()

    def clip(self, seq: Sequence, n: int) -> int:
        adapter = seq.request.adapter
        return n if not adapter or adapter in self._seen or len(self._seen) < self.count else 0

    def take(self, seq: Sequence, n: int) -> None:
        if seq.request.adapter:
            self._seen.add(seq.request.adapter)


class InFlight:
    """A sequence is in at most `count` plans at a time: 2 overlaps host and device, 1 waits for every token."""

    def __init__(self, count: int) -> None:
        self.count = count

    def begin(self, in_flight: int) -> None:
        pass

    def clip(self, seq: Sequence, n: int) -> int:
        return n if seq.in_flight < self.count else 0

    def take(self, seq: Sequence, n: int) -> None:
        pass


class ChunkCap:
    """Prompt chunks small enough that the sequences decoding beside them keep their pace.

    The seconds of a step are taken as those of a pure decode step plus `cost` for each prompt token. Both are
    measured, and while anything decodes the prompt tokens of a step are cut so that it should take at most `stretch`
    times a decode step, or `unnoticed` seconds where that is more: twenty tokens a second read as fluent. At least
    `floor` tokens go through, so prompts get on even when the clock is no help; before anything has been measured,
    `first`. Where prompts never cease, one step in `REFRESH` is left to the decodes alone, to measure it.
    """

    REFRESH = 64

    def __init__(self, stretch: float = 1.4, unnoticed: float = 0.05, floor: int = 2, first: int = 32) -> None:
        self.stretch = stretch
        self.unnoticed = unnoticed
        self.floor = floor
        self.first = first
        self._decode_seconds: deque[float] = deque(maxlen=9)
        self._token_seconds: deque[float] = deque(maxlen=5)
        self._since = self.REFRESH
        """Steps with decodes since the last that had nothing else."""
        self._decodes = 0
        self._left = 0

    @property
    def cap(self) -> int:
        """Prompt tokens that the next step with decodes may hold. The median forgives single slow decode steps; a
        prompt token costs what it cost in the dearest of the last steps, since contexts grow."""
        if not self._decode_seconds or not self._token_seconds:
            return self.first
        usual = median(self._decode_seconds)
        spare = max(self.stretch * usual, self.unnoticed) - usual
        cost = max(self._token_seconds)
        return max(self.floor, int(spare / cost)) if cost > 0 else 1 << 30

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took `seconds`."""
        prompt = sum(work.n for work in plan.work if work.n - work.drafts > 1)
        if not prompt:
            self._decode_seconds.append(seconds)
            self._since = 0
            return
        mixed = any(work.n - work.drafts == 1 for work in plan.work)
        self._since += mixed
        base = median(self._decode_seconds) if mixed and self._decode_seconds else 0.0
        self._token_seconds.append(max(seconds - base, 0.0) / prompt)

    def begin(self, in_flight: int) -> None:
        self._decodes = 0
        self._left = 0 if self._since >= self.REFRESH else self.cap

    def clip(self, seq: Sequence, n: int) -> int:
        if not self._decodes or n - len(seq.draft) <= 1:
            return n
        return min(n, self._left)

    def take(self, seq: Sequence, n: int) -> None:
        if n - len(seq.draft) <= 1:
            self._decodes += 1
        else:
            self._left -= n


class Suspects:
    """After a step has failed, finds the sequence that breaks it by running halves of the step apart.

    `groups` is a stack of sets of suspects. Only those of the top group run, and one step at a time, so that a
    failure tells. Who gets a token is cleared; a group that fails is halved; who fails alone is the culprit. While
    there are suspects nothing else runs: it would only become suspect too.

    What `isolate` names stands at the bottom of the stack, first come on top, and must make more than one token.
    """

    def __init__(self) -> None:
        self._groups: list[dict[Sequence, int]] = []
        """Tokens that each suspect must still make."""
        self._wait = False

    @property
    def active(self) -> bool:
        return bool(self._groups)

    def accuse(self, sequences: list[Sequence]) -> None:
        """A step with these, more than one, has failed."""
        for seq in sequences:
            self.clear(seq)
        half = (len(sequences) + 1) // 2
        for part in (sequences[half:], sequences[:half]):
            if part:
                self._groups.append(dict.fromkeys(part, 1))

    def isolate(self, sequences: list[Sequence], tokens: int) -> None:
        """These run together, apart from all others, until each has made so many tokens."""
        if sequences:
            self._groups.insert(0, dict.fromkeys(sequences, tokens))

    def acquit(self, seq: Sequence, tokens: int) -> None:
        """This sequence has made so many tokens, and nothing has broken."""
        for group in self._groups:
            if seq in group:
                group[seq] -= tokens
                if group[seq] <= 0:
                    self.clear(seq)
                return

    def clear(self, seq: Sequence) -> None:
        """This sequence is innocent, or gone."""
        for group in self._groups:
            group.pop(seq, None)
        self._groups = [group for group in self._groups if group]

    def suspected(self, seq: Sequence) -> bool:
        """Whether it may run now that others may not."""
        return bool(self._groups) and seq in self._groups[-1]

    def begin(self, in_flight: int) -> None:
        self._wait = in_flight > 0

    def clip(self, seq: Sequence, n: int) -> int:
        if not self._groups:
            return n
        if self._wait:
            return END
        return n if seq in self._groups[-1] else 0

    def take(self, seq: Sequence, n: int) -> None:
        pass
