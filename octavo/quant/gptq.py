"""GPTQ (Frantar et al., "GPTQ: accurate post-training quantization", 2022) as AutoGPTQ and GPTQModel store it.

A linear layer [n_out, n_in] is a module with qweight int32 [n_in bits / 32, n_out], qzeros int32 [groups,
n_out bits / 32], scales [groups, n_out] and g_idx int32 [n_in]: the group of each column, in any order where columns
were quantized in the order of their activations ("act-order", desc_act). Integers are packed along n_in and n_out from
the lowest bit on; those of 3 bits may lie in two words.

Bits and groups are what the tensors say, module by module: GPTQModel's `dynamic` can give a module others than the rest
of the configuration says, or leave it as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from octavo.ops.contract import Stored
from octavo.quant import grouped
from octavo.quant.grouped import U8, Matrix
from octavo.quant.method import Head, Layout, QuantError, Values

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


class Gptq:
    """`bits` and `group_size` count where a module's tensors leave them open: so few rows that their words could be of
    several, no g_idx. `less_one`: zero points z are stored as z - 1 (version 1)."""

    name = "gptq"
    endings = (".qweight", ".qzeros", ".scales", ".g_idx")
    marks = (".qweight",)

    def __init__(self, bits: int, group_size: int, less_one: bool) -> None:
        self.bits = bits
        self.group_size = group_size
        self.less_one = less_one

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        words, n_out = grouped.matrix(heads, ".qweight")
        count, width = grouped.matrix(heads, ".qzeros")
        grouped.fit("scales", grouped.matrix(heads, ".scales", grouped.FLOATS), (count, n_out))
        bits = next((bits for bits in (self.bits, *BITS) if grouped.words(n_out, bits) == width), None)
        if bits is None:
            raise QuantError(f"qzeros has {width} words for {n_out} rows, which is not 2, 3, 4 or 8 bits for each")
        index = heads.get(".g_idx")
        n_in = words * 32 // bits
        if index is not None:
            if index.kind not in grouped.INTEGERS:
                raise QuantError(f"g_idx is {index.kind}; {' or '.join(grouped.INTEGERS)} is needed")
            n_in = math.prod(index.shape)
            grouped.fit("qweight", (words, n_out), (grouped.words(n_in, bits), n_out))
        kind = self._matrix(bits, n_in, count, None if index is None else index.values()).kind
        return Layout(kind, (n_out, n_in), partial(self._build, bits, n_in))

    def _matrix(self, bits: int, n_in: int, count: int, index: Values | None) -> Matrix:
        if index is None:
            return Matrix(bits, grouped.consecutive(n_in, count, self.group_size))
        groups = index.reshape(-1).astype(np.int64)
        if n_in and not 0 <= groups.min() <= groups.max() < count:
            raise QuantError(f"g_idx names groups {groups.min()} to {groups.max()}, and there are {count}")
        return Matrix(bits, groups)

    def _build(self, bits: int, n_in: int, parts: Mapping[str, Values]) -> Stored:
        count, n_out = parts[".scales"].shape
        matrix = self._matrix(bits, n_in, count, parts.get(".g_idx"))
        q = grouped.unpacked(parts[".qweight"].T, bits)[:, :n_in]
        return matrix.stored(q, parts[".scales"], self._zeros(parts[".qzeros"], bits)[:, :n_out])

    def _zeros(self, words: Values, bits: int) -> U8:
        """Version 1 counts in words, as GPTQModel does when it writes them: a zero point 0 borrows from the next."""
        if not self.less_one:
            return grouped.unpacked(words, bits)
        if bits == 3:  # which lie across words: each alone
            z: U8 = grouped.unpacked(words, bits) + np.uint8(1) & np.uint8(7)
            return z
        ones = np.uint32(sum(1 << i for i in range(0, 32, bits)))
        return grouped.unpacked(words.view(np.uint32) + ones, bits)


def read(config: Mapping[str, Any]) -> Gptq:
    bits = grouped.number(config, "bits")
    if bits not in BITS:
        raise QuantError(f"bits is {bits}; supported are 2, 3, 4 and 8")
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        form = "marlin"
    if form not in FORMATS:
        raise QuantError(f"checkpoint_format is {form!r}; supported are {' and '.join(FORMATS)}")
    return Gptq(bits, grouped.group_size(config, "group_size"), form == "gptq")
