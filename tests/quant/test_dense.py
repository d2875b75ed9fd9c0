"""`dense` against the gguf package bit for bit, and against blocks worked out by hand."""

from __future__ import annotations

import struct
import warnings

import gguf
import ml_dtypes
import numpy as np
import pytest

from octavo.ops.contract import Stored
from octavo.quant import (
    FORMATS,
    GGUF_QUANTIZED,
    KINDS,
    about_rewriting,
    affine,
    codebook,
    dense,
    float8,
    mxfp4,
    rewritten,
    row_bytes,
    slabs,
)
from tests.ops.harness import random_stored


def _one(kind: str, block: bytes) -> np.ndarray:
    """The values of a matrix of one block."""
    n = KINDS[kind][0]
    return dense(Stored(kind, 1, n, np.frombuffer(block, np.uint8).reshape(1, -1)))[0]


def _half(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


@pytest.mark.parametrize("kind", sorted({"F32", "F16", "BF16", *GGUF_QUANTIZED} - {"Q1_0"}))  # it reads no Q1_0
@pytest.mark.parametrize("seed", [0, 1])
def test_random_bytes_equal_the_gguf_package(kind: str, seed: int) -> None:
    n_in = 1280
    data = np.random.default_rng(seed).integers(0, 256, (37, row_bytes(kind, n_in)), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    got = dense(Stored(kind, 37, n_in, data))
    assert got.shape == (37, n_in) and got.dtype == np.float32
    number = ~np.isnan(expected)
    assert number.any()
    assert np.array_equal(np.isnan(got), ~number)
    assert np.array_equal(got.view(np.uint32)[number], np.asarray(expected, np.float32).view(np.uint32)[number])


def test_slabs_of_a_large_matrix_are_put_in_order() -> None:
    """More rows than one slab unpacks: row r must still be row r."""
    n_out, n_in = 5000, 1024
    scales = np.arange(n_out, dtype=np.float16) / 8
    blocks = np.zeros((n_out, n_in // 32, 34), np.uint8)
    blocks[:, :, :2] = scales.view(np.uint8).reshape(n_out, 1, 2)
    blocks[:, :, 2] = 1
    got = dense(Stored("Q8_0", n_out, n_in, blocks.reshape(n_out, -1)))
    assert np.array_equal(got[:, ::32], np.repeat(scales.astype(np.float32)[:, None], n_in // 32, 1))


def test_rows_may_be_a_strided_view() -> None:
    data = np.random.default_rng(0).integers(0, 100, (10, 36), dtype=np.uint8)
    every_other = dense(Stored("Q4_0", 5, 64, data[::2]))
    assert np.array_equal(every_other, dense(Stored("Q4_0", 10, 64, data))[::2], equal_nan=True)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "<f4"), ("F16", "<f2"), ("BF16", ml_dtypes.bfloat16)])
def test_plain_values(kind: str, dtype: object) -> None:
    values = np.array([[0.0, -0.0, 1.5, -2.25], [np.inf, 96.0, 2**-14, -1.0]], np.float32)
    got = dense(Stored(kind, 2, 4, values.astype(dtype).view(np.uint8)))  # type: ignore[call-overload]
    assert np.array_equal(got.view(np.uint32), values.view(np.uint32))


def test_q4_0_by_hand() -> None:
    got = _one("Q4_0", _half(0.5) + bytes([0x3F]) + bytes(15))
    assert got[0] == 0.5 * (15 - 8) and got[16] == 0.5 * (3 - 8)
    assert (got[1:16] == -4).all() and (got[17:] == -4).all()


def test_q4_1_by_hand() -> None:
    got = _one("Q4_1", _half(0.25, -1) + bytes(15) + bytes([0x2A]))
    assert got[15] == 0.25 * 10 - 1 and got[31] == 0.25 * 2 - 1
    assert (got[:15] == -1).all() and (got[16:31] == -1).all()


def test_q5_0_by_hand() -> None:
    high = (1 << 0) | (1 << 17)
    got = _one("Q5_0", _half(2) + struct.pack("<I", high) + bytes([0x03, 0xF0]) + bytes(14))
    assert got[0] == 2 * (3 + 16 - 16) and got[16] == 2 * (0 - 16)
    assert got[1] == 2 * (0 - 16) and got[17] == 2 * (15 + 16 - 16)
    assert (got[2:16] == -32).all() and (got[18:] == -32).all()


def test_q5_1_by_hand() -> None:
    got = _one("Q5_1", _half(2, 1) + struct.pack("<I", 1 << 31) + bytes([0x07]) + bytes(15))
    assert got[0] == 2 * 7 + 1 and got[16] == 1 and got[31] == 2 * 16 + 1
    assert (got[1:31] == 1).all()


def test_q8_0_by_hand() -> None:
    got = _one("Q8_0", _half(0.5) + bytes([127, 128, 255]) + bytes(29))
    assert got[:3].tolist() == [63.5, -64.0, -0.5] and not got[3:].any()


def _scale_bytes(scales: list[int], mins: list[int]) -> bytes:
    """Eight 6-bit scales and mins packed the way the K formats do."""
    low = [values[i] | (values[i + 4] >> 4) << 6 for values in (scales, mins) for i in range(4)]
    return bytes(low + [(scales[i] & 15) | (mins[i] & 15) << 4 for i in range(4, 8)])


SCALES, MINS = [1, 2, 3, 63, 17, 33, 50, 63], [0, 5, 62, 7, 16, 32, 47, 63]


def test_q4_k_by_hand() -> None:
    nibbles = bytes([0x91] * 32 + [0x52] * 32 + [0xE3] * 32 + [0x74] * 32)
    got = _one("Q4_K", _half(0.5, 0.25) + _scale_bytes(SCALES, MINS) + nibbles).reshape(8, 32)
    for group, q in enumerate([1, 9, 2, 5, 3, 14, 4, 7]):
        assert (got[group] == 0.5 * SCALES[group] * q - 0.25 * MINS[group]).all(), group


def test_q5_k_by_hand() -> None:
    nibbles = bytes([0x91] * 32 + [0x52] * 32 + [0xE3] * 32 + [0x74] * 32)
    high = bytes([0b10000010] + [0] * 31)
    got = _one("Q5_K", _half(0.5, 0.25) + _scale_bytes(SCALES, MINS) + high + nibbles).reshape(8, 32)
    for group, q in enumerate([1, 9, 2, 5, 3, 14, 4, 7]):
        assert (got[group, 1:] == 0.5 * SCALES[group] * q - 0.25 * MINS[group]).all(), group
        first = q + (16 if group in (1, 7) else 0)
        assert got[group, 0] == 0.5 * SCALES[group] * first - 0.25 * MINS[group], group


def test_q6_k_by_hand() -> None:
    low, high = bytearray(128), bytearray(64)
    low[0], low[32], low[64 + 5] = 0x21, 0x43, 0x0F  # elements 0 and 64; 32 and 96; 128 + 5
    high[0], high[32 + 5] = 0b11_10_01_00, 0b00_00_00_01
    scales = bytes(range(1, 16)) + struct.pack("b", -128)
    got = _one("Q6_K", bytes(low) + bytes(high) + scales + _half(0.5))
    expected = np.full(256, -32.0, np.float32)
    expected[[0, 32, 64, 96, 133]] = [1 - 32, 3 + 16 - 32, 2 + 32 - 32, 4 + 48 - 32, 15 + 16 - 32]
    expected *= 0.5 * np.repeat(np.array([*range(1, 16), -128], np.float32), 16)
    assert np.array_equal(got, expected)


def test_mxfp4_by_hand() -> None:
    """127 is the scale 1; the codes are those of the specification: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = bytes(code | (15 - code) << 4 for code in range(16))
    assert _one("MXFP4", bytes([127]) + codes).tolist() == values + values[::-1]
    assert _one("MXFP4", bytes([120]) + codes).tolist() == [v / 128 for v in values + values[::-1]]
    smallest = _one("MXFP4", bytes([0]) + codes).astype(np.float64)
    assert smallest.tolist() == [v * 2.0**-127 for v in values + values[::-1]]


def test_mxfp4_of_codes_side_by_side() -> None:
    """Byte i of the codes holds elements 2i and 2i + 1; in a block, elements i and i + 16."""
    codes = np.random.default_rng(2).integers(0, 256, (5, 16), np.uint8)
    scales = np.array([120, 121, 127, 128, 130], np.uint8)
    got = dense(Stored("MXFP4", 5, 32, mxfp4.blocks_of(codes, scales)))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    want = np.stack([values[codes & 15], values[codes >> 4]], axis=2).reshape(5, 32)
    assert np.array_equal(got, want * 2.0 ** (scales.astype(int)[:, None] - 127))


def test_q2_k_by_hand() -> None:
    """Element 128 h + 32 j + i is bits 2j of byte 32 h + i; 16 elements share a scale and a minimum."""
    scales, q = bytearray(16), bytearray(64)
    scales[0], scales[1], scales[15] = 0x21, 0x0F, 0xF3
    q[0], q[17], q[63] = 0b11_10_01_00, 0b00_00_00_10, 0b01_00_00_00
    got = _one("Q2_K", bytes(scales) + bytes(q) + _half(0.5, 0.25))
    want = np.zeros(256, np.float32)
    want[:16], want[240:] = -0.25 * 2, -0.25 * 15
    want[17] = 0.5 * 15 * 2
    want[255] += 0.5 * 3 * 1
    assert np.array_equal(got, want)  # elements 32, 64 and 96 have scale 0


def test_q3_k_by_hand() -> None:
    """The high bit of element 32 g + i is bit g of byte i, and takes off 4 where it is not set."""
    high, low, scales = bytearray(32), bytearray(64), bytearray(12)
    high[0], high[5] = 0b10000001, 0b00000010
    low[0], low[32 + 5] = 0b00_00_00_11, 0b01_00_00_00
    scales[0], scales[8], scales[7] = 0x2F, 0b11_10_01_10, 0x50  # of 0 and 8; high bits of 0, 4, 8, 12; low of 15
    got = _one("Q3_K", bytes(high) + bytes(low) + bytes(scales) + _half(0.5)).reshape(16, 16)
    steps = [47 - 32, -32, -32, -32, 16 - 32, -32, -32, -32, 34 - 32, -32, -32, -32, 48 - 32, -32, -32, 5 - 32]
    want = np.full((16, 16), -4.0)
    want[0, 0], want[14, 0], want[2, 5] = 3, 0, 0  # elements 0, 224 and 37
    want[14, 5] = 1 - 4  # element 128 + 96 + 5
    assert np.array_equal(got, 0.5 * np.array(steps)[:, None] * want)


def test_iq4_by_hand() -> None:
    values = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    codes = bytes(code | (15 - code) << 4 for code in range(16))
    assert _one("IQ4_NL", _half(0.5) + codes).tolist() == [0.5 * v for v in values + values[::-1]]
    high = struct.pack("<H", 0b10 << 14 | 0b11)  # groups 7 and 0
    got = _one("IQ4_XS", _half(0.5) + high + bytes([0xF1, 0, 0, 0x70]) + codes * 8).reshape(8, 32)
    scales = [0x31 - 32, 0x0F - 32, -32, -32, -32, -32, -32, 0x27 - 32]
    assert np.array_equal(got, 0.5 * np.outer(scales, values + values[::-1]))


def test_q1_0_by_hand() -> None:
    got = _one("Q1_0", _half(1.5) + bytes([0b00000101]) + bytes(14) + bytes([0x80]))
    want = np.full(128, -1.5)
    want[[0, 2, 127]] = 1.5
    assert np.array_equal(got, want)


def test_integers_with_float32_scales_by_hand() -> None:
    scales = struct.pack("<ff", 0.1, -3.0)
    d = np.float32(0.1)
    assert _one("INT4_32", scales + bytes([0x3F]) + bytes(15))[[0, 1, 16]].tolist() == [d * 15 - 3, -3, d * 3 - 3]
    got = _one("INT4_128", scales + bytes(48) + bytes(15) + bytes([0xA2]))
    assert got[[96 + 15, 96 + 31]].tolist() == [d * 2 - 3, d * 10 - 3] and (np.delete(got, [111, 127]) == -3).all()
    for kind, block in (("INT8_32", 32), ("INT8_128", 128)):
        got = _one(kind, scales + bytes([127, 128]) + bytes(block - 2))
        assert got[:3].tolist() == [d * 127 - 3, d * -128 - 3, -3] and (got[2:] == -3).all()


@pytest.mark.parametrize(
    ("form", "group"), [(form, group) for form in affine.FORMATS for group in (32, 128, 256) if group % form.block == 0]
)
def test_rows_of_integers(form: affine.Affine, group: int) -> None:
    """Groups may be longer than blocks."""
    rng = np.random.default_rng(group)
    q = rng.integers(0, 16, (5, 512)) if form.bits == 4 else rng.integers(-128, 128, (5, 512))
    d, m = (rng.standard_normal((5, 512 // group)).astype(np.float32) for _ in range(2))
    got = dense(Stored(form.name, 5, 512, form.rows(q, d, m)))
    long_d, long_m = (np.repeat(x, group, axis=1) for x in (d, m))
    assert np.array_equal(got, long_d * q.astype(np.float32) + long_m)


def test_which_format_holds_groups_of_integers() -> None:
    assert affine.fitting(4, 512, 128) is affine.INT4_128 and affine.fitting(4, 512, 512) is affine.INT4_128
    assert affine.fitting(4, 512, 64) is affine.INT4_32 and affine.fitting(4, 96, 96) is affine.INT4_32
    assert affine.fitting(8, 512, 128) is affine.INT8_128 and affine.fitting(8, 512, 32) is affine.INT8_32
    assert (
        affine.fitting(4, 512, 16) is None and affine.fitting(8, 48, 48) is None and affine.fitting(3, 512, 128) is None
    )


@pytest.mark.parametrize(
    ("kind", "codes", "values"),
    [
        (
            "F8_E4M3_32",
            [0x00, 0x01, 0x07, 0x08, 0x38, 0x3C, 0x7E, 0x7F, 0x80, 0x81, 0xB8, 0xFE, 0xFF],
            [0, 2**-9, 7 * 2**-9, 2**-6, 1, 1.5, 448, np.nan, 0, -(2**-9), -1, -448, np.nan],
        ),
        (
            "F8_E5M2_32",
            [0x00, 0x01, 0x03, 0x04, 0x3C, 0x3E, 0x7B, 0x7C, 0x7D, 0x80, 0xBC, 0xFB, 0xFC],
            [0, 2**-16, 3 * 2**-16, 2**-14, 1, 1.5, 57344, np.inf, np.nan, 0, -1, -57344, -np.inf],
        ),
    ],
)
def test_float8_by_hand(kind: str, codes: list[int], values: list[float]) -> None:
    got = _one(kind, struct.pack("<f", 0.5) + bytes(codes) + bytes(32 - len(codes)))
    assert np.array_equal(got[: len(codes)], np.array(values) * 0.5, equal_nan=True) and not got[len(codes) :].any()


def test_rows_of_float8() -> None:
    values = np.random.default_rng(3).standard_normal((4, 128)).astype(ml_dtypes.float8_e4m3fn)
    d = np.array([[1, 2], [3, 4], [0.5, 0.25], [-1, 1]], np.float32)
    got = dense(Stored("F8_E4M3_32", 4, 128, float8.F8_E4M3_32.rows(values.view(np.uint8), d)))
    assert np.array_equal(got, values.astype(np.float32) * np.repeat(d, 64, axis=1))


def test_codebooks_by_hand() -> None:
    codes = bytes(code | (15 - code) << 4 for code in range(16))
    positive = [0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 0.5, 2 / 12, 0.25]
    fp4 = np.array(positive + [-v for v in positive], np.float32)
    assert np.array_equal(_one("FP4_32", struct.pack("<f", 2) + codes), 2 * np.concatenate([fp4, fp4[::-1]]))
    nf4 = _one("NF4_32", struct.pack("<f", 1) + codes)
    assert np.array_equal(nf4[:16], nf4[:15:-1]) and (np.diff(nf4[:16]) > 0).all()
    assert nf4[[0, 1, 7, 8, 15]].tolist() == np.float32([-1, -0.6961928009986877, 0, 0.07958029955625534, 1]).tolist()
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = _one("E2M1_16", struct.pack("<f", 0.5) + bytes(code | (code + 8) << 4 for code in range(8)))
    assert got.tolist() == [0.5 * v for v in e2m1] + [-0.5 * v for v in e2m1]


@pytest.mark.parametrize("form", codebook.FORMATS)
def test_rows_of_codes(form: codebook.Codebook) -> None:
    rng = np.random.default_rng(1)
    codes, d = rng.integers(0, 16, (3, 256), np.uint8), rng.standard_normal((3, 4)).astype(np.float32)
    got = dense(Stored(form.name, 3, 256, form.rows(codes, d)))
    assert np.array_equal(got, np.repeat(d, 64, axis=1) * form.table[codes])


def test_nothing_is_rewritten_without_need() -> None:
    stored = Stored("Q4_0", 2, 32, np.zeros((2, 18), np.uint8))
    assert rewritten(stored) is stored
    with pytest.raises(ValueError, match=r"needs uint8 \[2, 66\]"):
        rewritten(Stored("TQ2_0", 2, 256, np.zeros((2, 65), np.uint8)))
    assert about_rewriting("Q4_0") is None


@pytest.mark.parametrize("threads", [1, 3])
def test_rewriting_on_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB", 1024)
    stored = random_stored("IQ2_XS", 21, 256, np.random.default_rng(5))
    got = rewritten(stored, threads)
    assert got.kind == "IQ2_CODES" and np.array_equal(dense(got), dense(stored))
    assert about_rewriting("IQ2_XS") == (
        "IQ2_XS weights are rewritten as IQ2_CODES, without loss: 6 bits each instead of 2.3"
    )


def test_row_bytes_and_errors() -> None:
    assert row_bytes("Q6_K", 512) == 420 and row_bytes("BF16", 3) == 6
    with pytest.raises(ValueError, match="640 elements is not a whole number of Q4_K blocks"):
        row_bytes("Q4_K", 640)
    with pytest.raises(ValueError, match="unknown weight format 'Q8_K'; known are F32"):
        row_bytes("Q8_K", 256)
    with pytest.raises(ValueError, match=r"needs uint8 \[2, 18\], not uint8 \[2, 17\]"):
        dense(Stored("Q4_0", 2, 32, np.zeros((2, 17), np.uint8)))


def test_every_format_knows_its_name() -> None:
    assert [f.name for f in FORMATS.values()] == list(KINDS)


@pytest.mark.parametrize(("wide", "narrow"), [("INT4_128", "INT4_32"), ("INT8_128", "INT8_32")])
def test_blocks_of_128_can_be_divided(wide: str, narrow: str) -> None:
    rng = np.random.default_rng(0)
    form = {f.name: f for f in affine.FORMATS}[wide]
    q = rng.integers(0, 16, (5, 256)) if form.bits == 4 else rng.integers(-128, 128, (5, 256))
    d, m = rng.normal(size=(2, 5, 2)).astype(np.float32)
    rows = form.rows(q, d, m)
    kind, divided = affine.narrowed(wide, rows)
    assert kind == narrow
    assert np.array_equal(dense(Stored(kind, 5, 256, divided)), dense(Stored(wide, 5, 256, rows)))
    assert affine.narrowed(kind, divided) == (kind, divided)


def test_matrices_without_elements_have_no_values() -> None:
    for kind in KINDS:
        for n_out, n_in in ((0, KINDS[kind][0]), (3, 0)):
            stored = Stored(kind, n_out, n_in, np.zeros((n_out, row_bytes(kind, n_in)), np.uint8))
            assert dense(stored).shape == (n_out, n_in)
