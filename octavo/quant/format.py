"""What a weight format is."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Format(Protocol):
    """How the elements of a matrix row are stored: in blocks of `block` elements, `bytes` bytes each.

    A plain format has blocks of one element. Rows are independent: a block never crosses the end of a row.
    """

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Elements per block."""

    @property
    def bytes(self) -> int:
        """Bytes per block."""

    def dense(self, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Stored blocks uint8 [n, bytes] as their float32 values [n, block], exact as the format defines them."""
