"""Products with int8 and int16 activations: what they compute, and that a row stands alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.recorder import Activations
from octavo.ops.contract import F32, Stored
from octavo.quant import (
    KINDS,
    LARGE_INTEGERS,
    QUANTIZED_FLOATS,
    SMALL_INTEGERS,
    dense,
    multiplied_as,
    row_bytes,
)
from tests.ops.harness import ROWS, UNIT, Pages, Span, compile_op, f32, random_stored, rowwise, with_scale

QUANTIZED = [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")]


def _rounded(x: F32, kind: str, activations: Activations) -> F32:
    """What a product of `kind` sees of the rows of `x`, in float64 (the scale itself is float32)."""
    if multiplied_as(kind) in QUANTIZED_FLOATS:
        return x.astype(np.float64)
    if activations == "int8" and multiplied_as(kind) in SMALL_INTEGERS:
        levels, groups = np.float32(127), x.reshape(len(x), -1, 32)
    else:
        levels, groups = np.float32(32767), x.reshape(len(x), 1, -1)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        integers = np.rint(groups * np.where(largest > 0, levels / largest, np.float32(0)))
    return (integers.astype(np.float64) * (largest / levels)).reshape(x.shape)


def _inputs(rows: int, width: int) -> F32:
    x = np.random.default_rng(5).standard_normal((rows, width)).astype(np.float32)
    x[:, 7] *= 50  # outliers, as models have them
    x[rows // 2] = 0
    return x


def _assert_close(got: F32, x: np.ndarray, w: np.ndarray) -> None:
    """Within float32 rounding of one chain over the cells; minima and scales add terms of the size of `size`."""
    size = np.abs(x) @ np.abs(w).T + np.abs(x).max(axis=1, keepdims=True) * np.abs(w).max() * 64
    assert (np.abs(got - x @ w.T) <= 4 * (x.shape[1] / 32 + 4) * UNIT * size).all()


@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_product_is_that_of_the_rounded_rows(kind: str, activations: Activations) -> None:
    dev = CpuDevice(1, activations)
    stored, x = random_stored(kind, 83, 512, np.random.default_rng(4)), _inputs(33, 512)
    weight = dev.weight([stored])
    got = rowwise(dev, lambda ops, batch, v: ops.linear(v, weight), 83, x)
    _assert_close(got, _rounded(x, kind, activations), dense(stored).astype(np.float64))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_logits_use_16_bits(kind: str) -> None:
    dev = CpuDevice(1, "int8")
    stored, x = random_stored(kind, 40, 256, np.random.default_rng(4)), _inputs(5, 256)
    weight = dev.weight([stored])
    table, pages = dev.weight([f32(x)]), Pages(1, 16)
    model = dev.compile(
        lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
        lambda ops, v: ops.logits(v, weight),
        pages.limits(16),
        dev.kv_cache(pages.spec(1, 32)),
    )
    got = model.raw_logits(pages.step([Span(0, 0, range(5))]))
    _assert_close(got, _rounded(x, kind, "int16"), dense(stored).astype(np.float64))


def test_every_quantized_kind_has_a_way_to_be_multiplied() -> None:
    ways = (SMALL_INTEGERS, LARGE_INTEGERS, QUANTIZED_FLOATS)
    assert all(sum(multiplied_as(kind) in way for way in ways) == 1 for kind in QUANTIZED)


@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_extreme_integers_do_not_overflow(kind: str, activations: Activations) -> None:
    """Largest weights, small integer scales too, times largest activations, all of one sign: whatever the byte that
    makes a format's weights the largest."""
    dev, finite = CpuDevice(1, activations), 0
    for byte in (0x00, 0x33, 0x55, 0x77, 0x7E, 0x7F, 0x80, 0x88, 0xF0, 0xFF):
        stored = Stored(kind, 8, 512, np.full((8, row_bytes(kind, 512)), byte, np.uint8))
        extreme = with_scale(stored, 0.01)
        values = dense(extreme).astype(np.float64)
        if not (np.abs(values) < 1e30).all():
            continue
        finite += 1
        weight = dev.weight([extreme])
        for sign in (1, -1):
            x = np.full((2, 512), sign, np.float32)
            got = rowwise(dev, lambda ops, batch, v, w=weight: ops.linear(v, w), 8, x)
            size = np.abs(values).sum(axis=1) + 512 * 0.01 * 128  # minima and what they are added to may cancel
            assert (np.abs(got - sign * values.sum(axis=1)) <= 1e-5 * size).all(), byte
    assert finite >= 6


@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_row_stands_alone(kind: str, activations: Activations) -> None:
    """The same bits for a row among 1 to 200 rows, in any order, on one thread and on two."""
    parts = [random_stored(kind, n, 512, np.random.default_rng(n)) for n in (44, 20)]
    x = _inputs(200, 512)
    whole = None
    for threads in (1, 2):
        dev = CpuDevice(threads, activations)
        weight, table, pages = dev.weight(parts), dev.weight([f32(x)]), Pages(1, 208)

        def body(ops: Any, batch: Any, weight: Any = weight, table: Any = table) -> Any:
            return ops.linear(ops.embed(batch, table, 1.0), weight)

        model = compile_op(dev, body, 64, pages)
        if whole is None:
            whole = model.raw_logits(pages.step([Span(0, 0, range(200))]))
        for rows in (*ROWS, 129, 200):
            picked = np.random.default_rng(rows).permutation(200)[:rows]
            got = model.raw_logits(pages.step([Span(0, 0, picked.tolist())]))
            assert np.array_equal(got.view(np.uint32), whole[picked].view(np.uint32)), rows


@pytest.mark.parametrize("sizes", [(64, 64), (40, 40), (13, 51), (7, 7)])
@pytest.mark.parametrize("activations", ["float32", "int8", "int16"])
def test_gated_parts_of_any_size(sizes: tuple[int, int], activations: Activations) -> None:
    """Gate and up rows need not meet at a panel, nor at the end of a part, nor be of one kind."""
    dev = CpuDevice(2, activations)
    parts = [random_stored(k, n, 256, np.random.default_rng(n)) for k, n in zip(("Q4_1", "Q8_0"), sizes, strict=True)]
    x, weight = _inputs(6, 256), dev.weight(parts)
    half = sum(sizes) // 2
    got = rowwise(dev, lambda ops, batch, v: ops.gated(v, weight, "relu"), half, x)
    columns = [
        (x if activations == "float32" else _rounded(x, p.kind, activations)) @ dense(p).astype(np.float64).T
        for p in parts
    ]
    product = np.concatenate(columns, axis=1)
    expected = np.maximum(product[:, :half], 0) * product[:, half:]
    assert np.allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("activations", ["float32", "int8", "int16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_in_its_row(activations: Activations, bad: float) -> None:
    """Integers cannot hold NaN: it must come out of the product nevertheless, and leave the other rows alone."""
    dev = CpuDevice(1, activations)
    weight = dev.weight([random_stored("Q4_0", 16, 64, np.random.default_rng(1))])
    x = _inputs(7, 64)
    clean = rowwise(dev, lambda ops, batch, v: ops.linear(v, weight), 16, x)
    x[3, 40] = bad
    got = rowwise(dev, lambda ops, batch, v: ops.linear(v, weight), 16, x)
    assert not np.isfinite(got[3]).any()
    others = np.arange(7) != 3
    assert np.array_equal(got[others], clean[others])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("activations", ["float32", "int8", "int16"])
def test_gated_hands_over_what_it_computed(kind: str, activations: Activations) -> None:
    """What a product takes straight from `gated` is, bit for bit, what it makes of the float rows."""
    dev, rng = CpuDevice(2, activations), np.random.default_rng(3)
    up = dev.weight([random_stored(kind, 192, 64, rng)])
    down = dev.weight([random_stored(kind, 40, 96, rng)])
    x = _inputs(9, 64)
    between = rowwise(dev, lambda ops, batch, v: ops.gated(v, up, "silu"), 96, x)
    expected = rowwise(dev, lambda ops, batch, v: ops.linear(v, down), 40, between)
    got = rowwise(dev, lambda ops, batch, v: ops.linear(ops.gated(v, up, "silu"), down), 40, x)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


HANDERS: dict[str, Any] = {
    "activate": lambda ops, v: ops.activate(v, "gelu"),
    "add": lambda ops, v: ops.add(v, v, 0.3),
    "mix": lambda ops, v: ops.mix(v, 2, (v, v), v),
    "match_rms": lambda ops, v: ops.match_rms(v, v, 1e-5),
    "keep_top": lambda ops, v: ops.keep_top(v, 0.5),
}


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("activations", ["float32", "int8", "int16"])
@pytest.mark.parametrize("hander", HANDERS)
def test_row_operations_hand_over_what_they_computed(hander: str, kind: str, activations: Activations) -> None:
    dev, rng, op = CpuDevice(2, activations), np.random.default_rng(3), HANDERS[hander]
    down, x = dev.weight([random_stored(kind, 40, 96, rng)]), _inputs(9, 96)
    between = rowwise(dev, lambda ops, batch, v: op(ops, v), 96, x)
    expected = rowwise(dev, lambda ops, batch, v: ops.linear(v, down), 40, between)
    got = rowwise(dev, lambda ops, batch, v: ops.linear(op(ops, v), down), 40, x)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))
