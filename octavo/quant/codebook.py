"""Codes of 4 bits into a table of 16 values, with a float32 scale per block: value = d table[code].

A block is d, then codes as in ggml's files: low halves are the first half of the elements, high halves the second.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Codebook:
    """float32 d · `block` codes. Codes without a value in `values` stand for 0."""

    name: str
    block: int
    values: tuple[float, ...]

    @property
    def bytes(self) -> int:
        return 4 + self.block // 2

    @property
    def table(self) -> F32:
        """[16]."""
        return np.array(self.values + (0.0,) * (16 - len(self.values)), np.float32)

    def dense(self, blocks: U8) -> F32:
        """uint8 [n, bytes] -> float32 [n, block]. Infinite or NaN scales give what IEEE arithmetic says."""
        scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
        codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            values: F32 = scales * self.table[codes]
        return values

    def rows(self, codes: U8, d: F32) -> U8:
        """Rows uint8 [n_out, bytes per row] of codes [n_out, n_in], and of d [n_out, n_in / g] for any g that is a
        multiple of `block`."""
        n_out, n_in = codes.shape
        blocks = n_in // self.block
        out = np.empty((n_out, blocks, self.bytes), np.uint8)
        scales = np.repeat(d, blocks // d.shape[1], axis=1).astype("<f4")
        out[:, :, :4] = scales.view(np.uint8).reshape(n_out, blocks, 4)
        halves = codes.reshape(n_out, blocks, 2, -1)
        out[:, :, 4:] = halves[:, :, 0] | halves[:, :, 1] << 4
        return out.reshape(n_out, -1)


# fmt: off
NF4_32 = Codebook("NF4_32", 32, (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
))
"""The normal float of bitsandbytes: Dettmers et al., "QLoRA", 2023."""

FP4_32 = Codebook("FP4_32", 32, (
    0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25, 0.0, -1 / 192, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25,
))
"""The 4-bit float of bitsandbytes: 0, 0.0625, 8, 12, 4, 6, 2, 3 divided by the largest; minus zero is zero."""

E2M1_16 = Codebook("E2M1_16", 16, (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
))
"""The 4-bit float of MXFP4 and NVFP4: one sign, two exponent, one mantissa bit."""
# fmt: on

IQ1_CODES = Codebook("IQ1_CODES", 16, (-9, -7, -1, 1, 7, 9))
IQ2_CODES = Codebook("IQ2_CODES", 16, (8, 25, 43, -8, -25, -43))
IQ3_CODES = Codebook("IQ3_CODES", 16, (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62))
"""Every value that ggml's formats IQ1, IQ2 and IQ3_XXS have, as the integers that their scales multiply."""

FORMATS = (NF4_32, FP4_32, E2M1_16, IQ1_CODES, IQ2_CODES, IQ3_CODES)
