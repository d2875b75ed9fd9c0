"""AWQ (Lin et al., "AWQ: activation-aware weight quantization", 2023) as AutoAWQ and GPTQModel store it: 4 bits.

A linear layer [n_out, n_in] of the version "gemm" is a module with qweight int32 [n_in, n_out / 8], qzeros int32
[groups, n_out / 8] and scales [groups, n_out]; a word holds 8 rows of the matrix, the even ones in its low half. Of the
version "gemv" they are [n_out, n_in / 8], [n_out, w] and [n_out, 8 w], in order, with w words for the groups of a row
and for what fills them up. What the scaling of activations changes is in the weights and in the norms before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.ops.contract import Stored
from octavo.quant import grouped
from octavo.quant.grouped import U8, Matrix
from octavo.quant.method import Head, Layout, QuantError, Values

ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 rows each half byte of a word is, from the lowest on, in the version "gemm"."""


class Gemm:
    """Modules of the version "gemm"."""

    name = "awq"
    endings = (".qweight", ".qzeros", ".scales")
    marks = (".qweight",)

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        n_in, width = grouped.matrix(heads, ".qweight")
        zeros = grouped.matrix(heads, ".qzeros")
        scales = grouped.matrix(heads, ".scales", grouped.FLOATS)
        count = scales[0]
        grouped.fit("qzeros", zeros, (count, width))
        grouped.fit("scales", scales, (count, width * 8))
        return Layout(self._matrix(n_in, count).kind, (width * 8, n_in), self._build)

    def _matrix(self, n_in: int, count: int) -> Matrix:
        return Matrix(4, grouped.consecutive(n_in, count, self.group_size))

    def _build(self, parts: Mapping[str, Values]) -> Stored:
        q = _rows(parts[".qweight"])
        matrix = self._matrix(q.shape[1], len(parts[".scales"]))
        return matrix.stored(q, parts[".scales"], _rows(parts[".qzeros"]).T)


class Gemv(Gemm):
    """Modules of the version "gemv"."""

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        n_out, words = grouped.matrix(heads, ".qweight")
        n_in = words * 8
        count = self._groups(n_in)
        zeros = grouped.matrix(heads, ".qzeros")
        width = zeros[1]
        if width * 8 < count:
            raise QuantError(f"qzeros has {width} words for the {count} groups of a row of {n_in}")
        grouped.fit("qzeros", zeros, (n_out, width))
        grouped.fit("scales", grouped.matrix(heads, ".scales", grouped.FLOATS), (n_out, width * 8))
        return Layout(self._matrix(n_in, count).kind, (n_out, n_in), self._build)

    def _groups(self, n_in: int) -> int:
        return 1 if self.group_size == -1 else -(-n_in // self.group_size)

    def _build(self, parts: Mapping[str, Values]) -> Stored:
        q = grouped.unpacked(parts[".qweight"], 4)
        count = self._groups(q.shape[1])
        scales, zeros = parts[".scales"][:, :count], grouped.unpacked(parts[".qzeros"], 4)[:, :count]
        return self._matrix(q.shape[1], count).stored(q, scales.T, zeros.T)


def _rows(words: Values) -> U8:
    """[n_out, n] of words [n, n_out / 8]."""
    turned = np.ascontiguousarray(words.T)
    out = np.empty((len(turned), 8, len(words)), np.uint8)
    for place, row in enumerate(ROWS):
        out[:, row] = turned >> 4 * place & 15
    return out.reshape(-1, len(words))


VERSIONS = {"gemm": Gemm, "gemv": Gemv}


def read(config: Mapping[str, Any]) -> Gemm:
    """Old files (quant_config.json) say w_bit and q_group_size."""
    bits = grouped.number(config, "bits", "w_bit")
    if bits != 4:
        raise QuantError(f"bits is {bits}; supported is 4")
    if config.get("backend") == "llm-awq":
        raise QuantError("backend is 'llm-awq', whose order of weights is another; supported is AutoAWQ's")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version not in VERSIONS:
        raise QuantError(f"version is {version!r}; supported are {' and '.join(VERSIONS)}")
    return VERSIONS[version](grouped.group_size(config, "group_size", "q_group_size"))
