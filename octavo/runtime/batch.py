"""A plan as arrays: token ids, positions and rows, and the block tables that live as long as their slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from octavo.ops.contract import I32, BatchArrays, BatchLimits
from octavo.runtime.sampler import Rows
from octavo.types import Request, Work

# To read a field of all works of a plan without a line of Python for each.
_SLOT, _START, _COUNT, _TOKENS = map(attrgetter, ("slot", "start", "n", "tokens"))
_SAMPLE, _SCORES, _DRAFTS = map(attrgetter, ("sample", "prompt_logprobs", "drafts"))


class Spans(NamedTuple):
    """Where the S works of a plan lie in the batch, and in their sequences."""

    slots: I32
    first: I32
    """[S]: absolute position of the first token."""
    lengths: I32
    starts: I32
    """[S + 1], as in `BatchArrays`."""

    @staticmethod
    def of(work: Sequence[Work]) -> Spans:
        count = len(work)
        lengths = np.fromiter(map(_COUNT, work), np.int32, count)
        starts = np.zeros(count + 1, np.int32)
        np.add.accumulate(lengths, out=starts[1:])
        slots = np.fromiter(map(_SLOT, work), np.int32, count)
        return Spans(slots, np.fromiter(map(_START, work), np.int32, count), lengths, starts)


class BatchTables:
    """Block tables of every slot, one array [slots, blocks per sequence] per KV group; a plan brings what is
    new."""

    def __init__(self, limits: BatchLimits, groups: int, block_size: int):
        width = -(-limits.max_model_len // block_size)
        self.tables = tuple(np.zeros((limits.sequences, width), np.int32) for _ in range(groups))

    def update(self, work: Sequence[Work]) -> None:
        for w in work:
            for group, (first, blocks) in enumerate(w.blocks):
                if blocks:
                    self.tables[group][w.slot, first : first + len(blocks)] = blocks

    def arrays(self, work: Sequence[Work], spans: Spans, last: I32, rows: I32) -> BatchArrays:
        """The step's arrays. `last[slot]` stands in for the one token that the plan could not name."""
        tokens = _tokens(work, spans, last)
        positions = spans.first
        if tokens.size > len(work):
            positions = np.repeat(spans.first - spans.starts[:-1], spans.lengths)
            positions += np.arange(tokens.size, dtype=np.int32)
        return BatchArrays(tokens, positions, spans.starts, spans.slots, rows, self.tables)


def _tokens(work: Sequence[Work], spans: Spans, last: I32) -> I32:
    named = np.fromiter(map(len, map(_TOKENS, work)), np.int32, len(work))
    left_out = spans.lengths - named
    count = int(spans.starts[-1])
    wrong = (left_out < 0) | (left_out > 1)
    if wrong.any():
        w = work[int(wrong.argmax())]
        raise ValueError(f"a Work of {w.n} tokens names {len(w.tokens)}: at most one may be left out")
    known = np.fromiter(chain.from_iterable(map(_TOKENS, work)), np.int32)
    if known.size == count:
        return known
    tokens = np.empty(count, np.int32)
    short = left_out.nonzero()[0]
    ends = spans.starts[1:][short]
    ends -= 1
    tokens[ends] = last[spans.slots[short]]
    if known.size:
        there = np.ones(count, np.bool_)
        there[ends] = False
        tokens[there] = known
    return tokens


def head_rows(work: Sequence[Work], spans: Spans, requests: Mapping[int, Request]) -> Rows:
    """The rows of a plan: of each Work the prompt tokens to score, then one row per draft and one for the token after
    them. `requests` by slot."""
    if any(map(_SCORES, work)) or any(map(_DRAFTS, work)):
        return _listed(work, spans, requests)
    ends = spans.starts[1:]
    slots, first, lengths = spans.slots, spans.first, spans.lengths
    if not all(map(_SAMPLE, work)):
        sampled = np.fromiter(map(_SAMPLE, work), np.bool_, len(work))
        ends, slots, first, lengths = ends[sampled], slots[sampled], first[sampled], lengths[sampled]
    return Rows(
        token=ends - 1,
        slot=slots.astype(np.intp),
        position=first + lengths,
        target=np.full(ends.size, -1, np.int32),
    )


def _listed(work: Sequence[Work], spans: Spans, requests: Mapping[int, Request]) -> Rows:
    rows: list[tuple[int, int, int, int]] = []
    drafts: list[tuple[int, ...]] = []
    for w, first in zip(work, spans.starts.tolist(), strict=False):
        if w.prompt_logprobs:
            prompt = requests[w.slot].prompt
            for p in range(w.start, scored(w, prompt)):
                rows.append((first + p - w.start, w.slot, p + 1, prompt[p + 1]))
                drafts.append(())
        if w.sample:
            guesses = w.tokens[len(w.tokens) - w.drafts :] if w.drafts else ()
            for j in range(w.drafts + 1):
                back = w.drafts - j
                rows.append((first + w.n - 1 - back, w.slot, w.start + w.n - back, -1))
                drafts.append(guesses[:j])
    token, slot, position, target = np.array(rows, np.int32).reshape(-1, 4).T.copy()
    return Rows(token, slot.astype(np.intp), position, target, drafts)


def scored(w: Work, prompt: Sequence[int]) -> int:
    """End of the positions, from `w.start` on, whose next prompt token a Work with prompt_logprobs scores."""
    return max(w.start, min(w.start + w.n, len(prompt) - 1))
