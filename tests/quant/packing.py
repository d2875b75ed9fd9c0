"""Matrices quantized in the ways of GPTQ and AWQ, written as AutoGPTQ, AutoAWQ and GPTQModel write them.

Written from the published layouts, for none of these installs with our tests. The tensors and the values were compared
with those of GPTQModel 7.7.0 (TorchLinear.pack and dequantize_weight, convert_gptq_v2_to_v1_format_module), AutoGPTQ
0.7.1 (qlinear_cuda_old) and AutoAWQ 0.2.9 (WQLinear_GEMM and WQLinear_GEMV, dequantize_gemm) and were the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]
"""AWQ's GEMM: which of 8 neighbours lies in each half byte of a word."""


class Quantized(NamedTuple):
    """value [i, j] = scales[i, g] (q[i, j] - zeros[i, g]) with g = groups[j]."""

    q: Any
    scales: Any
    zeros: Any
    groups: Any
    bits: int

    @property
    def values(self) -> Any:
        """float32 [n_out, n_in]."""
        scales, zeros = (a[:, self.groups].astype(np.float32) for a in (self.scales, self.zeros))
        return scales * (self.q.astype(np.float32) - zeros)


def rounded(weight: Any, bits: int, groups: Any, symmetric: bool = False, dtype: Any = np.float16) -> Quantized:
    """`weight` [n_out, n_in] to the nearest integers, columns of a group with one scale and zero point of each row."""
    most = 2**bits - 1
    scales, zeros = [], []
    for g in range(int(groups.max()) + 1):
        part = weight[:, groups == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = np.maximum((high - low) / most, 1e-4).astype(dtype)
        scales.append(scale)
        zeros.append(np.full(len(scale), (most + 1) // 2) if symmetric else np.round(-low / scale.astype(np.float32)))
    s, z = np.stack(scales, 1), np.clip(np.stack(zeros, 1), 0, most).astype(np.int64)
    q = np.clip(np.round(weight / s[:, groups].astype(np.float32)) + z[:, groups], 0, most).astype(np.int64)
    return Quantized(q, s, z, groups, bits)


def words(numbers: Any, bits: int) -> Any:
    """int32 [n, ceil(m bits / 32)] of integers [n, m], the first in the lowest bits."""
    n, m = numbers.shape
    flags = numbers[:, :, None] >> np.arange(bits) & 1
    flags = np.pad(flags.reshape(n, m * bits), ((0, 0), (0, -m * bits % 32)))
    return np.packbits(flags.astype(np.uint8), axis=1, bitorder="little").view(np.int32)


def gptq(matrix: Quantized, version: int = 1, with_index: bool = True) -> dict[str, Any]:
    """Tensors by ending. Version 1 takes one from each zero point, as GPTQModel does: in words, with a borrow."""
    bits = matrix.bits
    zeros = words(matrix.zeros.T, bits)
    if version == 1 and bits == 3:
        zeros = words(matrix.zeros.T - 1 & 7, bits)
    elif version == 1:
        zeros = (zeros.view(np.uint32) - np.uint32(sum(1 << i for i in range(0, 32, bits)))).view(np.int32)
    out = {
        "qweight": np.ascontiguousarray(words(matrix.q, bits).T),
        "qzeros": zeros,
        "scales": np.ascontiguousarray(matrix.scales.T),
    }
    return out | ({"g_idx": matrix.groups.astype(np.int32)} if with_index else {})


def awq(matrix: Quantized, version: str = "gemm", group: int = 128) -> dict[str, Any]:
    """Tensors by ending, of 4 bits. `group` (columns of one) decides how far "gemv" fills up."""
    if version == "gemv":
        many = {32: 4, 64: 2}.get(group, 1)
        width = math.ceil(math.ceil(matrix.zeros.shape[1] / 8) / many) * many
        padding = ((0, 0), (0, width * 8 - matrix.zeros.shape[1]))
        return {
            "qweight": words(matrix.q, 4),
            "qzeros": words(np.pad(matrix.zeros, padding), 4),
            "scales": np.pad(matrix.scales, padding),
        }
    turned = (numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, EVEN_FIRST] for numbers in (matrix.q, matrix.zeros))
    q, zeros = (words(np.ascontiguousarray(t.reshape(len(t), -1)), 4) for t in turned)
    return {"qweight": q, "qzeros": zeros, "scales": np.ascontiguousarray(matrix.scales.T)}


def consecutive(n_in: int, size: int) -> Any:
    """Groups of `size` columns; -1: one."""
    return np.arange(n_in) // (n_in if size == -1 else size)


def shuffled(n_in: int, size: int, seed: int) -> Any:
    """Groups of `size` columns from anywhere: act-order."""
    return np.random.default_rng(seed).permutation(consecutive(n_in, size))
