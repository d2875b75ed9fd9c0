"""Norms over the width of an activation, or over heads inside an attention layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from octavo.layers.linear import Leaf, Need, Value, vectors
from octavo.ops.contract import Array, Device, HeadNorm, Ops, Vector
from octavo.parallel.rank import Cut


class Norm(Leaf):
    """(x - mean where `center`) / sqrt(mean square + eps) * weight (+ bias).

    `plus_one`: the checkpoint stores w - 1 (Gemma and Nemotron in the Hugging Face layout). `learned` False: there is
    no weight. `shape`: of the weight in the checkpoint, where it is not [width].
    """

    weight: Vector
    bias: Vector | None = None
    center = False

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        plus_one: bool = False,
        learned: bool = True,
        bias: bool | None = False,
        shape: tuple[int, ...] = (),
    ):
        self.width = width
        self.eps = eps
        self.plus_one = plus_one
        self.learned = learned
        self.biased = bias
        self.shape = shape or (width,)
        self.cuts: tuple[Cut | None, Cut | None] = (None, None)

    def by_heads(self, cut: Cut, head_dim: int) -> None:
        """Keep a cut of the heads of a weight that has one row per head."""
        if len(self.shape) == 2:
            self.shape, self.cuts = (cut.size, head_dim), (cut, None)
        else:
            elements = cut.of_parts(head_dim)
            self.shape, self.cuts = (elements.size,), (elements, None)
        self.width = cut.size * head_dim

    def needs(self) -> list[Need]:
        if not self.learned:
            return []
        rows = [Need("", ".weight", self.shape, matrix=False, cuts=self.cuts)]
        if self.biased is not False:
            rows.append(Need("", ".bias", self.shape, False, self.biased is None, self.cuts))
        return rows

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        weight, *bias = vectors(values) or [np.ones(self.width, np.float32)]
        if self.plus_one and style == "hf":
            weight = weight + np.float32(1)
        self.weight = device.vector(weight)
        if bias:
            self.bias = device.vector(bias[0])

    def __call__(self, ops: Ops, x: Array, residual: Array | None = None) -> Array:
        return ops.norm(x, self.weight, self.eps, residual, bias=self.bias, center=self.center)

    def of_heads(self, over: Literal["head", "all"], after: bool) -> HeadNorm:
        """The same norm for queries, keys or values inside an attention layer."""
        return HeadNorm(self.weight, self.eps, over, self.center, after)


class RMSNorm(Norm):
    """Zhang and Sennrich, "Root mean square layer normalization" (2019)."""


class LayerNorm(Norm):
    """Ba, Kiros and Hinton, "Layer normalization" (2016)."""

    center = True
