"""Mixtures of experts: routing by hand, values against float64, and equal bits to the parts they are made of."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.recorder import EXPERT_ROWS, Activations
from octavo.layers.views import take_rows
from octavo.ops.contract import F32, Device, Router
from tests.ops import truth
from tests.ops.harness import (
    DEVICES,
    INVARIANT,
    ROWS,
    UNIT,
    Pages,
    Span,
    compile_op,
    device,
    f32,
    random_stored,
    routes,
    rowwise,
)


def _random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


LOG = np.log
"""The softmax of logs is a share of the sum; the sigmoid of log a is a / (1 + a)."""

BY_HAND: dict[str, tuple[Router, Any, Any, dict[int, float]]] = {
    "softmax": (Router(2), LOG([1, 4, 2, 8]), None, {3: 8 / 15, 1: 4 / 15}),
    "softmax of all": (Router(4), LOG([1, 4, 2, 8]), None, {3: 8 / 15, 1: 4 / 15, 2: 2 / 15, 0: 1 / 15}),
    "ties go to the lower id": (Router(2), LOG([2, 4, 4, 4]), None, {1: 4 / 14, 2: 4 / 14}),
    "all tied": (Router(3), [7, 7, 7, 7, 7], None, {0: 0.2, 1: 0.2, 2: 0.2}),
    "renormalize": (Router(2, renormalize=True), LOG([1, 4, 2, 8]), None, {3: 8 / 12, 1: 4 / 12}),
    "eps": (Router(2, renormalize=True, eps=0.2), LOG([1, 4, 2, 8]), None, {3: 8 / 15, 1: 4 / 15}),
    "floor": (Router(2, renormalize=True, floor=2.0), LOG([1, 4, 2, 8]), None, {3: 4 / 15, 1: 2 / 15}),
    "floor below the sum": (Router(2, renormalize=True, floor=0.5), LOG([1, 4, 2, 8]), None, {3: 8 / 12, 1: 4 / 12}),
    "scale": (Router(1, scale=2.5), LOG([1, 4, 2, 8]), None, {3: 20 / 15}),
    "scale of shares": (Router(2, renormalize=True, scale=2.5), LOG([1, 4, 2, 8]), None, {3: 20 / 12, 1: 10 / 12}),
    "sigmoid": (Router(2, "sigmoid"), LOG([1 / 3, 1, 3, 1 / 9]), None, {2: 0.75, 1: 0.5}),
    "sigmoid, tied": (Router(2, "sigmoid"), [-1, 0, 0, 0], None, {1: 0.5, 2: 0.5}),
    "sigmoid, shares": (Router(2, "sigmoid", True), LOG([1 / 3, 1, 3, 1 / 9]), None, {2: 0.6, 1: 0.4}),
    "a correction counts for the choice only": (
        Router(2, "sigmoid"),
        LOG([1 / 3, 1, 3, 1 / 9]),
        [1, 0, 0, 0],
        {0: 0.25, 2: 0.75},
    ),
    "tied by the correction": (Router(1, "sigmoid"), [-1, 0, 0, 0], [-1, 0, 0.25, 0.25], {2: 0.5}),
    # Groups of two: (1, 2) (9, 1) (3, 4) (1, 1).
    "groups by their largest": (
        Router(3, groups=4, top_groups=2),
        LOG([1, 2, 9, 1, 3, 4, 1, 1]),
        None,
        {2: 9 / 22, 5: 4 / 22, 4: 3 / 22},
    ),
    "groups by their two largest": (
        Router(2, "sigmoid", groups=2, group_score="top2"),
        LOG([9, 1 / 9, 1 / 9, 3, 3, 1 / 9]),  # 0.9 + 0.1 against 0.75 + 0.75
        None,
        {3: 0.75, 4: 0.75},
    ),
    "the same groups by their largest": (
        Router(2, "sigmoid", groups=2),
        LOG([9, 1 / 9, 1 / 9, 3, 3, 1 / 9]),
        None,
        {0: 0.9, 1: 0.1},
    ),
    "tied groups": (Router(1, "sigmoid", groups=3, top_groups=1), [-1, 0, 0, -1, 0, 0], None, {1: 0.5}),
    "tied groups below others": (
        Router(2, "sigmoid", groups=3, top_groups=2, renormalize=True),
        [-3, 0, 0, -1, 0, 0],
        None,
        {1: 0.5, 2: 0.5},
    ),
    "sparsemixer": (
        Router(2, "sparsemixer"),
        [2, 1.99, 1, 1.97],
        None,
        {0: 1 / (1 + np.exp(-0.01) + np.exp(-0.03)), 1: 1 / (1 + np.exp(-0.02))},
    ),
    "sparsemixer, tied": (Router(2, "sparsemixer"), [1, 3, 3, 3], None, {1: 1 / 3, 2: 0.5}),
    "sparsemixer of zero and less": (Router(2, "sparsemixer"), [-1, 0, -1, -5], None, {1: 1.0, 0: 0.5}),
    "sparsemixer, wide": (
        Router(2, "sparsemixer", jitter=0.2),
        [1, 2, 1.5, -1],
        None,
        {1: 1 / (1 + np.exp(-0.5)), 2: 1 / (1 + np.exp(-0.5))},
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
@pytest.mark.parametrize("name", DEVICES)
def test_routing_by_hand(name: str, case: str) -> None:
    router, logits, correction, wanted = BY_HAND[case]
    row = np.asarray(logits, np.float32)
    # The same logits in each of three rows, and others between them.
    got = routes(device(name), [row, -row, row, row[::-1], row], router, correction)
    assert {e: w for e, w in enumerate(got[0].tolist()) if w} == pytest.approx(wanted, rel=2e-6)
    assert np.array_equal(got[0], got[2]) and np.array_equal(got[0], got[4])


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    "router",
    [
        Router(0),
        Router(9),
        Router(2, groups=3),
        Router(2, groups=4, top_groups=5),
        Router(3, groups=4, top_groups=1),
        Router(1, groups=8, group_score="top2"),
        Router(1, "sofmax"),  # type: ignore[arg-type]
        Router(1, groups=2, group_score="mean"),  # type: ignore[arg-type]
    ],
)
def test_routers_that_cannot_choose(name: str, router: Router) -> None:
    with pytest.raises(ValueError, match="moe"):
        routes(device(name), _random(2, 8), router)


class _Mixture:
    """Random experts; matrices in float32, [E, n_out, n_in]."""

    def __init__(self, experts: int, width: int, inner: int, out: int) -> None:
        self.gate_up = _random(experts, 2 * inner, width, seed=1) / np.float32(np.sqrt(width))
        self.down = _random(experts, out, inner, seed=2) / np.float32(np.sqrt(inner))
        self.gate_up_bias = _random(experts, 2 * inner, seed=3) / 2
        self.down_bias = _random(experts, out, seed=4) / 2

    def on(self, dev: Device) -> tuple[Any, Any]:
        return tuple(tuple(dev.weight([f32(w)]) for w in ws) for ws in (self.gate_up, self.down))  # type: ignore[return-value]


ROUTERS = {
    "softmax": Router(2),
    "shares": Router(3, renormalize=True, scale=1.5, eps=1e-6),
    "sigmoid": Router(3, "sigmoid", True, groups=4, top_groups=2, group_score="top2", scale=2.5, eps=1e-20),
    "sparsemixer": Router(2, "sparsemixer", jitter=0.1),
    "input": Router(1, "sigmoid", weigh_input=True),
    "inputs": Router(2, "softmax", weigh_input=True),
}


@pytest.mark.parametrize("options", ["plain", "bias", "bias and limit"])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", DEVICES)
def test_moe(name: str, router: str, options: str) -> None:
    dev, rule, mixture = device(name), ROUTERS[router], _Mixture(8, 96, 40, 72)
    x, logits, r = _random(131, 96), _random(131, 8, seed=5) * 2, _random(131, 72, seed=6)
    correction = _random(8, seed=7) / 4 if rule.scoring == "sigmoid" else None
    biased, limit = "bias" in options, 0.6 if "limit" in options else 0.0
    activation: Any = "swiglu_oai" if limit else "gelu_tanh" if biased else "silu"
    table, added, (gate_up, down) = dev.weight([f32(logits)]), dev.weight([f32(r)]), mixture.on(dev)
    vectors = {
        "correction": correction,
        "gate_up_bias": mixture.gate_up_bias if biased else None,
        "down_bias": mixture.down_bias if biased else None,
    }
    given = {key: None if v is None else dev.vector(v.ravel()) for key, v in vectors.items()}
    value, bound = truth.moe(
        x, logits, mixture.gate_up, mixture.down, rule, activation, **vectors, limit=float(np.float32(limit))
    )
    for with_residual in (False, True):

        def op(ops: Any, batch: Any, x: Any, on: bool = with_residual) -> Any:
            scores, residual = ops.embed(batch, table, 1.0), ops.embed(batch, added, 1.0) if on else None
            return ops.moe(x, scores, gate_up, down, rule, activation, **given, limit=limit, residual=residual)

        wanted = value + with_residual * r.astype(np.float64)
        slack = bound + 2 * UNIT * (np.abs(value) + np.abs(r)) * with_residual
        for rows in (1, 5, 131):
            truth.assert_within(rowwise(dev, op, 72, x[:rows]), (wanted[:rows], slack[:rows]))


THREADS = {"reference": (1,), "cpu": (1, 2)}


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("router", ["shares", "sigmoid", "inputs"])
@pytest.mark.parametrize("name", INVARIANT)
def test_a_row_stands_alone(name: str, router: str, kind: str) -> None:
    """The same bits for a row whatever the number of rows and whichever experts they choose."""
    rng, rule = np.random.default_rng(2), ROUTERS[router]
    parts = [
        ([random_stored(kind, 256, 256, rng) for _ in range(2)], random_stored(kind, 83, 256, rng)) for _ in range(8)
    ]
    x, logits = _random(100, 256), _random(100, 8, seed=5) * 2
    whole = None
    for threads in THREADS[name]:
        dev, pages = device(name, threads), Pages(1, 128)
        gate_up, down = (
            tuple(each) for each in zip(*((dev.weight(a), dev.weight([b])) for a, b in parts), strict=True)
        )
        inputs, scores = dev.weight([f32(x)]), dev.weight([f32(logits)])

        def op(ops: Any, batch: Any, i: Any = inputs, s: Any = scores, g: Any = gate_up, d: Any = down) -> Any:
            y = ops.embed(batch, i, 1.0)
            return ops.moe(y, ops.embed(batch, s, 1.0), g, d, rule, "silu")

        model = compile_op(dev, op, 83, pages)
        if whole is None:
            whole = model.raw_logits(pages.step([Span(0, 0, range(100))]))
        for rows in ROWS:
            picked = np.random.default_rng(rows).permutation(100)[:rows]
            got = model.raw_logits(pages.step([Span(0, 0, picked.tolist())]))
            assert np.array_equal(got.view(np.uint32), whole[picked].view(np.uint32)), f"{rows} rows differ"


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("activations", get_args(Activations))
@pytest.mark.parametrize("kind", ["Q4_0", "INT4_128"])
def test_experts_with_columns_in_orders_of_their_own(kind: str, activations: Activations, weigh_input: bool) -> None:
    """The same bits as of matrices in order: of the gate's and up's input in their order, and of gate and up rows in
    that of down. An expert may have its columns in order."""
    rng, dev, pages, rule = (
        np.random.default_rng(3),
        CpuDevice(2, activations),
        Pages(1, 128),
        Router(2, weigh_input=weigh_input),
    )
    first = rng.permutation(256).astype(np.int32)
    x, logits = _random(100, 256), _random(100, 6, seed=5) * 2
    moved, ordered = [], []
    for e in range(6):
        gate, up = random_stored(kind, 128, 256, rng), random_stored(kind, 128, 256, rng)
        down, then = random_stored(kind, 83, 128, rng), rng.permutation(128).astype(np.int32)
        columns = then if e else None
        gates = [matrix._replace(columns=first) for matrix in (gate, up)]
        moved.append((dev.weight(gates), dev.weight([down._replace(columns=columns)])))
        rows = then if e else np.arange(128)
        ordered.append((dev.weight([take_rows(matrix, rows) for matrix in (gate, up)]), dev.weight([down])))
    assert {k for pair in moved for w in pair for k in w.kinds} == {kind}, "nothing is expanded"
    results = []
    for pairs, given in ((moved, x), (ordered, x[:, first])):
        inputs, scores = dev.weight([f32(np.ascontiguousarray(given))]), dev.weight([f32(logits)])
        gate_up, downs = (tuple(each) for each in zip(*pairs, strict=True))

        def op(ops: Any, batch: Any, i: Any = inputs, s: Any = scores, g: Any = gate_up, d: Any = downs) -> Any:
            return ops.moe(ops.embed(batch, i, 1.0), ops.embed(batch, s, 1.0), g, d, rule, "silu")

        model = compile_op(dev, op, 83, pages)
        results.append([model.raw_logits(pages.step([Span(0, 0, range(n))])) for n in (1, 5, 33, 100)])
    for got, want in zip(*results, strict=True):
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    for some in results[0]:
        assert np.array_equal(some.view(np.uint32), results[0][-1][: len(some)].view(np.uint32))


def test_many_rows_go_through_in_passes() -> None:
    """The rows of a long step, more than go through at a time and more than a work item has of one expert."""
    dev, mixture, rows = CpuDevice(2), _Mixture(4, 32, 32, 40), 2 * EXPERT_ROWS + 77
    x, logits = _random(rows, 32), _random(rows, 4, seed=5)
    logits[100:900, 2] += 9
    table, (gate_up, down), rule = dev.weight([f32(logits)]), mixture.on(dev), Router(2)
    inputs, pages = dev.weight([f32(x)]), Pages(1, rows)

    def op(ops: Any, batch: Any) -> Any:
        return ops.moe(ops.embed(batch, inputs, 1.0), ops.embed(batch, table, 1.0), gate_up, down, rule, "silu")

    model = compile_op(dev, op, 40, pages)
    whole = model.raw_logits(pages.step([Span(0, 0, range(rows))]))
    truth.assert_within(whole, truth.moe(x, logits, mixture.gate_up, mixture.down, rule, "silu"))
    for first in range(0, rows, 97):
        some = range(first, min(first + 97, rows))
        assert np.array_equal(model.raw_logits(pages.step([Span(0, 0, some)])), whole[first : first + 97])


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
def test_a_mixture_equals_its_parts(activations: Activations, weigh_input: bool) -> None:
    """Bit for bit what gated and linear give one expert at a time, weighed and added in router order. Every expert has
    matrices of kinds of its own, so all forms of an activation are in one mixture."""
    dev, rng, router = CpuDevice(2, activations), np.random.default_rng(9), Router(3, renormalize=True)
    router = router._replace(weigh_input=weigh_input)
    kinds = ["Q4_0", "Q8_0", "F16", "Q4_K", "Q6_K", "Q5_1", "F32", "Q5_K", "Q4_1", "Q5_0", "BF16"]
    experts, rows = len(kinds), 60
    gate_up = [
        dev.weight([random_stored(kind, n, 256, rng) for kind, n in ((a, 256), (b, 200), (a, 56))])
        for a, b in zip(kinds, np.roll(kinds, 1).tolist(), strict=True)
    ]
    down = [
        dev.weight(
            [random_stored(kind, 50, 256, rng) for kind in kinds[i : i + 2]]
            if i < 6
            else [random_stored(kind, 100, 256, rng)]
        )
        for i, kind in enumerate(kinds)
    ]
    x, logits = _random(rows, 256), _random(rows, experts, seed=5) * 2
    x[:, 7] *= 50
    first, second = _random(experts, 512, seed=3), _random(experts, 100, seed=4)
    scores, r = dev.weight([f32(logits)]), _random(rows, 100, seed=6)
    residual, biases = dev.weight([f32(r)]), (dev.vector(first.ravel()), dev.vector(second.ravel()))

    def whole(ops: Any, batch: Any, v: Any) -> Any:
        return ops.moe(
            v,
            ops.embed(batch, scores, 1.0),
            tuple(gate_up),
            tuple(down),
            router,
            "silu",
            gate_up_bias=biases[0],
            down_bias=biases[1],
            limit=2.0,
            residual=ops.embed(batch, residual, 1.0),
        )

    got = rowwise(dev, whole, 100, x)
    shares = routes(dev, logits, router._replace(weigh_input=False))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    weights = np.take_along_axis(shares, order, axis=1)
    assert (weights > 0).all()
    streams = np.empty((3, rows, 100), np.float32)
    for e in range(experts):
        for j in range(3):
            chosen = np.flatnonzero(order[:, j] == e)
            if not chosen.size:
                continue
            given = x[chosen] * weights[chosen, j, None] if weigh_input else x[chosen]

            def part(ops: Any, batch: Any, v: Any, e: int = e) -> Any:
                hidden = ops.gated(v, gate_up[e], "silu", dev.vector(first[e]), 2.0)
                return ops.linear(hidden, down[e], dev.vector(second[e]))

            streams[j, chosen] = rowwise(dev, part, 100, given)
    tables = [dev.weight([f32(stream)]) for stream in streams]
    factors = dev.weight([f32(np.ones_like(weights) if weigh_input else weights)])

    def mixed(ops: Any, batch: Any, v: Any) -> Any:
        return ops.mix(ops.embed(batch, factors, 1.0), 0, tuple(ops.embed(batch, t, 1.0) for t in tables), v)

    expected = rowwise(dev, mixed, 100, r)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    dev, mixture, router = device(name), _Mixture(4, 32, 32, 40), Router(2)
    x, logits = _random(9, 32), _random(9, 4, seed=5)
    logits[:, 3] = [-9, 9, -9, -9, -9, -9, 9, -9, -9]
    (gate_up, down), clean = mixture.on(dev), logits.copy()
    x[2, 5], logits[4] = np.nan, np.nan

    def run(scores: F32, rows: F32, gate_up: Any) -> F32:
        table = dev.weight([f32(scores)])
        return rowwise(
            dev, lambda ops, batch, v: ops.moe(v, ops.embed(batch, table, 1.0), gate_up, down, router, "silu"), 40, rows
        )

    broken = (*gate_up[:3], dev.weight([f32(np.full((64, 32), np.nan))]))
    got, wanted = run(logits, x, broken), run(clean, np.nan_to_num(x), gate_up)
    wrong = np.array([False, True, True, False, True, False, True, False, False])  # 1 and 6 chose expert 3
    assert np.isnan(got[wrong]).all()
    np.testing.assert_allclose(got[~wrong], wanted[~wrong], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("logits", "logits is 3 wide, wanted 4"),
        ("down", "4 experts have 3 down projections"),
        ("gate_up", r"an expert of \[32, 32\]"),
        ("correction", "correction is 3 wide, wanted 4"),
        ("down_bias", "down_bias is 40 wide, wanted 160"),
        ("activation", "unknown activation"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong: str, message: str) -> None:
    dev, mixture = CpuDevice(1), _Mixture(4, 32, 32, 40)
    gate_up, down = mixture.on(dev)
    table = dev.weight([f32(_random(2, 3 if wrong == "logits" else 4))])
    if wrong == "gate_up":
        gate_up = (*gate_up[:3], dev.weight([f32(np.zeros((32, 32)))]))
    extra = {"correction": dev.vector(_random(3))} if wrong == "correction" else {}
    if wrong == "down_bias":
        extra["down_bias"] = dev.vector(_random(40))
    activation: Any = "xielu" if wrong == "activation" else "silu"

    def op(ops: Any, batch: Any, v: Any) -> Any:
        scores = ops.embed(batch, table, 1.0)
        return ops.moe(v, scores, gate_up, down[:3] if wrong == "down" else down, Router(2), activation, **extra)

    with pytest.raises(ValueError, match=message):
        rowwise(dev, op, 40, _random(2, 32))
