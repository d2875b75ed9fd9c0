"""Admission: the order of waiting sequences, and whether memory allows one more to run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from octavo.engine.memory import KVMemory
from octavo.engine.sequence import Sequence
from octavo.types import Request

RETRY_STEPS = 8
"""A sequence that did not fit is looked at again after this many steps even if no memory was freed: others that it
can share blocks with may have come."""


class WaitingQueue:
    """Sequences in their order: priority, then arrival. A preempted one comes back to its old place."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int, int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index][1]

    def add(self, seq: Sequence) -> None:
        insort(self._items, (seq.order, seq), key=lambda item: item[0])

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._items, seq.order, key=lambda item: item[0])
        assert self._items[index][1] is seq
        del self._items[index]


class Reserve:
    """How much memory to keep for the growth of those that run before another is admitted.

    Kept free are a watermark and a share `ratio` of the tokens that running sequences may still produce. The ratio
    follows the share of their allowance that finished sequences used, which is learned. After a preemption it is 1,
    and falls back slowly, so that starved memory does not admit, preempt and recompute in turn (a ratio that jumps at
    a preemption and decays is SGLang's idea).
    """

    DECAY = 0.98
    """Per step, towards the learned share."""

    def __init__(self, memory: KVMemory, watermark: float) -> None:
        self.memory = memory
        self.watermark = [int(watermark * pool.count) for pool in memory.pools]
        self.used = 0.7
        """Mean share of its allowed output tokens that a sequence produces."""
        self.ratio = self.used
        self._learned = 1

    def learn(self, share: float) -> None:
        """A sequence ended after this share of its allowed tokens. The last 50 or so count."""
        self._learned = min(self._learned + 1, 50)
        self.used += (share - self.used) / self._learned

    def relax(self) -> None:
        """A step has gone by without preemption."""
        self.ratio = max(self.used, self.ratio * self.DECAY)

    def tighten(self) -> None:
        """Something was preempted."""
        self.ratio = 1.0

    def shortage(self, seq: Sequence, running: Iterable[Sequence]) -> tuple[int, int] | None:
        """None if `seq`, attached to its prefix, may run beside `running`; else the KV group that is short, and the
        number of free blocks it would need."""
        need = self.memory.missing(seq, self._expected(seq))
        alone = True
        for other in running:
            alone = False
            for group, more in enumerate(self.memory.missing(other, self._expected(other))):
                need[group] += more
        if alone:  # one that runs alone always fits: the scheduler refuses others when they are added
            return None
        for group, (blocks, kept, pool) in enumerate(zip(need, self.watermark, self.memory.pools, strict=True)):
            if blocks + kept > pool.free:
                return group, blocks + kept
        return None

    def _expected(self, seq: Sequence) -> int:
        known = len(seq.tokens)
        return known + int(self.ratio * (seq.goal - known))


class Bounds:
    """What a request may be at most; what is more could never run, and is refused when it comes.

    `max_model_len` bounds prompt and output tokens together, `max_step_tokens` a prompt where `chunking` is off.
    """

    def __init__(self, memory: KVMemory, max_model_len: int, max_step_tokens: int, chunking: bool) -> None:
        self.memory = memory
        self.max_model_len = max_model_len
        self.max_step_tokens = max_step_tokens
        self.chunking = chunking

    def check(self, request: Request) -> None:
        """Raises ValueError, with a sentence for the caller, if the request can never run."""
        length = len(request.prompt)
        if not length:
            raise ValueError("The prompt is empty. Give at least one token.")
        if request.n < 1:
            raise ValueError(f"n must be at least 1, got {request.n}.")
        if length + (request.max_tokens > 0) > self.max_model_len:
            raise ValueError(
                f"The prompt has {length} tokens, which leaves no room to answer: the model takes "
                f"{self.max_model_len} tokens, prompt and output together. Shorten the prompt."
            )
        if not self.chunking and length > self.max_step_tokens:
            raise ValueError(
                f"The prompt has {length} tokens, but a step takes at most {self.max_step_tokens} "
                "(max_num_batched_tokens) and chunked prefill is off. Shorten the prompt, raise "
                "max_num_batched_tokens or turn chunked prefill on."
            )
        # The last token drawn is never computed.
        most = min(length + request.max_tokens, self.max_model_len) - (request.max_tokens > 0)
        refusal = self.memory.refusal(most, 1 if self.chunking else length)
        if refusal:
            raise ValueError(refusal)
