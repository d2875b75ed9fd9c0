"""How a leaf's tensor lies in a checkpoint, where it does not lie there as the leaf wants it.

A view maps between the two: what shape the checkpoint's tensor must have, and what the leaf gets of it. Rows of a
matrix are independent in every format, so views that pick or reorder rows cost nothing in precision; a transposition
goes through float32 where the format is not plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, Stored
from octavo.quant import FORMATS, affine, dense, in_order
from octavo.quant.method import plain

Order = npt.NDArray[np.int64]


class View(Protocol):
    """What a row of a name table may add to a name."""

    @property
    def in_gguf(self) -> bool:
        """False: GGUF files hold the tensor as the leaf wants it."""

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Of the checkpoint's tensor when the leaf wants `wanted`."""

    def matrix(self, stored: Stored) -> Stored: ...

    def vector(self, values: F32) -> F32: ...


class Rows:
    """Row i of the leaf is row order[i] of a tensor with `total` rows; of a vector, element i."""

    def __init__(self, order: Order, total: int, in_gguf: bool = True):
        self.order, self.total, self.in_gguf = order, total, in_gguf

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (self.total, *wanted[1:])

    def matrix(self, stored: Stored) -> Stored:
        return take_rows(stored, self.order)

    def vector(self, values: F32) -> F32:
        out: F32 = values[self.order]
        return out


def part(start: int, count: int, total: int) -> Rows:
    """Rows [start, start + count) of `total`."""
    return Rows(np.arange(start, start + count), total)


def part_of_heads(heads: int, each: int, start: int, count: int) -> Rows:
    """Of each head's `each` rows those in [start, start + count)."""
    return Rows(np.arange(heads * each).reshape(heads, each)[:, start : start + count].reshape(-1), heads * each)


def grouped(heads: int, kv_heads: int, head_dim: int, in_gguf: bool = True) -> Rows:
    """All queries, then keys, then values, from rows that lie by KV head: its queries, its key, its value (GPT-NeoX,
    BLOOM, Falcon, InternLM 2)."""
    each = heads // kv_heads
    rows = np.arange((heads + 2 * kv_heads) * head_dim).reshape(kv_heads, each + 2, head_dim)
    order = [rows[:, :each], rows[:, each], rows[:, each + 1]]
    return Rows(np.concatenate([o.reshape(-1) for o in order]), rows.size, in_gguf)


def interleaved(heads: int, head_dim: int, rotated: int | None = None, in_gguf: bool = True) -> Rows:
    """Rotary pairs (i, i + n/2) from heads whose pairs are neighbours (2i, 2i + 1), in the first n = `rotated` rows of
    each head (GPT-J's convention; Cohere, GLM, ERNIE)."""
    n = head_dim if rotated is None else rotated
    one = np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2), np.arange(n, head_dim)])
    return Rows((np.arange(heads)[:, None] * head_dim + one).reshape(-1), heads * head_dim, in_gguf)


def after(first: Rows, then: Rows) -> Rows:
    """`then` applied to what `first` gives."""
    return Rows(first.order[then.order], first.total, first.in_gguf)


def beside(views: Sequence[Rows]) -> Rows:
    """Each view of its own tensor, where the tensors lie one after another."""
    starts = np.cumsum([0, *(view.total for view in views)])
    orders = [view.order + start for view, start in zip(views, starts, strict=False)]
    return Rows(np.concatenate(orders), int(starts[-1]), views[0].in_gguf)


class Transposed:
    """The leaf's [n_out, n_in] from [n_in, n_out] (GPT-2's Conv1D; experts that are stored for x @ W). `rows` is then
    applied to the leaf's side."""

    def __init__(self, rows: Rows | None = None, in_gguf: bool = False):
        self.rows, self.in_gguf = rows, in_gguf

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        if self.rows is not None:
            wanted = self.rows.shape(wanted)
        return wanted[::-1]

    def matrix(self, stored: Stored) -> Stored:
        turned = transposed(stored)
        return turned if self.rows is None else self.rows.matrix(turned)

    def vector(self, values: F32) -> F32:
        return values if self.rows is None else self.rows.vector(values)


class TurnedHeads:
    """[heads * n, m] from heads of [m, n] each, one below the other in the rows that `rows` picks: the transpose of
    every head (the key projection of latent attention)."""

    def __init__(self, heads: int, rows: Rows, in_gguf: bool = False):
        self.heads, self.rows, self.in_gguf = heads, rows, in_gguf

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (self.rows.total, wanted[0] // self.heads)

    def matrix(self, stored: Stored) -> Stored:
        picked = self.rows.matrix(stored)
        each = picked.n_out // self.heads
        heads = [
            transposed(picked._replace(n_out=each, data=picked.data[h * each : (h + 1) * each]))
            for h in range(self.heads)
        ]
        return heads[0]._replace(n_out=sum(h.n_out for h in heads), data=np.concatenate([h.data for h in heads]))

    def vector(self, values: F32) -> F32:
        raise ValueError("a view that turns heads is for matrices")


class Columns:
    """Columns [start, start + count) of a matrix with `total`."""

    in_gguf = True

    def __init__(self, start: int, count: int, total: int):
        self.start, self.count, self.total = start, count, total

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (wanted[0], self.total)

    def matrix(self, stored: Stored) -> Stored:
        return take_columns(stored, self.start, self.count)

    def vector(self, values: F32) -> F32:
        raise ValueError("a view of columns is for matrices")


class Flat:
    """A matrix [a * b, n] from a tensor [a, b, n] with a = `count`."""

    def __init__(self, count: int, in_gguf: bool = True):
        self.count, self.in_gguf = count, in_gguf

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (self.count, wanted[0] // self.count, *wanted[1:])

    def matrix(self, stored: Stored) -> Stored:
        return stored

    def vector(self, values: F32) -> F32:
        return values


class UnitRows:
    """A matrix whose rows are scaled to length 1, in float32 (the head of Baichuan 2)."""

    in_gguf = True

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return wanted

    def matrix(self, stored: Stored) -> Stored:
        rows = dense(stored)
        return plain(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))

    def vector(self, values: F32) -> F32:
        raise ValueError("a view that scales rows is for matrices")


def take_rows(stored: Stored, rows: Order | slice) -> Stored:
    """Some rows of a matrix, in this order; a view of the file where `rows` is a slice."""
    data = stored.data[rows]
    return stored._replace(n_out=len(data), data=data)


def take_columns(stored: Stored, start: int, size: int) -> Stored:
    """Columns [start, start + size). Raises ValueError when they do not begin and end at the format's blocks, of which
    those of many elements are divided where that helps."""
    stored = in_order(stored)  # blocks may hold columns from anywhere
    kind, n_out, n_in, data, _ = stored
    block = FORMATS[kind].block
    if start % block or size % block:
        kind, data = affine.narrowed(kind, data)
        block = FORMATS[kind].block
    if start % block or size % block:
        raise ValueError(f"a {kind} matrix of {n_in} columns can only be cut at multiples of {block}, not at {start}")
    width = FORMATS[kind].bytes
    return Stored(kind, n_out, size, data[:, start // block * width : (start + size) // block * width])


def scaled_columns(stored: Stored, scales: F32) -> Stored:
    """Column j of a matrix times scales[j], in float32."""
    return plain(dense(stored) * scales)


def transposed(stored: Stored) -> Stored:
    """[n_in, n_out] of a matrix: the same elements where its format is plain, float32 otherwise."""
    stored = in_order(stored)
    if FORMATS[stored.kind].block != 1:
        stored = plain(dense(stored))
    kind, n_out, n_in, data, _ = stored
    size = FORMATS[kind].bytes
    elements = data.reshape(n_out, n_in, size).swapaxes(0, 1)
    return Stored(kind, n_in, n_out, np.ascontiguousarray(elements).reshape(n_in, n_out * size))
