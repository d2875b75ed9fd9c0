"""Feed-forward layers."""

from __future__ import annotations

from statistics import NormalDist

from octavo.layers.linear import GatedLinear, Layer, Linear
from octavo.ops.contract import Activation, Array, Ops
from octavo.parallel.rank import Rank


class GatedMLP(Layer):
    """scale * down(activation(gate(x)) * up(x)) (+ residual). `bias` is on all three."""

    def __init__(
        self, hidden: int, inner: int, activation: Activation, *, bias: bool | None = False, scale: float = 1.0
    ):
        self.gate_up = GatedLinear(hidden, inner, activation, bias)
        self.down = Linear(inner, {"": hidden}, bias, scale)

    def split(self, rank: Rank) -> None:
        inner = rank.share(self.down.n_in, "elements of the MLP's inner width")
        self.gate_up.by_rows(gate=inner, up=inner)
        self.down.by_columns(inner, rank)

    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        return self.down(ops, self.gate_up(ops, x), residual)


class PlainMLP(Layer):
    """down(activation(up(x))) (+ residual). `bias` is on both."""

    def __init__(self, hidden: int, inner: int, activation: Activation, *, bias: bool | None = True):
        self.up = Linear(hidden, {"": inner}, bias)
        self.activation = activation
        self.down = Linear(inner, {"": hidden}, bias)

    def split(self, rank: Rank) -> None:
        inner = rank.share(self.down.n_in, "elements of the MLP's inner width")
        self.up.by_rows(whole=inner)
        self.down.by_columns(inner, rank)

    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        return self.down(ops, ops.activate(self.up(ops, x), self.activation), residual)


class SparseMLP(Layer):
    """down(activation(the largest of gate(x)) * up(x)) (+ residual); `sparsity` is the share of the others, were they
    normal (Gemma 3n). Which are the largest depends on the whole row: every rank has all of it."""

    def __init__(self, hidden: int, inner: int, activation: Activation, sparsity: float):
        self.gate = Linear(hidden, {"": inner})
        self.up = Linear(hidden, {"": inner})
        self.down = Linear(inner, {"": hidden})
        self.activation = activation
        self.deviations = NormalDist().inv_cdf(sparsity)

    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        kept = ops.keep_top(self.gate(ops, x), self.deviations)
        return self.down(ops, ops.activate(kept, self.activation, times=self.up(ops, x)), residual)
