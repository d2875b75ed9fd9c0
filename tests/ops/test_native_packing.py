"""Panels hold exactly what the checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.ops.contract import Stored
from octavo.quant import KINDS, dense
from tests.ops.harness import random_stored

gguf = pytest.importorskip("gguf")


def _bits_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_packed_without_loss(kind: str, threads: int) -> None:
    device = CpuDevice(threads)
    stored = random_stored(kind, 37, 768, np.random.default_rng(0))
    got = device.dense(device.weight([stored]))
    assert _bits_equal(got, dense(stored))
    # The public reader of the format, written by others, agrees.
    theirs = gguf.quants.dequantize(stored.data, gguf.GGMLQuantizationType[kind])
    assert _bits_equal(got, theirs.astype(np.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (8, 31), (9, 33), (17, 100)])
def test_odd_shapes_are_padded(kind: str, shape: tuple[int, int]) -> None:
    device = CpuDevice(1)
    stored = random_stored(kind, *shape, np.random.default_rng(1))
    assert _bits_equal(device.dense(device.weight([stored])), dense(stored))


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
