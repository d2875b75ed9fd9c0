"""AWQ's tensors become exactly the matrix that they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.ops.contract import Stored
from octavo.quant import awq, dense
from octavo.quant.method import QuantError
from tests.quant import packing
from tests.quant.test_gptq import heads, weight


def read(tensors: dict[str, Any], **config: Any) -> Stored:
    """The matrix of a module; `tensors` without the dots of their endings."""
    method = awq.read({"bits": 4, "group_size": 128, "version": "gemm", **config})
    parts = {f".{name}": np.asarray(t) for name, t in tensors.items()}
    layout = method.layout("a.module", heads(parts))
    stored = layout.build(parts)
    assert (stored.kind, (stored.n_out, stored.n_in)) == (layout.kind, layout.shape)
    return stored


def test_by_hand() -> None:
    """Of 8 rows, row 3 is the sixth half byte of a word and row 4 the third."""
    qweight = np.zeros((32, 1), np.int32)
    qweight[5, 0], qweight[6, 0] = 11 << 20, 12 << 8
    tensors = {
        "qweight": qweight,
        "qzeros": np.array([[2 << 20 | 1 << 8]], np.int32),
        "scales": np.full((1, 8), 0.5, np.float16),
    }
    want = np.zeros((8, 32), np.float32)
    want[3], want[4] = -2 * 0.5, -1 * 0.5
    want[3, 5], want[4, 6] = (11 - 2) * 0.5, (12 - 1) * 0.5
    assert np.array_equal(dense(read(tensors, group_size=32)), want)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_quant_04_values_are_exact(group: int, version: str, symmetric: bool) -> None:
    n_in = 384
    matrix = packing.rounded(weight(40, n_in), 4, packing.consecutive(n_in, group), symmetric)
    tensors = packing.awq(matrix, version, n_in if group == -1 else group)
    stored = read(tensors, group_size=group, version=version.upper(), zero_point=not symmetric)
    assert stored.kind == ("INT4_32" if group in (32, 64) else "INT4_128") and stored.columns is None
    assert np.array_equal(dense(stored), matrix.values)


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize(("n_in", "group", "kind"), [(96, 32, "INT4_32"), (96, -1, "INT4_32"), (48, 16, "F32")])
def test_sizes_that_fill_no_large_block(n_in: int, group: int, kind: str, version: str) -> None:
    matrix = packing.rounded(weight(16, n_in), 4, packing.consecutive(n_in, group))
    stored = read(packing.awq(matrix, version, n_in if group == -1 else group), group_size=group, version=version)
    assert stored.kind == kind and np.array_equal(dense(stored), matrix.values)


def test_the_old_names_of_keys() -> None:
    matrix = packing.rounded(weight(16, 64), 4, packing.consecutive(64, 32))
    method = awq.read({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    parts = {f".{name}": t for name, t in packing.awq(matrix).items()}
    assert np.array_equal(dense(method.layout("m", heads(parts)).build(parts)), matrix.values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 8}, "bits is 8; supported is 4"),
        ({"version": "marlin"}, "version is 'marlin'; supported are gemm and gemv"),
        ({"version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"backend": "llm-awq"}, "backend is 'llm-awq'"),
        ({"group_size": None}, "group_size or q_group_size is missing"),
        ({"group_size": -2}, "group_size is -2; it must be at least 1, or -1"),
    ],
)
def test_quant_09_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantError, match=message):
        awq.read({"bits": 4, "group_size": 128, **config})


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        ("gemm", {"qzeros": None}, "it has no qzeros"),
        ("gemm", {"qweight": np.zeros((64, 4), np.int16)}, "qweight is I16"),
        ("gemm", {"qzeros": np.zeros((3, 4), np.int32)}, r"qzeros is \[3, 4\], and \[2, 4\] is needed"),
        ("gemm", {"scales": np.zeros((2, 64), np.float16)}, r"scales is \[2, 64\], and \[2, 32\] is needed"),
        ("gemv", {"qzeros": np.zeros((32, 0), np.int32)}, "qzeros has 0 words for the 2 groups"),
        ("gemv", {"scales": np.zeros((32, 2), np.float16)}, r"scales is \[32, 2\], and \[32, 32\] is needed"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(version: str, change: dict[str, Any], message: str) -> None:
    matrix = packing.rounded(weight(32, 64), 4, packing.consecutive(64, 32))
    tensors = {name: t for name, t in {**packing.awq(matrix, version, 32), **change}.items() if t is not None}
    with pytest.raises(QuantError, match=message):
        read(tensors, group_size=32, version=version)
