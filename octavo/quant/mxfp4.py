"""MXFP4: 4-bit floats (one sign, two exponent, one mantissa bit) of which 32 share a power of two.

Open Compute Project, "Microscaling formats (MX) specification v1.0" (2023). A block is laid out as in ggml's files: the
scale, then 16 bytes whose low halves are elements 0 to 15 and whose high halves are elements 16 to 31.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.quant.gguf import Block

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the value of each code; minus zero is zero."""


def _values(blocks: U8) -> F32:
    """uint8 e · 32 codes: 2^(e - 128) times twice the value of the code. Exact; above float32's range infinite."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    values: F32 = scales * TWICE[codes]
    return values


MXFP4 = Block("MXFP4", 32, 17, _values)


def blocks_of(codes: U8, scales: U8) -> U8:
    """Blocks [n, 17] of codes [n, 16] as the checkpoints of gpt-oss have them, byte i holding elements 2i (low half)
    and 2i + 1, and of their scales [n]."""
    out = np.empty((len(codes), 17), np.uint8)
    out[:, 0] = scales
    first, second = codes[:, :8], codes[:, 8:]  # elements 0 to 15, and 16 to 31
    out[:, 1::2] = first & 15 | second << 4
    out[:, 2::2] = first >> 4 | second & 0xF0
    return out
