"""embed, linear, gated, logits, norm and gather on every device, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.quant import KINDS, dense
from tests.ops import truth
from tests.ops.harness import DEVICES, ROWS, UNIT, Pages, Span, compile_op, device, f32, random_stored, rowwise

pytestmark = pytest.mark.parametrize("name", DEVICES)

SHAPES = ((64, 48), (256, 80), (576, 1), (576, 192), (1536, 33))
"""(n_in, n_out), some n_out no multiple of any tile."""


def _random(rows: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
def test_linear(name: str, n_in: int, n_out: int) -> None:
    dev, x, w = device(name), _random(100, n_in), _random(n_out, n_in, 1)
    weight = dev.weight([f32(w)])
    for rows in ROWS:
        got = rowwise(dev, lambda ops, batch, x: ops.linear(x, weight), n_out, x[:rows])
        truth.assert_within(got, truth.linear(x[:rows], w))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_of_every_kind(name: str, kind: str) -> None:
    dev, x = device(name), _random(33, 512)
    stored = random_stored(kind, 83, 512, np.random.default_rng(2))
    weight = dev.weight([stored])
    assert (weight.n_out, weight.n_in) == (83, 512)
    for rows in (1, 5, 33):
        got = rowwise(dev, lambda ops, batch, x: ops.linear(x, weight), 83, x[:rows])
        truth.assert_within(got, truth.linear(x[:rows], dense(stored)))


@pytest.mark.parametrize("kind", KINDS)
def test_embed_of_every_kind(name: str, kind: str) -> None:
    """The row is the format's own value times the scale: one float32 product, so exact."""
    dev = device(name)
    stored = random_stored(kind, 83, 512, np.random.default_rng(3))
    table, pages = dev.weight([stored]), Pages(2, 64)
    model = compile_op(dev, lambda ops, batch: ops.embed(batch, table, 22.627417), 512, pages)
    ids = [82, 0, 7, 7, 31, 32, 33]
    got = model.raw_logits(pages.step([Span(1, 5, ids), Span(0, 0, [64])]))
    assert np.array_equal(got, dense(stored)[[*ids, 64]] * np.float32(22.627417))


def test_parts_of_different_kinds_are_stacked(name: str) -> None:
    dev, x, rng = device(name), _random(8, 256), np.random.default_rng(4)
    parts = [random_stored(kind, n, 256, rng) for kind, n in (("Q4_K", 40), ("Q6_K", 24), ("F32", 24), ("Q8_0", 3))]
    weight = dev.weight(parts)
    assert weight.n_out == 91
    got = rowwise(dev, lambda ops, batch, x: ops.linear(x, weight), 91, x)
    truth.assert_within(got, truth.linear(x, np.concatenate([dense(part) for part in parts])))


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_linear_adds_bias_and_residual(name: str, rows: int) -> None:
    dev, x, w, b, r = device(name), _random(rows, 96), _random(80, 96, 1), _random(1, 80, 2)[0], _random(rows, 80, 3)
    weight, bias, other = dev.weight([f32(w)]), dev.vector(b), dev.weight([f32(r)])
    value, bound = truth.linear(x, w)
    slack = 4 * UNIT * (np.abs(value) + np.abs(b) + np.abs(r))
    for with_bias, with_residual in ((True, False), (False, True), (True, True)):

        def op(ops: Any, batch: Any, x: Any, bias_on: bool = with_bias, residual_on: bool = with_residual) -> Any:
            residual = ops.embed(batch, other, 1.0) if residual_on else None
            return ops.linear(x, weight, bias if bias_on else None, residual)

        wanted = value + with_bias * b.astype(np.float64) + with_residual * r.astype(np.float64)
        truth.assert_within(rowwise(dev, op, 80, x), (wanted, bound + slack))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_gated(name: str, activation: Any, rows: int) -> None:
    dev, x, w = device(name), _random(rows, 96), _random(2 * 72, 96, 1)
    weight = dev.weight([f32(w[:72]), f32(w[72:])])
    (gate, gate_bound), (up, up_bound) = truth.linear(x, w[:72]), truth.linear(x, w[72:])
    value, bound = truth.activate(gate, activation)
    # No activation here is steeper than 1.13.
    bound = (bound + 1.13 * gate_bound) * np.abs(up) + np.abs(value) * (up_bound + 2 * UNIT * np.abs(up))
    got = rowwise(dev, lambda ops, batch, x: ops.gated(x, weight, activation), 72, x)
    truth.assert_within(got, (value * up, bound))


def test_gated_of_large_inputs_stays_finite(name: str) -> None:
    """silu(-1000) is 0 and silu(1000) is 1000, whatever exp does; tanh may not overflow either."""
    dev = device(name)
    weight = dev.weight([f32(np.eye(32)), f32(np.eye(32))])
    x = np.zeros((3, 32), np.float32)
    x[0, 0], x[1, 0], x[2, 0] = -1000, 1000, -90
    for activation in ("silu", "gelu_tanh", "gelu", "relu"):

        def op(ops: Any, batch: Any, x: Any, kind: Any = activation) -> Any:
            return ops.gated(x, weight, kind)

        got = rowwise(dev, op, 32, x)
        assert np.allclose(got[:, 0], [0, 1e6, 0], rtol=1e-6, atol=1e-6), activation
        assert not got[:, 1:].any()


@pytest.mark.parametrize("width", [32, 64, 576, 640])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_norm(name: str, width: int, rows: int) -> None:
    dev, x, w, r = device(name), _random(rows, width) * 3, _random(1, width, 1)[0], _random(rows, width, 2)
    weight, other = dev.vector(w), dev.weight([f32(r)])
    value, bound = truth.norm(x, w, 1e-5)
    truth.assert_within(rowwise(dev, lambda ops, batch, x: ops.norm(x, weight, 1e-5), width, x), (value, bound))
    got = rowwise(dev, lambda ops, batch, x: ops.norm(x, weight, 1e-5, ops.embed(batch, other, 1.0)), width, x)
    truth.assert_within(got, (value + r, bound + 2 * UNIT * (np.abs(value) + np.abs(r))))


def test_norm_of_zero_and_of_tiny_rows(name: str) -> None:
    dev, weight = device(name), np.full(64, 2, np.float32)
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-6
    vector = dev.vector(weight)
    got = rowwise(dev, lambda ops, batch, x: ops.norm(x, vector, 1e-6), 64, x)
    truth.assert_within(got, truth.norm(x, weight, 1e-6))


@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (30.0, 1.0), (0.0, 0.25), (5.0, 2.0)])
def test_logits(name: str, softcap: float, scale: float) -> None:
    dev, x, w = device(name), _random(33, 64), _random(300, 64, 1)
    table, weight, pages = dev.weight([f32(x)]), dev.weight([f32(w)]), Pages(1, 64)
    model = dev.compile(
        lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
        lambda ops, x: ops.logits(x, weight, softcap, scale),
        pages.limits(64),
        dev.kv_cache(pages.spec(1, 32)),
    )
    value, bound = truth.linear(x, w)
    value, bound = scale * value, scale * bound + 2 * UNIT * np.abs(scale * value)
    if softcap:
        value = softcap * np.tanh(value / softcap)
        bound = bound + 8 * UNIT * softcap
    for rows in (1, 2, 5, 33):
        truth.assert_within(model.raw_logits(pages.step([Span(0, 0, range(rows))])), (value[:rows], bound[:rows]))


def test_gather_takes_the_rows_asked_for(name: str) -> None:
    dev, x, pages = device(name), _random(40, 64), Pages(3, 64)
    table = dev.weight([f32(x)])
    model = compile_op(dev, lambda ops, batch: ops.embed(batch, table, 1.0), 64, pages)
    spans = [Span(2, 0, range(10)), Span(0, 30, [11]), Span(1, 3, range(20, 40))]
    assert np.array_equal(model.raw_logits(pages.step(spans, [0, 9, 10, 10, 30])), x[[0, 9, 11, 11, 39]])
    assert model.raw_logits(pages.step(spans, [])).shape == (0, 64)
