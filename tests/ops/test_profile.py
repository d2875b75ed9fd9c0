"""A profile of the CPU device: counts by hand, and the bits of a step that is timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice, CpuModel
from octavo.ops.contract import AttentionShape, OpTime, Profiled, Roofline, Router
from tests.ops.harness import Pages, Span, compile_op, f32, random_stored

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 32, 20
QKV = (HEADS + 2 * KV_HEADS) * DIM
EXPERTS = 5


@pytest.fixture(params=[1, 2])
def model(request: pytest.FixtureRequest) -> tuple[CpuModel, Pages]:
    dev, rng = CpuDevice(request.param, "int8"), np.random.default_rng(0)
    table = dev.weight([f32(rng.standard_normal((64, 256)))])
    scores = dev.weight([f32(np.tile([1, 5, 0, 4, 0], (64, 1)))])  # every row goes to experts 1 and 3
    qkv = dev.weight([random_stored(kind, QKV // 2, 256, rng) for kind in ("Q4_K", "Q6_K")])
    gated = dev.weight([random_stored("Q8_0", 2 * 96, HEADS * DIM, rng)])
    experts = tuple(dev.weight([random_stored("Q4_0", 64, 96, rng)]) for _ in range(EXPERTS))
    down = tuple(dev.weight([random_stored("Q4_0", 24, 32, rng)]) for _ in range(EXPERTS))
    shapes = [AttentionShape(HEADS, KV_HEADS, DIM, 0.1, 0, 0, window) for window in (0, WINDOW)]

    def op(ops: Any, batch: Any) -> Any:
        x = ops.linear(ops.embed(batch, table, 1.0), qkv)
        q = ops.store_kv(batch, x, None, shapes[0])
        y = ops.add(ops.attend(batch, q, shapes[0]), ops.attend(batch, q, shapes[1]), 1.0)
        y = ops.gated(y, gated, "silu")
        return ops.moe(y, ops.embed(batch, scores, 1.0), experts, down, Router(2), "silu")

    pages = Pages(3, 64)
    compiled = compile_op(dev, op, 24, pages, pages.spec(KV_HEADS, DIM, "float16"))
    assert isinstance(compiled, CpuModel) and isinstance(compiled, Profiled)
    return compiled, pages


def by_name(times: list[OpTime]) -> dict[tuple[bool, str], OpTime]:
    return {(time.decode, time.name): time for time in times}


def test_the_counts_of_a_profile(model: tuple[CpuModel, Pages]) -> None:
    compiled, pages = model
    prompts = pages.step([Span(0, 0, range(30)), Span(2, 0, range(9))])
    decode = pages.step([Span(0, 30, [1]), Span(2, 9, [2])])
    compiled.raw_logits(prompts)  # not timed
    compiled.start_profile()
    compiled.raw_logits(prompts)
    compiled.raw_logits(decode)
    compiled.raw_logits(decode)
    times = by_name(compiled.stop_profile())
    names = {name for _, name in times}
    assert names == {
        *("embed F32", "linear Q4_K/Q6_K int8", "store_kv", "attend", f"attend window {WINDOW}", "add"),
        *("gated Q8_0 int16", "moe Q4_0 int8", "gather", "logits F32 float32", "plan", "sampling"),
    }
    assert set(times) == {(decoded, name) for decoded in (False, True) for name in names}
    # the head takes 32 rows at a time
    assert times[False, "logits F32 float32"].calls == 2 and times[True, "logits F32 float32"].calls == 2
    for decoded, steps, rows in ((False, 1, 39), (True, 2, 4)):
        assert times[decoded, "plan"].calls == steps
        assert times[decoded, "embed F32"].calls == 2 * steps
        linear = times[decoded, "linear Q4_K/Q6_K int8"]
        assert linear.operations == (0, 2 * rows * QKV * 256, 0, 0) and linear.calls == steps
        assert linear.bytes >= steps * QKV * 256 * 5 / 8
        gated = times[decoded, "gated Q8_0 int16"]
        assert gated.operations == (0, 0, 2 * rows * 2 * 96 * HEADS * DIM, 0)
        # two of the experts, however many rows
        moe = times[decoded, "moe Q4_0 int8"]
        assert moe.operations == (0, 2 * 2 * rows * (64 * 96 + 24 * 32), 0, 0)
        packed = (64 * 96 + 24 * 32) // 32 * 18
        assert 2 * steps * packed <= moe.bytes < 2.2 * steps * packed
        assert all(time.seconds >= 0 for time in times.values())
    token = 2 * KV_HEADS * DIM * 2
    each = 2 * 2 * HEADS * DIM
    assert times[False, "store_kv"].bytes == 39 * token
    whole, near = times[False, "attend"], times[False, f"attend window {WINDOW}"]
    assert whole.bytes == near.bytes == 39 * token
    assert whole.operations == (each * (30 * 31 // 2 + 9 * 10 // 2), 0, 0, 0)
    assert near.operations == (each * (20 * 21 // 2 + 10 * 20 + 9 * 10 // 2), 0, 0, 0)
    whole, near = times[True, "attend"], times[True, f"attend window {WINDOW}"]
    assert (whole.bytes, near.bytes) == (2 * (31 + 10) * token, 2 * (20 + 10) * token)
    assert (whole.operations[0], near.operations[0]) == (2 * each * (31 + 10), 2 * each * (20 + 10))
    assert compiled.stop_profile() == []


def test_a_timed_step_has_the_same_bits(model: tuple[CpuModel, Pages]) -> None:
    compiled, pages = model
    prompts = pages.step([Span(0, 0, range(40)), Span(1, 0, [7])])
    plain = compiled.raw_logits(prompts)
    compiled.start_profile()
    timed = compiled.raw_logits(prompts)
    assert {time.decode for time in compiled.stop_profile()} == {False}
    assert np.array_equal(plain, timed) and np.array_equal(plain, compiled.raw_logits(prompts))


def test_the_roofline_of_this_machine() -> None:
    found = CpuDevice(1).roofline()
    assert found.bytes_per_second > 1e8
    assert all(peak > 1e9 for peak in found.operations_per_second)


def test_what_a_device_needs_at_least() -> None:
    roofline = Roofline(100.0, (10.0, 40.0, 20.0, 30.0))
    assert roofline.seconds(OpTime(True, "x", 1, 9.0, 300, (0, 0, 0, 0))) == 3
    assert roofline.seconds(OpTime(True, "x", 1, 9.0, 300, (20, 80, 20, 30))) == 2 + 2 + 1 + 1
