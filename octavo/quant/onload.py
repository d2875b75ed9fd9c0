"""Quantization while a model is loaded: its matrices of floats become blocks as they are read (--quantization of a
checkpoint that is not quantized)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, Stored
from octavo.quant import KINDS, dense, row_bytes

U8 = npt.NDArray[np.uint8]

FLOATS = frozenset({"F32", "F16", "BF16"})

SLAB = 1 << 22
"""Elements quantized at a time: bounds the memory that intermediate values take."""


class Rule(NamedTuple):
    """How matrices are quantized: which numbers, and which of them share a scale."""

    kind: str
    """The format of `octavo.quant` that they become."""
    rows: Callable[[F32], U8]
    """float32 [n, n_in] -> rows uint8 [n, row_bytes(kind, n_in)], for n_in a multiple of the format's block."""
    about: str
    """For the user: "8-bit floats with a scale for each output channel"."""
    together: int = 1
    """Rows that share scales: `rows` gets a multiple of them, and what is left at the end."""


RULES: dict[str, Rule] = {}
"""What --quantization may say of a checkpoint that is not quantized."""


def quantize(rule: Rule, stored: Stored) -> Stored:
    """`stored` by `rule`; itself where it is no matrix of floats, or has rows that are no whole number of blocks."""
    kind, n_out, n_in, data, _ = stored
    if kind not in FLOATS or n_in % KINDS[rule.kind][0]:
        return stored
    out = np.empty((n_out, row_bytes(rule.kind, n_in)), np.uint8)
    step = max(1, SLAB // n_in // rule.together) * rule.together
    for start in range(0, n_out, step):
        slab = data[start : start + step]
        out[start : start + step] = rule.rows(dense(Stored(kind, len(slab), n_in, slab)))
    return Stored(rule.kind, n_out, n_in, out)
