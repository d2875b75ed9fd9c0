"""What Gemma 3n has in place of one residual stream: alternating updates, and learned augmented residuals."""

from __future__ import annotations

from octavo.layers.linear import Layer, Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.contract import Array, Ops

Streams = tuple[Array, ...]


class AltUp(Layer):
    """A token has `count` streams of hidden rows; a layer computes number `active`, and what all become is predicted
    before and corrected after it by mixtures whose coefficients depend on the token (Baykal et al., "Alternating
    updates for efficient transformers", 2023)."""

    def __init__(self, hidden: int, count: int, active: int, eps: float):
        self.active = active
        self.norm = RMSNorm(hidden, eps)
        self.router = Linear(hidden, {"": count}, scale=1 / hidden)
        self.prediction = Linear(count, {"": count * count})
        self.correction = Linear(count, {"": count})

    def predict(self, ops: Ops, streams: Streams) -> Streams:
        """Each stream plus a mixture of all."""
        coefficients = self.prediction(ops, self._modalities(ops, streams[self.active]))
        count = len(streams)
        return tuple(ops.mix(coefficients, j * count, streams, stream) for j, stream in enumerate(streams))

    def correct(self, ops: Ops, predicted: Streams, computed: Array) -> Streams:
        """Each prediction plus (1 + its coefficient) times by what the computed stream differs from the predicted."""
        coefficients = self.correction(ops, self._modalities(ops, computed))
        active = predicted[self.active]
        difference = ops.add(computed, ops.add(active, active, -0.5))
        return tuple(
            ops.mix(coefficients, j, (difference,), ops.add(stream, difference)) for j, stream in enumerate(predicted)
        )

    def _modalities(self, ops: Ops, x: Array) -> Array:
        """[T, count]"""
        return ops.activate(self.router(ops, self.norm(ops, x)), "tanh")


class Laurel(Layer):
    """x + norm(right(left(x))), of low rank (Menghani et al., "LAuReL: learned augmented residual layer", 2024)."""

    def __init__(self, hidden: int, rank: int, eps: float):
        self.left = Linear(hidden, {"": rank})
        self.right = Linear(rank, {"": hidden})
        self.norm = RMSNorm(hidden, eps)

    def __call__(self, ops: Ops, x: Array) -> Array:
        return self.norm(ops, self.right(ops, self.left(ops, x)), residual=x)
