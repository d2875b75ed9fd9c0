"""How weights are stored: one file per family of formats, and the exact values of a stored matrix.

`dense` is the oracle: what a kernel computes with a stored matrix is tested against it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import Stored
from octavo.quant import gguf, mxfp4, plain
from octavo.quant.format import Format

__all__ = ["FORMATS", "KINDS", "Format", "dense", "row_bytes"]

FORMATS: dict[str, Format] = {f.name: f for f in (plain.F32, plain.F16, plain.BF16, *gguf.FORMATS, mxfp4.MXFP4)}
"""Every format by name."""

KINDS: dict[str, tuple[int, int]] = {name: (f.block, f.bytes) for name, f in FORMATS.items()}
"""Name of a format -> (elements per block, bytes per block)."""

_SLAB = 1 << 20
"""Elements unpacked at a time: bounds the memory that intermediate values take."""


def row_bytes(kind: str, n_in: int) -> int:
    """Bytes of a row of `n_in` elements. Raises ValueError for an unknown kind or a row of broken blocks."""
    if kind not in KINDS:
        raise ValueError(f"unknown weight format {kind!r}; known are {', '.join(KINDS)}")
    block, size = KINDS[kind]
    if n_in % block:
        raise ValueError(f"a row of {n_in} elements is not a whole number of {kind} blocks ({block} elements each)")
    return n_in // block * size


def dense(stored: Stored) -> npt.NDArray[np.float32]:
    """The values of a stored matrix: a new float32 array [n_out, n_in], exact as the format defines them.

    Raises ValueError when `stored.data` is not uint8 [n_out, row_bytes(kind, n_in)].
    """
    kind, n_out, n_in, data, columns = stored
    width = row_bytes(kind, n_in)
    if data.dtype != np.uint8 or data.shape != (n_out, width):
        raise ValueError(
            f"a {kind} matrix [{n_out}, {n_in}] needs uint8 [{n_out}, {width}], not {data.dtype} {list(data.shape)}"
        )
    form = FORMATS[kind]
    out = np.empty((n_out, n_in), np.float32)
    rows = max(1, _SLAB // max(1, n_in))
    for start in range(0, n_out, rows):
        slab = data[start : start + rows]
        values = form.dense(slab.reshape(-1, form.bytes)).reshape(len(slab), n_in)
        out[start : start + rows, slice(None) if columns is None else columns] = values
    return out
