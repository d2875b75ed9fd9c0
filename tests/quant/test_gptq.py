"""GPTQ's tensors become exactly the matrix that they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.ops.contract import Stored
from octavo.quant import dense, gptq
from octavo.quant.method import Head, QuantError
from tests.quant import packing

WORDS = {"int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "bfloat16": "BF16", "int16": "I16"}
"""A file's word for each type."""


def heads(tensors: Mapping[str, Any]) -> dict[str, Head]:
    return {name: Head(WORDS[str(t.dtype)], t.shape, lambda t=t: t) for name, t in tensors.items()}


def read(tensors: Mapping[str, Any], **config: Any) -> Stored:
    """The matrix of a module; `tensors` without the dots of their endings."""
    method = gptq.read({"bits": 4, "group_size": 128, **config})
    parts = {f".{name}": np.asarray(t) for name, t in tensors.items()}
    layout = method.layout("a.module", heads(parts))
    stored = layout.build(parts)
    assert (stored.kind, (stored.n_out, stored.n_in)) == (layout.kind, layout.shape)
    return stored


def weight(n_out: int, n_in: int) -> Any:
    """Values of which some rows have zero points at both ends."""
    values = np.random.default_rng(0).normal(size=(n_out, n_in)).astype(np.float32)
    values[0], values[1] = np.abs(values[0]), -np.abs(values[1])
    return values


@pytest.mark.parametrize(("version", "stored_zero"), [("gptq", 6), ("gptq_v2", 7)])
def test_by_hand(version: str, stored_zero: int) -> None:
    """Column 9 of row 1 is in the second word, second half byte; all else is 0."""
    qweight = np.zeros((4, 2), np.int32)
    qweight[1, 1] = 13 << 4
    tensors = {
        "qweight": qweight,
        "qzeros": np.array([[stored_zero | stored_zero << 4]], np.int32),
        "scales": np.array([[0.5, 0.25]], np.float16),
    }
    got = read(tensors, checkpoint_format=version, group_size=32)
    want = np.full((2, 32), -7, np.float32) * np.array([[0.5], [0.25]], np.float32)
    want[1, 9] = 0.25 * (13 - 7)
    assert got.kind == "INT4_32" and np.array_equal(dense(got), want)


def test_three_bits_lie_across_words() -> None:
    """Column 10 has bits 30 to 32, column 21 bits 63 to 65."""
    qweight = np.zeros((3, 1), np.int64)
    qweight[0, 0], qweight[1, 0], qweight[2, 0] = 0b10 << 30, 1 | 1 << 31, 0b10
    tensors = {
        "qweight": qweight.astype(np.uint32).view(np.int32),
        "qzeros": np.zeros((1, 1), np.int32),
        "scales": np.ones((1, 1), np.float16),
    }
    want = np.zeros(32)
    want[10], want[21] = 0b110, 0b101
    assert np.array_equal(dense(read(tensors, bits=3, checkpoint_format="gptq_v2"))[0], want)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("order", ["consecutive", "no index", "shuffled"])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values_are_exact(bits: int, group: int, order: str, version: int, symmetric: bool) -> None:
    groups = packing.shuffled(256, group, 1) if order == "shuffled" else packing.consecutive(256, group)
    matrix = packing.rounded(weight(40, 256), bits, groups, symmetric)
    tensors = packing.gptq(matrix, version, order != "no index")
    stored = read(tensors, bits=bits, group_size=group, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    assert stored.kind == f"INT{8 if bits == 8 else 4}_{128 if group in (128, -1) else 32}"
    assert (stored.columns is not None) == (order == "shuffled" and group != -1)
    assert np.array_equal(dense(stored), matrix.values)


def test_quant_01_both_versions_of_zero_points_are_the_same_matrix() -> None:
    """Also where a zero point is 0, of which version 1 takes one in the next half byte."""
    for symmetric in (False, True):
        matrix = packing.rounded(weight(40, 64), 4, packing.consecutive(64, 32), symmetric)
        assert symmetric or (matrix.zeros == 0).any() and (matrix.zeros == 15).any()
        first, second = (packing.gptq(matrix, version) for version in (1, 2))
        assert not np.array_equal(first["qzeros"], second["qzeros"])
        got = [dense(read(first)), dense(read(second, checkpoint_format="gptq_v2"))]
        assert np.array_equal(got[0], matrix.values) and np.array_equal(got[1], matrix.values)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_scales_of_two_bytes_are_exact(dtype: Any) -> None:
    for bits in (4, 8):
        matrix = packing.rounded(weight(24, 64), bits, packing.consecutive(64, 32), dtype=dtype)
        assert np.array_equal(dense(read(packing.gptq(matrix), bits=bits)), matrix.values)


def test_float32_scales_are_rounded_where_products_need_more_bits() -> None:
    matrix = packing.rounded(weight(24, 64), 8, packing.consecutive(64, 32), dtype=np.float32)
    got = dense(read(packing.gptq(matrix), bits=8))
    scale, zero = (a[:, matrix.groups].astype(np.float64) for a in (matrix.scales, matrix.zeros))
    exact = scale * (matrix.q - zero)
    parts = np.abs(scale * (matrix.q - 128)) + np.abs(scale * (zero - 128)) + np.abs(exact)
    assert (np.abs(got - exact) <= 2.0**-24 * parts).all()


@pytest.mark.parametrize(
    ("n_in", "group", "kind"),
    [
        (96, 64, "INT4_32"),
        (160, 128, "INT4_32"),
        (96, -1, "INT4_32"),
        (48, 16, "F32"),
        (64, 16, "F32"),
        (72, 24, "F32"),
    ],
)
def test_sizes_that_fill_no_large_block(n_in: int, group: int, kind: str) -> None:
    """The last group may be smaller; columns whose blocks would not fit are kept in float32."""
    for groups in (packing.consecutive(n_in, group), packing.shuffled(n_in, group, 2)):
        matrix = packing.rounded(weight(16, n_in), 4, groups)
        stored = read(packing.gptq(matrix), group_size=group)
        assert stored.kind == kind and np.array_equal(dense(stored), matrix.values)
    matrix = packing.rounded(weight(16, n_in), 4, packing.consecutive(n_in, group))
    assert np.array_equal(dense(read(packing.gptq(matrix, with_index=False), group_size=group)), matrix.values)


def test_rows_that_fill_no_word() -> None:
    """A head of 199 tokens: the zero points' last word is padded."""
    for bits in (2, 3, 4, 8):
        matrix = packing.rounded(weight(199, 64), bits, packing.consecutive(64, 32))
        assert np.array_equal(dense(read(packing.gptq(matrix), bits=bits)), matrix.values)


def test_a_module_may_have_other_bits_and_groups_than_the_configuration_says() -> None:
    """GPTQModel's `dynamic`, which matters for nothing else."""
    matrix = packing.rounded(weight(32, 128), 8, packing.consecutive(128, 32))
    for index in (True, False):
        got = read(packing.gptq(matrix, with_index=index), bits=4, group_size=128, dynamic={"-:a.module": {}})
        assert got.kind == "INT8_32" and np.array_equal(dense(got), matrix.values)


def test_an_index_may_have_64_bits_and_needs_no_description() -> None:
    """desc_act and static_groups say how the checkpoint was made; the index says what it is."""
    matrix = packing.rounded(weight(32, 128), 4, packing.shuffled(128, 32, 3))
    tensors = packing.gptq(matrix)
    tensors["g_idx"] = tensors["g_idx"].astype(np.int64)
    for said in ({}, {"desc_act": False}, {"desc_act": True, "static_groups": True, "true_sequential": True}):
        assert np.array_equal(dense(read(tensors, group_size=32, **said)), matrix.values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 5}, "bits is 5; supported are 2, 3, 4 and 8"),
        ({"bits": None}, "bits is missing"),
        ({"bits": "4"}, "bits is '4', and must be a whole number"),
        ({"group_size": 0}, "group_size is 0; it must be at least 1, or -1"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported are gptq and gptq_v2"),
        ({"format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        ({"is_marlin_format": True}, "checkpoint_format is 'marlin'"),
    ],
)
def test_quant_09_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantError, match=message):
        gptq.read({"bits": 4, "group_size": 128, **config})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qzeros": None}, "it has no qzeros"),
        ({"scales": None}, "it has no scales"),
        ({"qweight": np.zeros((8, 32, 1), np.int32)}, r"qweight is I32 \[8, 32, 1\]; a matrix of I32 is needed"),
        ({"qweight": np.zeros((8, 32), np.float16)}, "qweight is F16"),
        ({"qweight": np.zeros((9, 32), np.int32)}, r"qweight is \[9, 32\], and \[8, 32\] is needed"),
        ({"scales": np.zeros((2, 32), np.int32)}, "scales is I32"),
        ({"scales": np.zeros((2, 24), np.float16)}, r"scales is \[2, 24\], and \[2, 32\] is needed"),
        ({"qzeros": np.zeros((2, 5), np.int32)}, "qzeros has 5 words for 32 rows, which is not 2, 3, 4 or 8 bits"),
        ({"g_idx": np.zeros(64, np.float16)}, "g_idx is F16"),
        ({"g_idx": np.full(64, 2, np.int32)}, "g_idx names groups 2 to 2, and there are 2"),
        ({"g_idx": np.full(64, -1, np.int32)}, "g_idx names groups -1 to -1"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(change: dict[str, Any], message: str) -> None:
    tensors = packing.gptq(packing.rounded(weight(32, 64), 4, packing.consecutive(64, 32)))
    tensors = {name: t for name, t in {**tensors, **change}.items() if t is not None}
    with pytest.raises(QuantError, match=message):
        read(tensors)


def test_groups_that_no_size_gives_are_refused() -> None:
    tensors = packing.gptq(packing.rounded(weight(32, 96), 4, packing.consecutive(96, 16)), with_index=False)
    for name in ("qzeros", "scales"):
        tensors[name] = tensors[name][:5]
    with pytest.raises(QuantError, match="96 columns are not 5 groups, of 128 or of any one size"):
        read(tensors)
