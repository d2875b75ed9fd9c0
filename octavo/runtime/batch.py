"""A plan as arrays: token ids, positions and rows, and the block tables that live as long as their slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ops.contract import I32, BatchArrays, BatchLimits
from octavo.runtime.sampler import Row
from octavo.types import StepPlan, Work


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

    def arrays(self, plan: StepPlan, last: I32, rows: Sequence[Row]) -> BatchArrays:
        """The step's arrays. `last[slot]` stands in for the one token that the plan could not name."""
        work = plan.work
        lengths = np.fromiter((w.n for w in work), np.int32, len(work))
        begins = np.fromiter((w.start for w in work), np.int32, len(work))
        slots = np.fromiter((w.slot for w in work), np.int32, len(work))
        starts = np.zeros(len(work) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        tokens: list[int] = []
        for w in work:
            tokens += w.tokens
            if len(w.tokens) < w.n:
                if len(w.tokens) + 1 != w.n:
                    raise ValueError(f"a Work of {w.n} tokens names {len(w.tokens)}: at most one may be left out")
                tokens.append(int(last[w.slot]))
        return BatchArrays(
            tokens=np.array(tokens, np.int32),
            positions=np.repeat(begins - starts[:-1], lengths) + np.arange(starts[-1], dtype=np.int32),
            starts=starts,
            slots=slots,
            rows=np.fromiter((r.token for r in rows), np.int32, len(rows)),
            tables=self.tables,
        )


def head_rows(w: Work, first: int, prompt: Sequence[int]) -> list[Row]:
    """The rows of one Work whose tokens begin at index `first` of the batch: prompt tokens to score, then one row per
    draft and one for the token after them."""
    rows: list[Row] = []
    if w.prompt_logprobs:
        for p in range(w.start, min(w.start + w.n, len(prompt) - 1)):
            rows.append(Row(first + p - w.start, w.slot, p + 1, prompt[p + 1]))
    if w.sample:
        guesses = w.tokens[len(w.tokens) - w.drafts :] if w.drafts else ()
        for j in range(w.drafts + 1):
            back = w.drafts - j
            rows.append(Row(first + w.n - 1 - back, w.slot, w.start + w.n - back, -1, guesses[:j]))
    return rows
