"""Products of bfloat16 weights with activations rounded to bfloat16: they are those of float32 activations with the
rounded values, bit for bit, whatever instructions there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.recorder import Activations
from octavo.ops.contract import F32, Router, Stored
from octavo.quant import dense
from tests.ops.harness import ROWS, UNIT, Pages, Span, compile_op, f32, random_stored, rowwise

WIDTH = 512
ROUNDING: tuple[Activations, ...] = ("bfloat16", "int8")
"""The modes that round to bfloat16."""


def rounded(x: F32) -> F32:
    """To bfloat16, to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bfloat16(values: Any) -> Stored:
    """A matrix as a BF16 checkpoint stores it; `values` are rounded."""
    matrix = rounded(np.ascontiguousarray(values, np.float32))
    words = np.ascontiguousarray((matrix.view(np.uint32) >> 16).astype(np.uint16))
    return Stored("BF16", *matrix.shape, words.view(np.uint8))


def inputs(rows: int, width: int = WIDTH) -> F32:
    """Outliers, ties of the rounding, values whose products are denormal or are so themselves, and zeros."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[:, 7] *= 50
    x[:, 16:32] = (np.ascontiguousarray(x[:, 16:32]).view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)
    extremes = np.array([0x007FFFFF, 0x007F8000, 0x00000001, 0x80800001, 0x7E7F0000], np.uint32).view(np.float32)
    x[:, 40] = rng.choice(extremes, rows)
    x[rows // 2] = 0
    x[rows // 3] *= np.float32(1e-37)
    return x


def weights(n_out: int, width: int = WIDTH) -> F32:
    w = np.random.default_rng(n_out).standard_normal((n_out, width)).astype(np.float32)
    w[:, 40] = 1e-3
    w[3] *= np.float32(1e-37)
    w[4, ::5] = np.uint32(0x00710000).view(np.float32)  # denormal
    return rounded(w)


def products(activations: Activations, parts: Sequence[Stored], x: F32, threads: int = 1) -> F32:
    dev = CpuDevice(threads, activations)
    weight = dev.weight([*parts])
    return rowwise(dev, lambda ops, batch, v: ops.linear(v, weight), weight.n_out, x)


def assert_same(got: F32, want: F32) -> None:
    assert np.isfinite(want).all() and np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("activations", ROUNDING)
@pytest.mark.parametrize("sizes", [(83,), (40, 40), (13, 51), (7,)])
def test_a_product_is_that_of_the_rounded_rows(sizes: tuple[int, ...], activations: Activations) -> None:
    x, parts = inputs(130), [bfloat16(weights(n)) for n in sizes]
    for rows in (1, 2, 7, 12, 13, 33, 130):
        assert_same(products(activations, parts, x[-rows:]), products("float32", parts, rounded(x[-rows:])))


def test_how_far_it_is_from_the_exact_product() -> None:
    """The rounding of an activation is an error of 2^-9 of it at most, as large as that of a weight in the file."""
    x = np.random.default_rng(1).standard_normal((33, WIDTH)).astype(np.float32)
    w = weights(83)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    got = products("bfloat16", [bfloat16(w)], x)
    assert (np.abs(got - exact) <= (2.0**-9 + WIDTH * UNIT) * size + 1e-30).all()
    assert np.abs(got - exact).max() > 2.0**-14 * size.max()


@pytest.mark.parametrize("activations", ["float32", "int16"])
def test_other_modes_do_not_round(activations: Activations) -> None:
    x, w = inputs(5), weights(40)
    assert_same(products(activations, [bfloat16(w)], x), products("float32", [f32(w)], x))


def test_rows_that_fill_no_cell_are_not_rounded() -> None:
    x, part = inputs(5, 500), bfloat16(weights(40, 500))
    assert_same(products("bfloat16", [part], x), products("float32", [part], x))


def test_logits_are_not_rounded() -> None:
    x = inputs(5)
    weight = bfloat16(weights(40))

    def logits(activations: Activations) -> F32:
        dev, pages = CpuDevice(1, activations), Pages(1, 16)
        table, head = dev.weight([f32(x)]), dev.weight([weight])
        model = dev.compile(
            lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
            lambda ops, v: ops.logits(v, head),
            pages.limits(16),
            dev.kv_cache(pages.spec(1, 32)),
        )
        return model.raw_logits(pages.step([Span(0, 0, range(5))]))

    assert_same(logits("bfloat16"), logits("float32"))


def test_not_a_number_stays_so() -> None:
    x = inputs(3)
    x[0, 9], x[2, 9] = np.array([0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    got = products("bfloat16", [bfloat16(weights(40))], x)
    assert np.isnan(got[[0, 2]]).all() and np.isfinite(got[1]).all()


def test_a_row_stands_alone() -> None:
    """The same bits for a row among 1 to 200 rows, in any order, on one thread and on two, beside weights that take
    other activations."""
    parts = [bfloat16(weights(44)), random_stored("Q4_0", 20, WIDTH, np.random.default_rng(2)), bfloat16(weights(21))]
    x, whole = np.random.default_rng(6).standard_normal((200, WIDTH)).astype(np.float32), None
    for threads in (1, 2):
        dev = CpuDevice(threads, "int8")
        weight, table, pages = dev.weight(parts), dev.weight([f32(x)]), Pages(1, 208)

        def body(ops: Any, batch: Any, weight: Any = weight, table: Any = table) -> Any:
            return ops.linear(ops.embed(batch, table, 1.0), weight)

        model = compile_op(dev, body, 85, pages)
        if whole is None:
            whole = model.raw_logits(pages.step([Span(0, 0, range(200))]))
        for rows in (*ROWS, 129, 200):
            picked = np.random.default_rng(rows).permutation(200)[:rows]
            assert_same(model.raw_logits(pages.step([Span(0, 0, picked.tolist())])), whole[picked])


@pytest.mark.parametrize("inner", [96, 104])
def test_what_a_gated_product_and_experts_hand_on(inner: int) -> None:
    """Their results are rounded where they arise; rows of 104 fill no cell and are not."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((17, 64)).astype(np.float32)
    up, down = bfloat16(rng.standard_normal((2 * inner, 64))), bfloat16(rng.standard_normal((40, inner)))
    rounding, exact = CpuDevice(1, "bfloat16"), CpuDevice(1)
    first, second = rounding.weight([up]), rounding.weight([down])
    plain = exact.weight([up])
    hidden = rowwise(exact, lambda ops, batch, v: ops.gated(v, plain, "silu"), inner, rounded(x))
    want = products("float32", [down], rounded(hidden) if inner % 32 == 0 else hidden)
    assert_same(rowwise(rounding, lambda ops, batch, v: ops.linear(ops.gated(v, first, "silu"), second), 40, x), want)
    scores = rounding.weight([f32(np.zeros((1, 64)))])

    def mixture(ops: Any, batch: Any, v: Any) -> Any:
        return ops.moe(v, ops.linear(v, scores), (first,), (second,), Router(1), "silu")

    assert_same(rowwise(rounding, mixture, 40, x), want)


def test_weights_are_kept_as_they_are() -> None:
    for width in (500, 501, 512):
        stored = bfloat16(weights(43, width))
        dev = CpuDevice(2)
        assert_same(dev.dense(dev.weight([stored])), dense(stored))
