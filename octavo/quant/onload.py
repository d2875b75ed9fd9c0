"""Quantization while a model is loaded: its matrices of floats become blocks as they are read (--quantization of a
checkpoint that is not quantized)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, Stored
from octavo.quant import KINDS, bitsandbytes, dense, fp8, integers, row_bytes
from octavo.quant.slabs import each_slab, slab_rows

U8 = npt.NDArray[np.uint8]

FLOATS = frozenset({"F32", "F16", "BF16"})


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
    tables: Rule | None = None
    """What embeddings and the head become; None: they stay as they are."""


_TABLES = Rule("Q8_0", integers.eight_bits, "integers of 8 bits with a scale for 32")

RULES: dict[str, Rule] = {
    "bitsandbytes": Rule("NF4_32", bitsandbytes.normal_floats, "NF4 codes with a scale for 64"),
    "fp8": Rule("F8_E4M3_32", fp8.per_channel, "floats of 8 bits (E4M3) with a scale for each row"),
    "fp8_per_block": Rule("F8_E4M3_32", fp8.per_block, "floats of 8 bits (E4M3) with a scale for each 128 x 128", 128),
    "int4": Rule(
        "Q4_1",
        integers.four_bits,
        "integers of 4 bits with a scale and a minimum for 32; of 8 bits in embeddings and head",
        tables=_TABLES,
    ),
    "int8": Rule("Q8_0", integers.eight_bits, f"{_TABLES.about}, embeddings and head as well", tables=_TABLES),
}
"""What --quantization may say of a checkpoint that is not quantized."""


def saved(rule: Rule, kinds: Collection[str]) -> float:
    """Bytes that an element of a matrix takes less after it: at least, of matrices of these kinds."""
    before, after = (min(size / block for block, size in map(KINDS.__getitem__, ks)) for ks in (kinds, (rule.kind,)))
    return max(0.0, before - after)


def quantize(rule: Rule, stored: Stored, threads: int = 1) -> Stored:
    """`stored` by `rule`, computed on so many threads; itself where it is no matrix of floats, or has rows that are no
    whole number of blocks."""
    kind, n_out, n_in, data, _ = stored
    if kind not in FLOATS or n_in % KINDS[rule.kind][0]:
        return stored
    out = np.empty((n_out, row_bytes(rule.kind, n_in)), np.uint8)
    step = slab_rows(n_in, rule.together)

    def convert(start: int) -> None:
        slab = data[start : start + step]
        out[start : start + step] = rule.rows(dense(Stored(kind, len(slab), n_in, slab)))

    each_slab(convert, n_out, step, threads)
    return Stored(rule.kind, n_out, n_in, out)
