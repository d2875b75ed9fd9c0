"""Panels hold exactly what the checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.ops.contract import Stored
from octavo.quant import GGUF_QUANTIZED, KINDS, dense, multiplied_as
from tests.ops.harness import random_stored, rowwise, with_scale

gguf = pytest.importorskip("gguf")


def _bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_packed_without_loss(kind: str, threads: int) -> None:
    device = CpuDevice(threads)
    stored = random_stored(kind, 37, 768, np.random.default_rng(0))
    got = device.dense(device.weight([stored]))
    if multiplied_as(kind) == kind:
        assert _bits_equal(got, dense(stored))
    else:  # zeros may have another sign
        assert np.array_equal(got, dense(stored))
    if kind in GGUF_QUANTIZED and kind != "Q1_0":  # the public reader of the format, written by others, agrees
        theirs = gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(got, theirs)


def test_a_rewritten_matrix_of_many_slabs() -> None:
    """More rows than are rewritten at a time, the last slab not being whole panels, after a part of another kind."""
    device, rng = CpuDevice(2), np.random.default_rng(4)
    parts = [random_stored("Q4_0", 5, 1024, rng), random_stored("TQ2_0", 2053, 1024, rng)]
    got = device.dense(device.weight(parts))
    assert np.array_equal(got, np.concatenate([dense(part) for part in parts]))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 3e38, 1e-40, -0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_scale_is_dangerous(kind: str, scale: float) -> None:
    """Every float16 or float32 in a block is `scale`: the device gives what `dense` gives, but for denormal floats,
    which it takes for zero, and for infinite scales of what is rewritten."""
    device = CpuDevice(1)
    stored = random_stored(kind, 8, 256, np.random.default_rng(0))
    hostile = with_scale(stored, scale)
    want = dense(hostile)
    got = device.dense(device.weight([hostile]))
    if multiplied_as(kind) == kind:
        tiny = np.abs(want) < 1e-33
        assert np.array_equal(got[~tiny], want[~tiny], equal_nan=True) and (np.abs(got[tiny]) < 1e-33).all()
    else:
        assert np.array_equal(got[np.isfinite(want)], want[np.isfinite(want)])
        assert not np.isfinite(got[~np.isfinite(want)]).any()
    weight = device.weight([hostile])
    out = rowwise(device, lambda ops, batch, v: ops.linear(v, weight), 8, np.ones((3, 256), np.float32))
    assert not np.isfinite(out[:, ~np.isfinite(want).all(axis=1)]).any()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (8, 31), (9, 33), (17, 100)])
def test_odd_shapes_are_padded(kind: str, shape: tuple[int, int]) -> None:
    device = CpuDevice(1)
    stored = random_stored(kind, *shape, np.random.default_rng(1))
    assert _bits_equal(device.dense(device.weight([stored])), dense(stored))


@pytest.mark.parametrize("kind", ["E2M1_16", "IQ2_CODES"])
def test_half_a_cell_at_the_end_of_a_row(kind: str) -> None:
    """Rows of 48 are no whole groups of activations: they are multiplied in float32, whatever was asked for."""
    device = CpuDevice(1, "int8")
    stored = random_stored(kind, 11, 48, np.random.default_rng(6))
    weight = device.weight([stored])
    assert _bits_equal(device.dense(weight), dense(stored))
    x = np.random.default_rng(7).standard_normal((5, 48)).astype(np.float32)
    out = rowwise(device, lambda ops, batch, v: ops.linear(v, weight), 11, x)
    assert np.allclose(out, x.astype(np.float64) @ dense(stored).astype(np.float64).T, rtol=1e-4, atol=1e-4)


def test_parts_and_strided_rows() -> None:
    device, rng = CpuDevice(2), np.random.default_rng(2)
    parts = [random_stored(kind, n, 256, rng) for kind, n in (("Q4_K", 12), ("Q6_K", 3), ("F16", 8), ("Q5_0", 21))]
    every_third = parts[3].data[::3]
    parts[3] = Stored("Q5_0", len(every_third), 256, every_third)
    weight = device.weight(parts)
    assert (weight.n_out, weight.n_in) == (30, 256)
    assert _bits_equal(device.dense(weight), np.concatenate([dense(p._replace(data=p.data.copy())) for p in parts]))


@pytest.mark.parametrize(
    "stored",
    [
        Stored("Q4_0", 2, 64, np.zeros((2, 35), np.uint8)),
        Stored("Q4_K", 2, 64, np.zeros((2, 36), np.uint8)),
        Stored("F32", 2, 4, np.zeros((2, 32), np.uint8)[:, ::2]),
        Stored("Q3_K", 2, 256, np.zeros((2, 109), np.uint8)),
        Stored("IQ3_S", 2, 256, np.zeros((2, 109), np.uint8)),
        Stored("E2M1_16", 2, 40, np.zeros((2, 30), np.uint8)),
        Stored("Q9_9", 2, 32, np.zeros((2, 32), np.uint8)),
        Stored("F32", 2, 4, np.zeros((2, 4), np.float32)),  # type: ignore[arg-type]
    ],
)
def test_bad_data_is_refused(stored: Stored) -> None:
    with pytest.raises((ValueError, TypeError)):
        CpuDevice(1).weight([stored])


def test_read_only_views_of_a_file_are_packed(tmp_path: Path) -> None:
    stored = random_stored("Q8_0", 8, 64, np.random.default_rng(3))
    (tmp_path / "weights").write_bytes(stored.data.tobytes())
    view = np.memmap(tmp_path / "weights", np.uint8, "r").reshape(stored.data.shape)
    device = CpuDevice(1)
    assert _bits_equal(device.dense(device.weight([stored._replace(data=view)])), dense(stored))
