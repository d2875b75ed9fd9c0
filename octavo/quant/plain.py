"""Formats that store one number per element: float32, float16, bfloat16, little-endian."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Plain:
    """One element per block. Every float16 and bfloat16 value is a float32 value, so `dense` is exact."""

    name: str
    dtype: np.dtype[np.generic]
    block: int = 1

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize

    def dense(self, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """uint8 [n, bytes] -> float32 [n, 1]."""
        return np.ascontiguousarray(blocks).view(self.dtype).astype(np.float32)


F32 = Plain("F32", np.dtype("<f4"))
F16 = Plain("F16", np.dtype("<f2"))
BF16 = Plain("BF16", np.dtype(ml_dtypes.bfloat16))
