"""NVFP4: floats of 4 bits (E2M1), a scale in E4M3 for each 16 of a row, and one in float32 for the matrix.

NVIDIA, "Introducing NVFP4 for efficient and accurate low-precision inference", 2025. Two codes are a byte, the first in
its low half. compressed-tensors divides by the scale of the matrix, ModelOpt multiplies by it; both make one float32 of
the two scales before a code is multiplied, which is the order here, so that values are theirs to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from octavo.ops.contract import Stored
from octavo.quant.codebook import E2M1_16
from octavo.quant.float8 import F8_E4M3_32
from octavo.quant.method import Head, Layout, QuantError, Values


def layout_of(heads: Mapping[str, Head], weight: str, scale: str, whole: str, divided: bool) -> Layout:
    """The matrix whose codes are `heads[weight]`, whose scales `heads[scale]`, and whose one scale, by which
    they are divided or else multiplied, is `heads[whole]`. Raises QuantError."""
    codes, scales, one = heads[weight], heads[scale], heads.get(whole)
    if one is None:
        raise QuantError(f"it has no {whole}")
    *rows, half = codes.shape
    good = (codes.kind, scales.kind, scales.shape) == ("U8", "F8_E4M3", (*rows, half // 8))
    if not good or half % 8 or len(rows) != 1:
        raise QuantError(
            f"{weight} is {codes.kind} {list(codes.shape)} and {scale} {scales.kind} {list(scales.shape)}; uint8 "
            "[n_out, 8 n] and E4M3 [n_out, n] are needed"
        )
    if one.kind != "F32" or one.shape not in ((), (1,)):
        raise QuantError(f"{whole} is {one.kind} {list(one.shape)}; one float32 is needed")
    return Layout("E2M1_16", (*rows, 2 * half), partial(_build, weight, scale, whole, divided))


def _build(weight: str, scale: str, whole: str, divided: bool, parts: Mapping[str, Values]) -> Stored:
    packed, one = parts[weight], parts[whole].reshape(()).astype(np.float32)
    scales = parts[scale].view(F8_E4M3_32.dtype).astype(np.float32)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rows = E2M1_16.rows(codes, scales / one if divided else scales * one)
    return Stored("E2M1_16", *codes.shape, rows)
