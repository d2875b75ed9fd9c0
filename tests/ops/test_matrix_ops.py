"""Products, embeddings, norms and activations on every device, against float64."""

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


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_embed_positions(name: str, kind: str) -> None:
    """The row at the token's position, from row `offset` on, plus the residual: one float32 sum, so exact."""
    dev, pages, x = device(name), Pages(2, 64), _random(70, 96)
    stored = random_stored(kind, 66, 96, np.random.default_rng(3))
    table, positions = dev.weight([f32(x)]), dev.weight([stored])
    model = compile_op(
        dev, lambda ops, batch: ops.embed_positions(batch, positions, 2, ops.embed(batch, table, 1.0)), 96, pages
    )
    got = model.raw_logits(pages.step([Span(1, 5, [69, 0, 7]), Span(0, 63, [64])]))
    assert np.array_equal(got, dense(stored)[[7, 8, 9, 65]] + x[[69, 0, 7, 64]])


def test_embed_positions_refuses_a_table_that_is_too_short(name: str) -> None:
    dev, pages, x = device(name), Pages(1, 64), _random(66, 96)
    table = dev.weight([f32(x)])
    with pytest.raises(ValueError, match="positions"):
        model = compile_op(
            dev, lambda ops, batch: ops.embed_positions(batch, table, 3, ops.embed(batch, table, 1.0)), 96, pages
        )
        model.raw_logits(pages.step([Span(0, 63, [0])]))


def test_parts_of_different_kinds_are_stacked(name: str) -> None:
    dev, x, rng = device(name), _random(8, 256), np.random.default_rng(4)
    parts = [random_stored(kind, n, 256, rng) for kind, n in (("Q4_K", 40), ("Q6_K", 24), ("F32", 24), ("Q8_0", 3))]
    weight = dev.weight(parts)
    assert weight.n_out == 91
    got = rowwise(dev, lambda ops, batch, x: ops.linear(x, weight), 91, x)
    truth.assert_within(got, truth.linear(x, np.concatenate([dense(part) for part in parts])))


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_linear_adds_bias_and_residual(name: str, rows: int, scale: float) -> None:
    dev, x, w, b, r = device(name), _random(rows, 96), _random(80, 96, 1), _random(1, 80, 2)[0], _random(rows, 80, 3)
    weight, bias, other = dev.weight([f32(w)]), dev.vector(b), dev.weight([f32(r)])
    value, bound = truth.linear(x, w)
    slack = scale * bound + 4 * UNIT * (scale * (np.abs(value) + np.abs(b)) + np.abs(r))
    for with_bias, with_residual in ((False, False), (True, False), (False, True), (True, True)):

        def op(ops: Any, batch: Any, x: Any, bias_on: bool = with_bias, residual_on: bool = with_residual) -> Any:
            residual = ops.embed(batch, other, 1.0) if residual_on else None
            return ops.linear(x, weight, bias if bias_on else None, residual, scale)

        wanted = float(np.float32(scale)) * (value + with_bias * b.astype(np.float64))
        truth.assert_within(rowwise(dev, op, 80, x), (wanted + with_residual * r.astype(np.float64), slack))


GATES = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "tanh", "identity", "swiglu_oai")


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_gated(name: str, activation: Any, rows: int) -> None:
    dev, x, w = device(name), _random(rows, 96) / 4, _random(2 * 72, 96, 1)
    weight = dev.weight([f32(w[:72]), f32(w[72:])])
    gate, up = truth.linear(x, w[:72]), truth.linear(x, w[72:])
    got = rowwise(dev, lambda ops, batch, x: ops.gated(x, weight, activation), 72, x)
    truth.assert_within(got, truth.gate(gate, up, activation))


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("limit", [0.0, 0.7])
def test_gated_with_bias_and_limit(name: str, activation: Any, limit: float) -> None:
    dev, x, w, b = device(name), _random(9, 96) / 4, _random(2 * 72, 96, 1), _random(1, 2 * 72, 2)[0]
    weight, bias = dev.weight([f32(w)]), dev.vector(b)
    value, bound = truth.linear(x, w)
    value, bound = value + b.astype(np.float64), bound + UNIT * (np.abs(value) + np.abs(b))
    gate, up = (value[:, :72], bound[:, :72]), (value[:, 72:], bound[:, 72:])
    assert (gate[0] > 0.7).any() and (up[0] > 0.7).any() and (up[0] < -0.7).any()
    got = rowwise(dev, lambda ops, batch, x: ops.gated(x, weight, activation, bias, limit), 72, x)
    truth.assert_within(got, truth.gate(gate, up, activation, float(np.float32(limit))))


def test_gated_refuses_what_it_does_not_know(name: str) -> None:
    dev = device(name)
    weight = dev.weight([f32(np.eye(32)), f32(np.eye(32))])
    for activation in ("xielu", "swish"):
        with pytest.raises((ValueError, TypeError)):

            def op(ops: Any, batch: Any, x: Any, kind: Any = activation) -> Any:
                return ops.gated(x, weight, kind)

            rowwise(dev, op, 32, np.ones((1, 32), np.float32))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2", "tanh", "identity", "xielu"])
@pytest.mark.parametrize("with_times", [False, True])
@pytest.mark.parametrize("width", [64, 83])
def test_activate(name: str, activation: Any, with_times: bool, width: int) -> None:
    dev, x, y = device(name), _random(33, width) * 4, _random(33, width, 1)
    x[:3] *= np.float32(1e-3)
    x[5, :4] = 0, -0.0, 30, -30
    parameters = dev.vector(truth.XIELU) if activation == "xielu" else None
    other = dev.weight([f32(y)])

    def op(ops: Any, batch: Any, x: Any) -> Any:
        return ops.activate(x, activation, parameters, ops.embed(batch, other, 1.0) if with_times else None)

    value, bound = truth.activate(x.astype(np.float64), activation)
    if with_times:
        value, bound = value * y, bound * np.abs(y) + UNIT * np.abs(value * y)
    for rows in (1, 4, 33):
        truth.assert_within(rowwise(dev, op, width, x[:rows]), (value[:rows], bound[:rows]))


def test_activate_refuses_what_it_does_not_know(name: str) -> None:
    dev = device(name)
    for activation in ("swiglu_oai", "swish"):
        with pytest.raises(ValueError, match="unknown activation"):

            def op(ops: Any, batch: Any, x: Any, kind: Any = activation) -> Any:
                return ops.activate(x, kind)

            rowwise(dev, op, 32, np.ones((1, 32), np.float32))


def test_gated_of_large_inputs_stays_finite(name: str) -> None:
    """silu(-1000) is 0 and silu(1000) is 1000, whatever exp does; tanh may not overflow either."""
    dev = device(name)
    weight = dev.weight([f32(np.eye(32)), f32(np.eye(32))])
    x = np.zeros((3, 32), np.float32)
    x[0, 0], x[1, 0], x[2, 0] = -1000, 1000, -90
    for activation in ("silu", "gelu_tanh", "gelu", "relu", "swiglu_oai"):

        def op(ops: Any, batch: Any, x: Any, kind: Any = activation) -> Any:
            return ops.gated(x, weight, kind)

        got = rowwise(dev, op, 32, x)
        if activation == "swiglu_oai":  # the partner is one more
            assert np.allclose(got[:, 0], [0, 1000 * 1001, 0], rtol=1e-6, atol=1e-6)
            continue
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


@pytest.mark.parametrize("width", [32, 83, 576])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_layer_norm(name: str, width: int, rows: int) -> None:
    dev, x, w, b, r = device(name), _random(rows, width) + 3, *_random(2, width, 1), _random(rows, width, 2)
    weight, bias, other = dev.vector(w), dev.vector(b), dev.weight([f32(r)])
    value, bound = truth.norm(x, w, 1e-5, center=True)
    got = rowwise(dev, lambda ops, batch, x: ops.norm(x, weight, 1e-5, center=True), width, x)
    truth.assert_within(got, (value, bound))
    bound = bound + 4 * UNIT * (np.abs(value) + np.abs(b) + np.abs(r))
    got = rowwise(dev, lambda ops, batch, x: ops.norm(x, weight, 1e-5, bias=bias, center=True), width, x)
    truth.assert_within(got, (value + b, bound))

    def op(ops: Any, batch: Any, x: Any) -> Any:
        return ops.norm(x, weight, 1e-5, ops.embed(batch, other, 1.0), bias=bias, center=True)

    truth.assert_within(rowwise(dev, op, width, x), (value + b + r, bound))
    value, bound = truth.norm(x, w, 1e-5)
    got = rowwise(dev, lambda ops, batch, x: ops.norm(x, weight, 1e-5, bias=bias), width, x)
    truth.assert_within(got, (value + b, bound + 2 * UNIT * (np.abs(value) + np.abs(b))))


def test_norm_of_zero_and_of_tiny_rows(name: str) -> None:
    dev, weight = device(name), np.full(64, 2, np.float32)
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-6
    vector = dev.vector(weight)
    got = rowwise(dev, lambda ops, batch, x: ops.norm(x, vector, 1e-6), 64, x)
    truth.assert_within(got, truth.norm(x, weight, 1e-6))


@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (30.0, 1.0), (0.0, 0.25), (5.0, 2.0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits(name: str, softcap: float, scale: float, with_bias: bool) -> None:
    dev, x, w, b = device(name), _random(33, 64), _random(300, 64, 1), _random(1, 300, 2)[0]
    table, weight, pages = dev.weight([f32(x)]), dev.weight([f32(w)]), Pages(1, 64)
    bias = dev.vector(b) if with_bias else None
    model = dev.compile(
        lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
        lambda ops, x: ops.logits(x, weight, softcap, scale, bias),
        pages.limits(64),
        dev.kv_cache(pages.spec(1, 32)),
    )
    value, bound = truth.linear(x, w)
    if with_bias:
        value, bound = value + b.astype(np.float64), bound + UNIT * (np.abs(value) + np.abs(b))
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


@pytest.mark.parametrize(("heads", "n_in", "n"), [(1, 64, 8), (4, 96, 40), (7, 32, 72)])
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_headwise(name: str, heads: int, n_in: int, n: int, kind: str) -> None:
    dev, x = device(name), _random(131, heads * n_in)
    stored = random_stored(kind, heads * n, n_in, np.random.default_rng(2))
    weight, blocks = dev.weight([stored]), np.split(dense(stored), heads)
    pairs = [truth.linear(part, block) for part, block in zip(np.split(x, heads, axis=1), blocks, strict=True)]
    value, bound = (np.concatenate(each, axis=1) for each in zip(*pairs, strict=True))
    for rows in (1, 5, 131):
        got = rowwise(dev, lambda ops, batch, x: ops.headwise(x, weight, heads), heads * n, x[:rows])
        truth.assert_within(got, (value[:rows], bound[:rows]))


WIDTHS = pytest.mark.parametrize("width", [64, 83])


@WIDTHS
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_add(name: str, width: int, scale: float) -> None:
    """Two float32 operations, so exact."""
    dev, x, y = device(name), _random(9, width), _random(9, width, 1)
    other = dev.weight([f32(y)])
    got = rowwise(dev, lambda ops, batch, x: ops.add(x, ops.embed(batch, other, 1.0), scale), width, x)
    assert np.array_equal(got, (x + y) * np.float32(scale))


@WIDTHS
def test_blend(name: str, width: int) -> None:
    dev, x, g, r = device(name), _random(9, width), _random(9, 1, 1) * 3, _random(9, width, 2)
    g[3:5] = [[90], [-90]]
    gates, other = dev.weight([f32(g)]), dev.weight([f32(r)])
    value = x / (1 + np.exp(-g.astype(np.float64)))
    bound = 8 * UNIT * np.abs(value)
    got = rowwise(dev, lambda ops, batch, x: ops.blend(x, ops.embed(batch, gates, 1.0)), width, x)
    truth.assert_within(got, (value, bound))

    def op(ops: Any, batch: Any, x: Any) -> Any:
        return ops.blend(x, ops.embed(batch, gates, 1.0), ops.embed(batch, other, 1.0))

    truth.assert_within(rowwise(dev, op, width, x), (value + r, bound + 2 * UNIT * (np.abs(value) + np.abs(r))))


@WIDTHS
@pytest.mark.parametrize("count", [1, 4])
def test_mix(name: str, width: int, count: int) -> None:
    dev, x, c = device(name), _random(9, width), _random(9, 6, 1)
    tables = [_random(9, width, seed) for seed in range(2, 2 + count)]
    others, coefficients = [dev.weight([f32(t)]) for t in tables], dev.weight([f32(c)])
    terms = np.stack([c[:, 2 + j : 3 + j].astype(np.float64) * t for j, t in enumerate(tables)])
    bound = (count + 2) * UNIT * (np.abs(terms).sum(axis=0) + np.abs(x))
    for with_residual in (False, True):

        def op(ops: Any, batch: Any, x: Any, on: bool = with_residual) -> Any:
            streams = tuple(ops.embed(batch, t, 1.0) for t in others)
            return ops.mix(ops.embed(batch, coefficients, 1.0), 2, streams, x if on else None)

        truth.assert_within(rowwise(dev, op, width, x), (terms.sum(axis=0) + with_residual * x, bound))


@WIDTHS
def test_match_rms(name: str, width: int) -> None:
    dev, x, y = device(name), _random(9, width), _random(9, width, 1) * 3
    x[2], x[3], y[4] = 0, 1e-9, 0
    other = dev.weight([f32(y)])
    own, like = ((v.astype(np.float64) ** 2).mean(axis=1, keepdims=True) for v in (x, y))
    value = x * np.sqrt(like / np.maximum(own, 1e-5))
    got = rowwise(dev, lambda ops, batch, x: ops.match_rms(x, ops.embed(batch, other, 1.0), 1e-5), width, x)
    truth.assert_within(got, (value, (width + 8) * UNIT * np.abs(value)))


@WIDTHS
@pytest.mark.parametrize("deviations", [-1.0, 0.0, 1.6448536])
def test_keep_top(name: str, width: int, deviations: float) -> None:
    dev, x = device(name), _random(9, width) + 1
    wide = x.astype(np.float64)
    mean, size = wide.mean(axis=1, keepdims=True), np.abs(wide).mean(axis=1, keepdims=True)
    cut = mean + deviations * wide.std(axis=1, keepdims=True)
    # The mean is off by a sum's error, and so is every term of the deviation, which is a sum's root itself.
    moved = (width + 4) * UNIT * size
    bound = moved + abs(deviations) * (moved + (width + 4) * UNIT * wide.std(axis=1, keepdims=True))
    got = rowwise(dev, lambda ops, batch, x: ops.keep_top(x, deviations), width, x)
    truth.assert_within(got, (np.maximum(wide - cut, 0), bound + 2 * UNIT * (np.abs(wide) + np.abs(cut))))
    assert not got[wide < cut - 1e-3].any() and got[wide > cut + 1e-3].all()


def test_reduce_of_one_rank_is_the_same(name: str) -> None:
    x = _random(3, 64)
    assert np.array_equal(rowwise(device(name), lambda ops, batch, x: ops.reduce(x), 64, x), x)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_products_with_columns_in_another_order(name: str, kind: str) -> None:
    """Element j of a stored row is column columns[j]; parts may agree on the order or not."""
    dev, x, rng = device(name), _random(9, 128), np.random.default_rng(5)
    first, second = rng.permutation(128).astype(np.int32), rng.permutation(128).astype(np.int32)
    for orders in ((first, first), (first, first.copy()), (first, second), (first, None)):
        parts = [random_stored(kind, n, 128, rng)._replace(columns=c) for n, c in zip((40, 24), orders, strict=True)]
        values = np.concatenate([dense(part) for part in parts])
        plain = dense(parts[0]._replace(columns=None))
        assert np.array_equal(values[:40][:, first], plain), "dense puts the columns where they belong"
        weight = dev.weight(parts)
        got = rowwise(dev, lambda ops, batch, x, w=weight: ops.linear(x, w), 64, x)
        truth.assert_within(got, truth.linear(x, values))
        got = rowwise(dev, lambda ops, batch, x, w=weight: ops.gated(x, w, "relu"), 32, x)
        gate, up = (truth.linear(x, half)[0] for half in np.split(values, 2))
        np.testing.assert_allclose(got, np.maximum(gate, 0) * up, rtol=1e-4, atol=1e-4)
