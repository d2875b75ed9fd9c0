"""Rounding to the nearest integer times a scale, for --quantization int8 and int4 of checkpoints in floats.

The blocks are those of GGUF files, 32 neighbours in a row with float16 scales, for which there are kernels. Of 4 bits
they have a minimum: without one, or with blocks of 128, the errors of small models are two to three times as large
(docs/quantized.md has the numbers).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32
from octavo.quant.method import QuantError

U8 = npt.NDArray[np.uint8]

BLOCK = 32


def eight_bits(values: F32) -> U8:
    """Rows of Q8_0: d is the largest magnitude of a block / 127, in float16; integers are values / d.

    Raises QuantError for values that are not finite, or too large for a float16 d.
    """
    n_out, n_in = values.shape
    blocks = values.reshape(-1, BLOCK)
    d = _half(np.maximum(blocks.max(1), -blocks.min(1)) / np.float32(127))
    out = np.empty((len(blocks), 2 + BLOCK), np.uint8)
    out[:, :2] = d[:, None].view(np.uint8)
    out[:, 2:] = _steps(blocks, d, -127, 127).astype(np.int8).view(np.uint8)
    return out.reshape(n_out, -1)


def four_bits(values: F32) -> U8:
    """Rows of Q4_1: m is the least value of a block and d the distance to the largest / 15, both in float16; integers
    are (values - m) / d. Raises QuantError as `eight_bits` does."""
    n_out, n_in = values.shape
    blocks = values.reshape(-1, BLOCK)
    least = blocks.min(1)
    d, m = _half((blocks.max(1) - least) / np.float32(15)), _half(least)
    codes = _steps(blocks - m.astype(np.float32)[:, None], d, 0, 15).astype(np.uint8)
    out = np.empty((len(blocks), 4 + BLOCK // 2), np.uint8)
    out[:, :2], out[:, 2:4] = d[:, None].view(np.uint8), m[:, None].view(np.uint8)
    out[:, 4:] = codes[:, :16] | codes[:, 16:] << 4
    return out.reshape(n_out, -1)


def _half(values: F32) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        out = values.astype("<f2")
    if not np.isfinite(out).all():
        raise QuantError("a matrix has numbers that are not finite, or too large for float16 scales")
    return out


def _steps(values: F32, d: npt.NDArray[np.float16], least: int, most: int) -> F32:
    """values / d to the nearest integer in [least, most]; 0 where d is 0."""
    by = d.astype(np.float32)[:, None]
    out: F32 = np.divide(values, by, out=np.zeros_like(values), where=by != 0)
    return np.clip(np.rint(out, out=out), least, most, out=out)
