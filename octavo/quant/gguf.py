"""Block formats of GGUF files: integers of 2 to 8 bits with a float16 scale per block.

The layouts are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h). Products of a float16 scale and small
integers are exact in float32; where a format also has an offset, its addition is the only rounding, so every
implementation that works in float32 gets the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Block:
    """A format with blocks of `block` elements in `bytes` bytes, and how they become float32."""

    name: str
    block: int
    bytes: int
    values: Callable[[U8], F32]

    def dense(self, blocks: U8) -> F32:
        """uint8 [n, bytes] -> float32 [n, block]. Infinite or NaN scales give what IEEE arithmetic says."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.values(blocks)


def half(blocks: U8, at: int) -> F32:
    """[n, 1]: the little-endian float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: U8) -> U8:
    """[n, k] bytes -> [n, 2k]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: U8) -> U8:
    """[n, 4] bytes -> [n, 32]: bit i of the little-endian word, moved to bit 4."""
    bits: U8 = np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)
    return bits


KVALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


def _q4_0(b: U8) -> F32:
    """float16 d · 32 nibbles q: d (q - 8)."""
    return half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: U8) -> F32:
    """float16 d, m · 32 nibbles q: d q + m."""
    return half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + half(b, 2)


def _q5_0(b: U8) -> F32:
    """float16 d · 32 high bits · 32 nibbles: d (q - 16)."""
    return half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).astype(np.float32) - 16)


def _q5_1(b: U8) -> F32:
    """float16 d, m · 32 high bits · 32 nibbles: d q + m."""
    return half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).astype(np.float32) + half(b, 2)


def _q8_0(b: U8) -> F32:
    """float16 d · 32 int8: d q."""
    return half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(b: U8) -> F32:
    """float16 d · 32 codes c: d KVALUES[c]."""
    return half(b, 0) * KVALUES[_nibbles(b[:, 2:])]


def _iq4_xs(b: U8) -> F32:
    """float16 d · high 2 bits and low 4 bits of eight scales s, one per 32 elements · 256 codes c:
    (d (s - 32)) KVALUES[c]."""
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = (b[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 8)
    scales = half(b, 0) * ((low | high << 4).astype(np.float32) - 32)
    values = KVALUES[_nibbles(b[:, 8:].reshape(-1, 16))].reshape(-1, 8, 32)
    return (scales[:, :, None] * values).reshape(-1, 256)


def _two_bits(packed: U8) -> U8:
    """64 bytes -> [n, 256]: of each 32 bytes the lowest two bits, then the next."""
    q: U8 = (packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)).reshape(-1, 256)
    return q


def _q2_k(b: U8) -> F32:
    """16 bytes of scales s + 16 minima m, one per 16 elements · 256 q of 2 bits · float16 d, dmin: (d s) q - dmin m."""
    scales = half(b, 80) * (b[:, :16] & 15).astype(np.float32)
    mins = half(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    q = _two_bits(b[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    values: F32 = scales[:, :, None] * q - mins[:, :, None]
    return values.reshape(-1, 256)


def _q3_k(b: U8) -> F32:
    """32 bytes of high bits (bit g of byte i: element 32 g + i) · 256 low 2 bits · 16 scales s of 6 bits, one per 16
    elements, low 4 bits in 8 bytes and high 2 bits in 4 · float16 d: (d (s - 32)) (q - 4)."""
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)).reshape(-1, 256)
    q = (_two_bits(b[:, 32:96]) | high << np.uint8(2)).reshape(-1, 16, 16).astype(np.float32) - 4
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1)
    top = (b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = half(b, 108) * ((low | top << 4).astype(np.float32) - 32)
    values: F32 = scales[:, :, None] * q
    return values.reshape(-1, 256)


def _scales_and_mins(packed: U8) -> tuple[F32, F32]:
    """12 bytes -> 8 scales and 8 mins of 6 bits, each [n, 8, 1].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3 in their low 6 bits; scales and mins 4-7 have their low 4 bits in
    the halves of bytes 8-11 and their high 2 bits on top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32)[:, :, None], mins.astype(np.float32)[:, :, None]


def _groups_of_32(b: U8, q: U8) -> F32:
    """float16 d, dmin · 12 bytes of scales s and mins m, one per 32 elements: (d s) q - dmin m; q is [n, 8, 32]."""
    scales, mins = _scales_and_mins(b[:, 4:16])
    d, d_min = half(b, 0)[:, :, None], half(b, 2)[:, :, None]
    return ((d * scales) * q.astype(np.float32) - d_min * mins).reshape(len(b), 256)


def _halves_by_32(packed: U8) -> U8:
    """128 bytes -> [n, 8, 32]: of each 32 bytes the low halves, then the high halves."""
    p = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([p & 15, p >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b: U8) -> F32:
    """d, dmin, scales · 256 nibbles."""
    return _groups_of_32(b, _halves_by_32(b[:, 16:]))


def _q5_k(b: U8) -> F32:
    """d, dmin, scales · 32 bytes of high bits (bit g of byte i: element i of group g) · 256 nibbles."""
    high = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    return _groups_of_32(b, _halves_by_32(b[:, 48:]) | high << np.uint8(4))


def _q6_k(b: U8) -> F32:
    """128 bytes of low halves · 64 bytes of high 2 bits · 16 int8 scales s, one per 16 elements · float16 d:
    (d s) (q - 32). Each half of the block (128 elements) uses 64 low and 32 high bytes."""
    n = len(b)
    low = b[:, :128].reshape(n, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(n, 2, 4, 32)
    high = b[:, 128:192].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(n, 16, 16).astype(np.float32) - 32
    scales = b[:, 192:208].view(np.int8).astype(np.float32)
    return ((half(b, 208) * scales)[:, :, None] * q).reshape(n, 256)


FORMATS = (
    Block("Q4_0", 32, 18, _q4_0),
    Block("Q4_1", 32, 20, _q4_1),
    Block("Q5_0", 32, 22, _q5_0),
    Block("Q5_1", 32, 24, _q5_1),
    Block("Q8_0", 32, 34, _q8_0),
    Block("IQ4_NL", 32, 18, _iq4_nl),
    Block("Q2_K", 256, 84, _q2_k),
    Block("Q3_K", 256, 110, _q3_k),
    Block("Q4_K", 256, 144, _q4_k),
    Block("Q5_K", 256, 176, _q5_k),
    Block("Q6_K", 256, 210, _q6_k),
    Block("IQ4_XS", 256, 136, _iq4_xs),
)
