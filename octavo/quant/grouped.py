"""Integers q of which those of a group share a scale s and a zero point z: value = s (q - z). What GPTQ and AWQ store.

They become blocks d q + m with d = s and m = -s z (`octavo.quant.affine`). Where s is a float16 or bfloat16 and q and z
have up to 8 bits, s q, s z and s (q - z) are float32 numbers: the values are exact. A float32 scale can need more bits;
then s q, s z and their sum are rounded to float32, each with an error of 2^-24 of it at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, I32, Stored
from octavo.quant import affine
from octavo.quant.method import Head, QuantError, Values, plain

U8 = npt.NDArray[np.uint8]
Groups = npt.NDArray[np.int64]
"""Of each column, its group."""

INTEGERS, FLOATS = ("I32", "I64"), ("F16", "BF16", "F32")
"""What tensors of numbers may be, in a file's words."""


def matrix(heads: Mapping[str, Head], ending: str, kinds: tuple[str, ...] = ("I32",)) -> tuple[int, int]:
    """Shape of a matrix that a module must have. Raises QuantError."""
    head = heads.get(ending)
    if head is None:
        raise QuantError(f"it has no {ending[1:]}")
    if len(head.shape) != 2 or head.kind not in kinds:
        raise QuantError(f"{ending[1:]} is {head.kind} {list(head.shape)}; a matrix of {' or '.join(kinds)} is needed")
    return head.shape[0], head.shape[1]


def fit(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises QuantError for a tensor of another shape than is wanted."""
    if shape != wanted:
        raise QuantError(f"{name} is {list(shape)}, and {list(wanted)} is needed beside the other tensors")


def consecutive(n_in: int, count: int, size: int) -> Groups:
    """Groups of `size` columns (-1: of all), the last of what is left; where there is another `count` of them, that
    many of one size, since modules may differ. Raises QuantError."""
    size = n_in if size == -1 else size
    if -(-n_in // size) != count:
        if count < 1 or n_in % count:
            raise QuantError(f"{n_in} columns are not {count} groups, of {size} or of any one size")
        size = n_in // count
    return np.arange(n_in, dtype=np.int64) // size


def unpacked(words: Values, bits: int) -> U8:
    """Integers of up to 8 bits [n, m] from int32 words [n, m * bits / 32]: the lowest bits of a row come first, and
    where `bits` does not divide 32 some lie in two words."""
    octets: U8 = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    out: U8
    if 8 % bits:
        whole = octets.shape[1] * 8 // bits
        each = np.unpackbits(octets, axis=1, bitorder="little")[:, : whole * bits].reshape(len(octets), whole, bits)
        out = np.packbits(each, axis=2, bitorder="little")[:, :, 0]
    else:
        out = np.stack([octets >> shift & 2**bits - 1 for shift in range(0, 8, bits)], axis=-1)
    return out.reshape(len(octets), -1)


def words(count: int, bits: int) -> int:
    """int32 words that hold `count` integers."""
    return -(-count * bits // 32)


class Matrix:
    """How a matrix of these integers is stored: reordered by group where groups do not lie together, and in blocks of
    the largest size that holds columns of one group only; in float32 where no size does."""

    def __init__(self, bits: int, groups: Groups) -> None:
        self.groups = groups
        self.columns: I32 | None = None
        in_order = groups
        if (groups[1:] < groups[:-1]).any():
            self.columns = np.argsort(groups, kind="stable").astype(np.int32)
            in_order = groups[self.columns]
        held = 8 if bits == 8 else 4
        fitting = [f for f in affine.FORMATS if f.bits == held and _fits(in_order, f.block)]
        self.format = max(fitting, key=lambda f: f.block, default=None)
        self.blocks = in_order[:: self.format.block] if self.format else in_order

    @property
    def kind(self) -> str:
        return self.format.name if self.format else "F32"

    def stored(self, q: U8, scales: Values, zeros: U8) -> Stored:
        """q [n_out, n_in] in the order of the file, scales and zeros [groups, n_out]."""
        n_out, n_in = q.shape
        z = np.ascontiguousarray(zeros.T)
        s: F32 = np.ascontiguousarray(scales.T).astype(np.float32)
        if self.format is None:
            difference = q.astype(np.int16) - z.astype(np.int16)[:, self.groups]
            return plain(s[:, self.groups] * difference)
        if self.columns is not None:
            q = q[:, self.columns]
        middle = 128 if self.format.bits == 8 else 0  # the integers of 8 bits are signed
        d = s[:, self.blocks]
        m = -d * (z.astype(np.int16) - middle)[:, self.blocks]
        rows = self.format.rows(q ^ np.uint8(middle), d, m)
        return Stored(self.kind, n_out, n_in, rows, self.columns)


def _fits(groups: Groups, block: int) -> bool:
    if len(groups) % block:
        return False
    blocks = groups.reshape(-1, block)
    return bool((blocks == blocks[:, :1]).all())


def number(config: Mapping[str, Any], *keys: str) -> int:
    """The whole number that the first of the keys that is there has. Raises QuantError."""
    for key in keys:
        value = config.get(key)
        if type(value) is int:
            return value
        if value is not None:
            raise QuantError(f"{key} is {value!r}, and must be a whole number")
    raise QuantError(f"{' or '.join(keys)} is missing")


def group_size(config: Mapping[str, Any], *keys: str) -> int:
    """Columns of a group; -1: all. Raises QuantError."""
    size = number(config, *keys)
    if size != -1 and size < 1:
        raise QuantError(f"{keys[0]} is {size}; it must be at least 1, or -1 for a group of all columns")
    return size
