"""Leaves of a model: the layers that own tensors. A leaf says what it needs and is filled once by the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from octavo import quant
from octavo.ops.contract import F32, Activation, Array, Device, Ops, Stored, Vector, Weight
from octavo.parallel.rank import Cut, Rank


class Need(NamedTuple):
    """A tensor that a leaf must be given."""

    part: str
    """Of a leaf in parts, which one ("q"; of a stack of experts "3.gate"); "" is the leaf itself."""
    ending: str
    """".weight", ".bias", or "" where the tensor bears the leaf's own name."""
    shape: tuple[int, ...]
    matrix: bool = True
    """Stays in the checkpoint's format; otherwise it is read as a flat float32 vector, whatever its shape."""
    optional: bool = False
    cuts: tuple[Cut | None, Cut | None] = (None, None)
    """Of the tensor, which part of its first and of its second dimension `shape` is; None: all."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the tensor before it is cut."""
        return tuple(n if cut is None else cut.whole for n, cut in zip(self.shape, (*self.cuts, None), strict=False))


Value = Stored | F32
"""What fills a need: a matrix as stored, or a vector."""


class Layer:
    """A part of a model; its attributes that are layers (or lists of them) are its children."""

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
        """(path, leaf) of every leaf below, e.g. ("blocks.0.attn.qkv", Linear(…)), in order of attributes."""
        for name, value in vars(self).items():
            children = enumerate(value) if isinstance(value, list) else [("", value)]
            for index, child in children:
                if isinstance(child, Layer):
                    path = f"{prefix}{name}" + (f".{index}" if isinstance(value, list) else "")
                    if isinstance(child, Leaf):
                        yield path, child
                    else:
                        yield from child.leaves(path + ".")

    def split(self, rank: Rank) -> None:
        """Become the part of one rank, before the tensors are loaded. What no layer divides, every rank has in whole.
        Raises SplitError."""
        for value in vars(self).values():
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, Layer):
                    child.split(rank)


class Leaf(Layer):
    """A layer with tensors of its own."""

    def needs(self) -> list[Need]:
        """Its tensors. Those with the same prefix of `part` and the same ending may come as one, stacked in order."""
        raise NotImplementedError

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        """Take the tensors, in the order of `needs` (optional ones only where the checkpoint has them); each is read
        when it is asked for. `style` is the checkpoint's: "hf" or "gguf"."""
        raise NotImplementedError


def matrices(values: Iterable[tuple[Need, Value]]) -> list[Stored]:
    return [cast(Stored, value) for need, value in values if need.matrix]


def in_order(values: Iterable[tuple[Need, Value]]) -> list[Stored]:
    """The matrices, for operations that take their input as it is: a format's order of columns is undone."""
    return [quant.in_order(stored) for stored in matrices(values)]


def vectors(values: Iterable[tuple[Need, Value]]) -> list[F32]:
    return [cast(F32, value) for need, value in values if not need.matrix]


class Linear(Leaf):
    """scale * (x @ W^T (+ bias)) (+ residual), W [sum of parts, n_in].

    `parts` names the row blocks of W in order ({"q": 576, "k": 192, "v": 192}); {"": n} is a plain matrix.
    `bias`: True, False, or None (where the checkpoint has one).
    """

    weight: Weight
    bias: Vector | None = None

    def __init__(self, n_in: int, parts: Mapping[str, int], bias: bool | None = False, scale: float = 1.0):
        self.n_in = n_in
        self.parts = dict(parts)
        self.biased = bias
        self.scale = scale
        self.rows: dict[str, Cut] = {}
        self.columns: Cut | None = None
        self.summed = self.silent = False

    def by_rows(self, **cuts: Cut) -> None:
        """Keep a cut of each part's rows (the part "" is called `whole`)."""
        self.rows = {"" if part == "whole" else part: cut for part, cut in cuts.items()}
        self.parts = {part: self.rows[part].size for part in self.parts}

    def by_columns(self, cut: Cut, rank: Rank) -> None:
        """Keep a cut of the columns: the output is a part of a sum, to which one rank adds bias and residual."""
        self.n_in, self.columns = cut.size, cut
        self.summed, self.silent = True, not rank.first

    def needs(self) -> list[Need]:
        rows = [
            Need(part, ".weight", (n, self.n_in), cuts=(self.rows.get(part), self.columns))
            for part, n in self.parts.items()
        ]
        if self.biased is not False:
            optional = self.biased is None
            rows += [
                Need(part, ".bias", (n,), False, optional, (self.rows.get(part), None))
                for part, n in self.parts.items()
            ]
        return rows

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        read = list(values)
        self.weight = device.weight(matrices(read))
        biases = vectors(read)
        if biases and not self.silent:
            self.bias = device.vector(np.concatenate(biases))

    def __call__(self, ops: Ops, x: Array, residual: Array | None = None) -> Array:
        out = ops.linear(x, self.weight, self.bias, None if self.silent else residual, self.scale)
        return ops.reduce(out) if self.summed else out


class GatedLinear(Linear):
    """activation(x @ gate^T) * (x @ up^T): the first half of a gated MLP (Shazeer, "GLU variants", 2020)."""

    def __init__(self, n_in: int, n: int, activation: Activation, bias: bool | None = False):
        super().__init__(n_in, {"gate": n, "up": n}, bias)
        self.activation = activation

    def __call__(self, ops: Ops, x: Array, residual: Array | None = None) -> Array:
        return ops.gated(x, self.weight, self.activation, self.bias)


class Headwise(Leaf):
    """Each head's part of x, n_in wide, times a matrix [n, n_in] of its own; W is [heads * n, n_in]."""

    weight: Weight

    def __init__(self, heads: int, n_in: int, n: int):
        self.heads, self.n_in, self.n = heads, n_in, n
        self.rows: Cut | None = None

    def by_heads(self, cut: Cut) -> None:
        """Keep a cut of the heads."""
        self.heads, self.rows = cut.size, cut.of_parts(self.n)

    def needs(self) -> list[Need]:
        return [Need("", ".weight", (self.heads * self.n, self.n_in), cuts=(self.rows, None))]

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        self.weight = device.weight(in_order(values))

    def __call__(self, ops: Ops, x: Array) -> Array:
        return ops.headwise(x, self.weight, self.heads)


class Embedding(Leaf):
    """Rows of a table [vocab, width], times `scale`; the same table serves as the head of a tied model."""

    weight: Weight

    def __init__(self, vocab: int, width: int, scale: float = 1.0):
        self.vocab = vocab
        self.width = width
        self.scale = scale

    def needs(self) -> list[Need]:
        return [Need("", ".weight", (self.vocab, self.width))]

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        self.weight = device.weight(in_order(values))

    def __call__(self, ops: Ops, batch: Any) -> Array:
        return ops.embed(batch, self.weight, self.scale)


class Positions(Embedding):
    """Learned embeddings of positions: row position + `offset` of a table with `count` rows, added to x."""

    def __init__(self, count: int, width: int, offset: int = 0):
        super().__init__(count, width)
        self.offset = offset

    def add(self, ops: Ops, batch: Any, x: Array) -> Array:
        return ops.embed_positions(batch, self.weight, self.offset, x)


class Values(Leaf):
    """A float32 vector that a layer hands to an operation (sinks, a router's correction)."""

    weight: Vector

    def __init__(self, *shape: int):
        self.shape = shape
        self.cut: Cut | None = None

    def by_elements(self, cut: Cut) -> None:
        """Keep a cut of a vector."""
        self.shape, self.cut = (cut.size,), cut

    def needs(self) -> list[Need]:
        return [Need("", "", self.shape, matrix=False, cuts=(self.cut, None))]

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        self.weight = device.vector(vectors(values)[0])
