"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

import numpy as np

from octavo.layers.linear import Layer, Leaf, Linear, Need, Value, Values, matrices, vectors
from octavo.layers.mlp import GatedMLP
from octavo.ops.contract import F32, Activation, Array, Device, Ops, Router, Vector, Weight
from octavo.parallel.rank import Cut, Rank


class ExpertsError(ValueError):
    """A router cannot choose as the config says."""


class Experts(Leaf):
    """The same matrix in each of `count` experts: W_e [sum of parts, n_in]. Parts are named "e.part", or "e" where
    `parts` is {"": n}."""

    weights: tuple[Weight, ...]
    bias: Vector | None = None

    def __init__(self, count: int, n_in: int, parts: Mapping[str, int], bias: bool = False):
        self.count = count
        self.n_in = n_in
        self.parts = dict(parts)
        self.biased = bias
        self.rows: Cut | None = None
        self.columns: Cut | None = None
        self.silent = False

    def by_rows(self, cut: Cut) -> None:
        """Keep a cut of each part's rows."""
        self.rows = cut
        self.parts = dict.fromkeys(self.parts, cut.size)

    def by_columns(self, cut: Cut, rank: Rank) -> None:
        """Keep a cut of the columns; one rank has the bias."""
        self.n_in, self.columns, self.silent = cut.size, cut, not rank.first

    def needs(self) -> list[Need]:
        names = [(f"{e}.{part}" if part else f"{e}", n) for e in range(self.count) for part, n in self.parts.items()]
        rows = [Need(name, ".weight", (n, self.n_in), cuts=(self.rows, self.columns)) for name, n in names]
        if self.biased:
            rows += [Need(name, ".bias", (n,), False, cuts=(self.rows, None)) for name, n in names]
        return rows

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        weights: list[Weight] = []
        biases: list[F32] = []
        for (matrix, _), expert in groupby(values, lambda v: (v[0].matrix, v[0].part.partition(".")[0])):
            if matrix:  # packed with no more than the next one read
                weights.append(device.weight(matrices(expert)))
            else:
                biases += vectors(expert)
        self.weights = tuple(weights)
        if self.biased and not self.silent:
            self.bias = device.vector(np.concatenate(biases))


def _check(router: Router, experts: int, inner: int) -> None:
    """That there are the experts and groups of experts that a token shall pass. Raises ExpertsError."""
    k, groups, top = router.top_k, router.groups, router.top_groups
    if experts < 1:
        raise ExpertsError("the config has no number of experts (num_experts or the family's word for it)")
    if inner < 1:
        raise ExpertsError(f"the config gives experts an inner size of {inner}")
    if not 0 < k <= experts:
        raise ExpertsError(f"the config has {experts} experts and lets each token pass {k} of them")
    if groups > 1 and (experts % groups or not 0 < top <= groups or k > top * (experts // groups)):
        raise ExpertsError(
            f"the config has {experts} experts in {groups} groups (n_group) and takes {k} from the best {top} "
            "(topk_group): groups must be of one size, and those taken from have as many experts as are taken"
        )
    if groups > 1 and router.group_score == "top2" and experts // groups < 2:
        raise ExpertsError(f"the config has {groups} groups (n_group) of one expert: two are needed to rank a group")


class MoE(Layer):
    """Gated experts behind a router, and where `shared` > 0 a gated MLP of that inner size that every token passes.

    `correction`: the router has a vector that is added for the choice only. `shared_gate`: the shared expert is
    multiplied by the sigmoid of a linear function of x; `shared_scale` multiplies it too. `bias`: of the experts;
    `router_bias`: of the router. `limit`: see `Ops.gated`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        router: Router,
        activation: Activation,
        *,
        shared: int = 0,
        shared_gate: bool = False,
        shared_scale: float = 1.0,
        correction: bool = False,
        bias: bool = False,
        router_bias: bool = False,
        limit: float = 0.0,
    ):
        _check(router, experts, inner)
        self.rule = router
        self.activation = activation
        self.limit = limit
        self.router = Linear(hidden, {"": experts}, router_bias)
        self.correction = Values(experts) if correction else None
        self.gate_up = Experts(experts, hidden, {"gate": inner, "up": inner}, bias)
        self.down = Experts(experts, inner, {"": hidden}, bias)
        self.shared = GatedMLP(hidden, shared, activation, scale=shared_scale) if shared else None
        self.shared_gate = Linear(hidden, {"": 1}) if shared_gate else None
        self.rank = Rank(0, 1)

    def split(self, rank: Rank) -> None:
        inner = rank.share(self.down.n_in, "elements of an expert's inner width")
        self.gate_up.by_rows(inner)
        self.down.by_columns(inner, rank)
        if self.shared is not None:
            self.shared.split(rank)
        self.rank = rank

    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        if self.shared is not None and self.shared_gate is None:
            residual = self.shared(ops, x, residual)
        elif self.shared is not None and self.shared_gate is not None:
            residual = ops.blend(self.shared(ops, x, None), self.shared_gate(ops, x), residual)
        out = ops.moe(
            x,
            self.router(ops, x),
            self.gate_up.weights,
            self.down.weights,
            self.rule,
            self.activation,
            correction=self.correction.weight if self.correction else None,
            gate_up_bias=self.gate_up.bias,
            down_bias=self.down.bias,
            limit=self.limit,
            residual=residual if self.rank.first else None,
        )
        return ops.reduce(out) if self.rank.count > 1 else out
