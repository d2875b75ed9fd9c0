"""Leaves of a model: the layers that own tensors. A leaf is made with its shape and filled once by the loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.ops.contract import Activation, Array, Ops, Vector, Weight


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


class Leaf(Layer):
    """A layer with tensors of its own."""


class Linear(Leaf):
    """x @ W^T (+ bias) (+ residual), W [sum of parts, n_in].

    `parts` names the row blocks of W in order ({"q": 576, "k": 192, "v": 192}); {"": n} is a plain matrix.
    `bias`: True, False, or None (where the checkpoint has one).
    """

    weight: Weight
    bias: Vector | None = None

    def __init__(self, n_in: int, parts: Mapping[str, int], bias: bool | None = False):
        self.n_in = n_in
        self.parts = dict(parts)
        self.biased = bias

    def __call__(self, ops: Ops, x: Array, residual: Array | None = None) -> Array:
        return ops.linear(x, self.weight, self.bias, residual)


class GatedLinear(Linear):
    """activation(x @ gate^T) * (x @ up^T): the first half of a gated MLP (Shazeer, "GLU variants", 2020)."""

    def __init__(self, n_in: int, n: int, activation: Activation):
        super().__init__(n_in, {"gate": n, "up": n})
        self.activation = activation

    def __call__(self, ops: Ops, x: Array, residual: Array | None = None) -> Array:
        return ops.gated(x, self.weight, self.activation)


class Embedding(Leaf):
    """Rows of a table [vocab, width], times `scale`; the same table serves as the head of a tied model."""

    weight: Weight

    def __init__(self, vocab: int, width: int, scale: float = 1.0):
        self.vocab = vocab
        self.width = width
        self.scale = scale

    def __call__(self, ops: Ops, batch: Any) -> Array:
        return ops.embed(batch, self.weight, self.scale)


class RMSNorm(Leaf):
    """Zhang and Sennrich, "Root mean square layer normalization" (2019).

    `plus_one`: the checkpoint stores w - 1 (Gemma in the Hugging Face layout).
    """

    weight: Vector

    def __init__(self, width: int, eps: float, plus_one: bool = False):
        self.width = width
        self.eps = eps
        self.plus_one = plus_one

    def __call__(self, ops: Ops, x: Array, residual: Array | None = None) -> Array:
        return ops.norm(x, self.weight, self.eps, residual)
