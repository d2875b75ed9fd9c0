"""HQQ: integers of 1 to 8 bits with a scale and a zero point, often no whole number, for each group (Badri and Shaji,
"Half-Quadratic Quantization of Large Machine Learning Models", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import Stored
from octavo.quant.affine import fitting
from octavo.quant.method import Head, Layout, QuantError, Values, plain

U8 = npt.NDArray[np.uint8]

_FLOATS = ("F32", "F16", "BF16")

_NUMBERS = {"8bit_u8": 1, "4bit_u8": 2, "3bit_32": 10, "2bit_u8": 4, "1bit_u8": 8}
"""How a matrix is packed -> integers in an element of W_q."""

_SETTINGS = (
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)
"""Tensors of one number, or of a text's bytes, that each quantized module has."""


class _Way(NamedTuple):
    """How a matrix is stored."""

    n_out: int
    n_in: int
    group: int
    axis: int
    packing: str
    bits: float


class Hqq:
    """Matrices as HQQLinear saves them: W_q, scale, zero, and settings as tensors.

    A value is (q - zero) scale. The matrix as one long row is cut into groups that follow one another with axis 1, and
    with axis 0 into groups whose elements lie as far apart as there are groups. Only the former have blocks of
    neighbours with a common scale; the latter become float32.

    HQQ works in the type of scale and zero; here scale * q - scale * zero is rounded once, to float32, wherever both
    products are float32 numbers, as they are for 16-bit scales and integers of up to 6 bits. Integers of 8 bits are
    stored less 128: there scale * (128 - zero) may be rounded before.
    """

    name = "hqq"
    endings = (".W_q", ".scale", ".zero", *(f".{setting}" for setting in _SETTINGS))
    marks = (".W_q",)

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        way = _way(heads)
        n_out, n_in, group, axis, packing, bits = way
        groups = n_out * n_in // group
        for ending in (".scale", ".zero"):
            head = heads.get(ending)
            if head is None or head.kind not in _FLOATS or int(np.prod(head.shape)) != groups:
                said = "not there" if head is None else f"{head.kind} {list(head.shape)}"
                raise QuantError(f"{ending} is {said}; {'/'.join(_FLOATS)} with {groups:,} values is needed")
        lines, size = (groups, group) if axis == 1 else (group, groups)
        need = -(-lines // _NUMBERS[packing]) * size * (4 if packing == "3bit_32" else 1)
        if (have := heads[".W_q"].values().nbytes) != need:
            raise QuantError(f".W_q has {have:,} bytes; {need:,} are needed for {packing} {[n_out, n_in]}")
        form = fitting(8 if packing == "8bit_u8" else 4, n_in, group) if axis == 1 else None

        def build(parts: Mapping[str, Values]) -> Stored:
            codes = _unpacked(packing, parts[".W_q"], lines, size)
            scale, zero = (parts[e].astype(np.float32).reshape(-1) for e in (".scale", ".zero"))
            if form is None:
                shape = (groups, 1) if axis == 1 else (1, groups)
                values = scale.reshape(shape) * codes.astype(np.float32) - (scale * zero).reshape(shape)
                return plain(values.reshape(n_out, n_in))
            q: npt.NDArray[Any] = codes.reshape(n_out, n_in)
            if form.bits == 8 and bits > 6:
                q, zero = (q ^ 128).view(np.int8), zero - 128
            d, m = (np.repeat(v, group // form.block).reshape(n_out, -1) for v in (scale, -scale * zero))
            return Stored(form.name, n_out, n_in, form.rows(q, d, m))

        return Layout("F32" if form is None else form.name, (n_out, n_in), build)


def read(config: Mapping[str, Any]) -> Hqq:
    """What the configuration says, each matrix says for itself."""
    return Hqq()


def _way(heads: Mapping[str, Head]) -> _Way:
    for name in ("quant_scale", "quant_zero"):
        if f".{name}" in heads and _number(heads, name):
            raise QuantError(f".{name} is 1: scales and zero points that are quantized themselves are not supported")
    packing = heads[".packing"].values().tobytes().decode("latin-1") if ".packing" in heads else "not there"
    if packing not in _NUMBERS:
        raise QuantError(f".packing is {packing!r}; {', '.join(_NUMBERS)} are supported")
    shape = heads[".shape"].values().reshape(-1).tolist() if ".shape" in heads else []
    group, axis = int(_number(heads, "group_size")), int(_number(heads, "axis"))
    if len(shape) != 2 or min(shape) < 1 or axis not in (0, 1) or group < 1 or shape[0] * shape[1] % group:
        raise QuantError(
            f".shape is {shape}, .axis {axis} and .group_size {group}; two sizes, 0 or 1 and a divisor of their "
            "product are needed"
        )
    return _Way(shape[0], shape[1], group, axis, packing, _number(heads, "nbits"))


def _number(heads: Mapping[str, Head], name: str) -> float:
    values = heads[f".{name}"].values() if f".{name}" in heads else np.zeros(0)
    if values.size != 1:
        raise QuantError(f".{name} has {values.size} numbers instead of one")
    return float(values.reshape(-1)[0])


def _unpacked(packing: str, packed: Values, lines: int, size: int) -> U8:
    """uint8 [lines, size]: the first integer of every element of W_q, from its highest bits, then the next of each."""
    raw = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
    whole = raw.view(np.int32 if packing == "3bit_32" else np.uint8).reshape(-1, size)
    count = _NUMBERS[packing]
    bits = 3 if count == 10 else 8 // count
    parts = [(whole >> bits * (count - 1 - i) & ((1 << bits) - 1)).astype(np.uint8) for i in range(count)]
    return np.concatenate(parts)[:lines]
