"""Integers of 4 or 8 bits with a float32 scale and minimum per block: value = d q + m.

What AWQ, GPTQ, compressed-tensors, HQQ, torchao and bitsandbytes' int8 store fits into these: a scale s of up to 16
significant bits and an integer zero point z give d = s and m = -s z, and d q, m and their sum are float32 numbers.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Affine:
    """float32 d, m · `block` integers of `bits` bits. Of 4 bits, each 32 are 16 bytes as in ggml's files: low halves
    are elements 0 to 15, high halves 16 to 31. Of 8 bits they are signed."""

    name: str
    bits: int
    block: int

    @property
    def bytes(self) -> int:
        return 8 + self.block * self.bits // 8

    def dense(self, blocks: U8) -> F32:
        """uint8 [n, bytes] -> float32 [n, block]. Infinite or NaN scales give what IEEE arithmetic says."""
        scales = np.ascontiguousarray(blocks[:, :8]).view("<f4")
        if self.bits == 8:
            q = blocks[:, 8:].view(np.int8).astype(np.float32)
        else:
            packed = blocks[:, 8:].reshape(len(blocks), -1, 16)
            q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, self.block).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            values: F32 = scales[:, :1] * q + scales[:, 1:]
        return values

    def rows(self, q: npt.NDArray[np.integer], d: F32, m: F32) -> U8:
        """Rows uint8 [n_out, bytes per row] of integers q [n_out, n_in], and of d and m [n_out, n_in / g] for any g
        that is a multiple of `block`."""
        n_out, n_in = q.shape
        blocks = n_in // self.block
        out = np.empty((n_out, blocks, self.bytes), np.uint8)
        scales = np.empty((n_out, blocks, 2), "<f4")
        for column, values in enumerate((d, m)):
            scales[:, :, column] = np.repeat(values, blocks // values.shape[1], axis=1)
        out[:, :, :8] = scales.view(np.uint8).reshape(n_out, blocks, 8)
        if self.bits == 8:
            out[:, :, 8:] = q.astype(np.int8).view(np.uint8).reshape(n_out, blocks, self.block)
        else:
            halves = q.astype(np.uint8).reshape(n_out, blocks, -1, 2, 16)
            out[:, :, 8:] = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).reshape(n_out, blocks, -1)
        return out.reshape(n_out, -1)


INT4_32, INT4_128 = Affine("INT4_32", 4, 32), Affine("INT4_128", 4, 128)
INT8_32, INT8_128 = Affine("INT8_32", 8, 32), Affine("INT8_128", 8, 128)
FORMATS = (INT4_32, INT4_128, INT8_32, INT8_128)


def fitting(bits: int, n_in: int, group: int) -> Affine | None:
    """The format for `bits` bits and groups of `group` elements that takes least; None when no block size fits."""
    found = [f for f in FORMATS if f.bits == bits and group % f.block == 0 and n_in % f.block == 0]
    return found[-1] if found else None


def narrowed(kind: str, rows: U8) -> tuple[str, U8]:
    """Rows in blocks of 32 with the same values; of other formats as they are."""
    wide = next((f for f in FORMATS if f.name == kind and f.block > 32), None)
    if wide is None:
        return kind, rows
    narrow = next(f for f in FORMATS if f.bits == wide.bits and f.block == 32)
    blocks = rows.reshape(len(rows), -1, 1, wide.bytes)
    integers = blocks[..., 8:].reshape(len(rows), blocks.shape[1], wide.block // 32, -1)
    scales = np.broadcast_to(blocks[..., :8], (*integers.shape[:3], 8))
    return narrow.name, np.concatenate([scales, integers], axis=3).reshape(len(rows), -1)
