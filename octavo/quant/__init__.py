"""How weights are stored: one file per family of formats, and the exact values of a stored matrix.

`dense` is the oracle: what a kernel computes with a stored matrix is tested against it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import Stored
from octavo.quant import affine, codebook, float8, gguf, gguf_extra, method, mxfp4, plain
from octavo.quant.format import Format
from octavo.quant.slabs import each_slab, slab_rows

__all__ = [
    "FORMATS",
    "GGUF_QUANTIZED",
    "KINDS",
    "LARGE_INTEGERS",
    "QUANTIZED_FLOATS",
    "SMALL_INTEGERS",
    "Format",
    "about_rewriting",
    "dense",
    "in_order",
    "multiplied_as",
    "rewritten",
    "row_bytes",
]

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        plain.F32,
        plain.F16,
        plain.BF16,
        *gguf.FORMATS,
        mxfp4.MXFP4,
        *affine.FORMATS,
        *float8.FORMATS,
        *codebook.FORMATS,
        *gguf_extra.FORMATS,
    )
}
"""Every format by name."""

KINDS: dict[str, tuple[int, int]] = {name: (f.block, f.bytes) for name, f in FORMATS.items()}
"""Name of a format -> (elements per block, bytes per block)."""

GGUF_QUANTIZED = frozenset(f.name for f in (*gguf.FORMATS, mxfp4.MXFP4, *gguf_extra.FORMATS))
"""Formats of GGUF files that are not plain."""

_REWRITTEN = {f.name: f for f in gguf_extra.FORMATS}

SMALL_INTEGERS = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "INT4_32", "INT4_128", "E2M1_16"}
)
"""Formats whose values are integers of up to 6 bits times scales: 8 bits are enough for what they are multiplied by."""

LARGE_INTEGERS = frozenset({"Q8_0", "INT8_32", "INT8_128", "IQ4_NL", "IQ4_XS", "IQ1_CODES", "IQ2_CODES", "IQ3_CODES"})
"""The same with integers of up to 8 bits."""

QUANTIZED_FLOATS = frozenset({"F8_E4M3_32", "F8_E5M2_32", "NF4_32", "FP4_32"})
"""Formats whose values are floats of few bits times scales."""

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
    _check(stored)
    form = FORMATS[kind]
    out = np.empty((n_out, n_in), np.float32)
    rows = max(1, _SLAB // max(1, n_in))
    for start in range(0, n_out if n_in else 0, rows):
        slab = data[start : start + rows]
        values = form.dense(slab.reshape(-1, form.bytes)).reshape(len(slab), n_in)
        out[start : start + rows, slice(None) if columns is None else columns] = values
    return out


def in_order(stored: Stored) -> Stored:
    """The matrix with its columns in order: itself, or in float32 where a format has moved them."""
    return stored if stored.columns is None else method.plain(dense(stored))


def multiplied_as(kind: str) -> str:
    """The format in which devices multiply with a matrix of `kind`: itself, or the one it is rewritten in."""
    return _REWRITTEN[kind].target.name if kind in _REWRITTEN else kind


def rewritten(stored: Stored, threads: int = 1) -> Stored:
    """`stored` in the format it is multiplied in: itself where that is its own format; else rewritten, without loss, on
    so many threads. Raises ValueError as `dense` does."""
    form = _REWRITTEN.get(stored.kind)
    if form is None:
        return stored
    _check(stored)
    target = form.target
    out = np.empty((stored.n_out, row_bytes(target.name, stored.n_in)), np.uint8)
    step = slab_rows(stored.n_in, 1)

    def rewrite(start: int) -> None:
        out[start : start + step] = form.rewrite(stored.data[start : start + step])

    each_slab(rewrite, stored.n_out, step, threads)
    return stored._replace(kind=target.name, data=out)


def about_rewriting(kind: str) -> str | None:
    """For the user: what becomes of weights of a format that is rewritten; None of others."""
    target = multiplied_as(kind)
    if target == kind:
        return None
    bits, wider = (8 * size / block for block, size in (KINDS[kind], KINDS[target]))
    return f"{kind} weights are rewritten as {target}, without loss: {wider:.2g} bits each instead of {bits:.2g}"


def _check(stored: Stored) -> None:
    kind, n_out, n_in, data, _ = stored
    width = row_bytes(kind, n_in)
    if data.dtype != np.uint8 or data.shape != (n_out, width):
        raise ValueError(
            f"a {kind} matrix [{n_out}, {n_in}] needs uint8 [{n_out}, {width}], not {data.dtype} {list(data.shape)}"
        )
