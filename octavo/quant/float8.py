"""Floats of 8 bits of which 32 share a float32 scale.

Micikevicius et al., "FP8 formats for deep learning", 2022: E4M3 has no infinities and one NaN of either sign, E5M2 is a
float16 without its lower byte.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Float8:
    """float32 d · 32 floats: d times each."""

    name: str
    dtype: np.dtype[np.generic]
    block: int = 32
    bytes: int = 36

    def dense(self, blocks: U8) -> F32:
        """uint8 [n, 36] -> float32 [n, 32]. Infinite or NaN scales give what IEEE arithmetic says."""
        scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
        with np.errstate(invalid="ignore", over="ignore"):
            values: F32 = scales * blocks[:, 4:].view(self.dtype).astype(np.float32)
        return values

    def rows(self, codes: U8, d: F32) -> U8:
        """Rows uint8 [n_out, bytes per row] of floats' bytes [n_out, n_in], and of d [n_out, n_in / g] for any g that
        is a multiple of 32."""
        n_out, n_in = codes.shape
        out = np.empty((n_out, n_in // 32, 36), np.uint8)
        scales = np.repeat(d, n_in // 32 // d.shape[1], axis=1).astype("<f4")
        out[:, :, :4] = scales.view(np.uint8).reshape(n_out, -1, 4)
        out[:, :, 4:] = codes.reshape(n_out, -1, 32)
        return out.reshape(n_out, -1)


F8_E4M3_32 = Float8("F8_E4M3_32", np.dtype(ml_dtypes.float8_e4m3fn))
F8_E5M2_32 = Float8("F8_E5M2_32", np.dtype(ml_dtypes.float8_e5m2))
FORMATS = (F8_E4M3_32, F8_E5M2_32)
