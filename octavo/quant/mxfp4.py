"""MXFP4: 4-bit floats (one sign, two exponent, one mantissa bit) of which 32 share a power of two.

Open Compute Project, "Microscaling formats (MX) specification v1.0" (2023). A block is laid out as in ggml's files: the
scale, then 16 bytes whose low halves are elements 0 to 15 and whose high halves are elements 16 to 31.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import Stored
from octavo.quant.gguf import Block
from octavo.quant.method import Head, Layout, QuantError, Values

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


def layout_of(heads: Mapping[str, Head], weight: str, scale: str) -> Layout:
    """The matrix whose codes are `heads[weight]` [n_out, 16 n], two in a byte, the first in its low half, and whose
    scales are `heads[scale]` [n_out, n]. Raises QuantError."""
    codes, scales = heads[weight], heads[scale]
    *rows, half = codes.shape
    if (codes.kind, scales.kind, scales.shape) != ("U8", "U8", (*rows, half // 16)) or half % 16 or len(rows) != 1:
        raise QuantError(
            f"{weight} is {codes.kind} {list(codes.shape)} and {scale} {scales.kind} {list(scales.shape)}; uint8 "
            "[n_out, 16 n] and uint8 [n_out, n], or E4M3 [n_out, 2 n], are needed"
        )

    def build(parts: Mapping[str, Values]) -> Stored:
        packed, powers = parts[weight], parts[scale]
        blocks = blocks_of(packed.reshape(-1, 16), powers.reshape(-1)).reshape(len(packed), -1)
        return Stored("MXFP4", len(packed), 2 * packed.shape[1], blocks)

    return Layout("MXFP4", (*rows, 2 * half), build)


class Mxfp4:
    """The experts of gpt-oss as they are published: stacks of codes NAME_blocks uint8 [E, n_out, n_in / 32, 16] and of
    scales NAME_scales uint8 [E, n_out, n_in / 32]."""

    name = "mxfp4"
    endings = ("_blocks", "_scales")
    marks = ("_blocks", "_scales")

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        codes, scales = heads.get("_blocks"), heads.get("_scales")
        if codes is None or scales is None:
            raise QuantError("it has no scales" if scales is None else "it has no blocks")
        blocks = codes.shape[:-1]
        if (codes.kind, scales.kind, codes.shape) != ("U8", "U8", (*scales.shape, 16)) or len(blocks) < 2:
            raise QuantError(
                f"_blocks is {codes.kind} {list(codes.shape)} and _scales {scales.kind} {list(scales.shape)}; uint8 "
                "[..., n, 16] and [..., n] are needed"
            )
        return Layout("MXFP4", (*blocks[:-1], blocks[-1] * 32), self._build, "_blocks")

    def _build(self, parts: Mapping[str, Values]) -> Stored:
        codes, scales = parts["_blocks"], parts["_scales"]
        n_in = scales.shape[-1] * 32
        rows = blocks_of(codes.reshape(-1, 16), scales.reshape(-1)).reshape(-1, n_in // 32 * 17)
        return Stored("MXFP4", len(rows), n_in, rows)


def read(config: Mapping[str, Any]) -> Mxfp4:
    return Mxfp4()
