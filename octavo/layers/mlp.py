"""Feed-forward layers."""

from __future__ import annotations

from octavo.layers.linear import GatedLinear, Layer, Linear
from octavo.ops.contract import Activation, Array, Ops


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, activation: Activation):
        self.gate_up = GatedLinear(hidden, inner, activation)
        self.down = Linear(inner, {"": hidden})

    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        return self.down(ops, self.gate_up(ops, x), residual)
