"""optimum-quanto: integers or floats of 8 bits with a scale per row, and integers of 4 or 2 bits with a scale and a
shift per group, as `save_pretrained` of its models writes them (version 0.2.7), beside quanto_qmap.json.

Of 8 bits: weight._data [n_out, n_in] and weight._scale [n_out, 1] or one number; a value is q scale. Of fewer:
weight._data._data uint8, weight._scale and weight._shift [groups, 1]; groups follow one another along the rows, and the
tensor does not say how many are a row. Integers, all of them 0 or above, lie group by group: the first groups in the
lowest bits, as many as there are rows of bytes, then the next above them. A value is q scale - shift where shift is a
float, (q - shift) scale where it is an integer.
What input_scale and output_scale say of activations is of no concern: they stay floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from octavo.ops.contract import Stored
from octavo.quant import affine
from octavo.quant.float8 import F8_E4M3_32, F8_E5M2_32
from octavo.quant.method import Head, Layout, QuantError, Values, plain

_DATA, _PACKED, _SCALE, _SHIFT = (f".weight.{name}" for name in ("_data", "_data._data", "_scale", "_shift"))
_FLOATS = ("F32", "F16", "BF16")
_FORMATS = {"F8_E4M3": F8_E4M3_32, "F8_E5M2": F8_E5M2_32}


class Quanto:
    """quant_method "quanto"."""

    name = "quanto"
    endings = (_DATA, _PACKED, _SCALE, _SHIFT, ".weight", ".input_scale", ".output_scale")
    marks = (_SCALE, ".input_scale")
    """A module that was left in floats has an input_scale as well."""

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        if _SCALE not in heads and ".weight" in heads:
            return _floats(heads[".weight"])
        scale, data = heads.get(_SCALE), heads.get(_PACKED) or heads.get(_DATA)
        if scale is None or data is None or scale.kind not in _FLOATS or len(data.shape) != 2:
            raise QuantError(f"{_SCALE[1:]} in floats and a matrix {_DATA[1:]} or {_PACKED[1:]} are needed")
        return _small(data, scale, heads.get(_SHIFT)) if _PACKED in heads else _of_8_bits(data, scale)


def read(config: Mapping[str, Any]) -> Quanto:
    """What the configuration says, each matrix says for itself."""
    return Quanto()


def _floats(weight: Head) -> Layout:
    if weight.kind not in _FLOATS or not weight.shape:
        raise QuantError(f"weight is {weight.kind} {list(weight.shape)}; {'/'.join(_FLOATS)} are needed")

    def build(parts: Mapping[str, Values]) -> Stored:
        rows = np.ascontiguousarray(parts[".weight"].reshape(-1, weight.shape[-1]))
        return Stored(weight.kind, len(rows), rows.shape[1], rows.view(np.uint8))

    return Layout(weight.kind, weight.shape, build)


def _of_8_bits(data: Head, scale: Head) -> Layout:
    n_out, n_in = data.shape
    if scale.shape not in ((n_out, 1), ()) or data.kind not in ("I8", *_FORMATS):
        raise QuantError(
            f"_data is {data.kind} {list(data.shape)} and _scale {list(scale.shape)}; I8 or {' or '.join(_FORMATS)} "
            "[n_out, n_in] and [n_out, 1] are needed"
        )
    form = affine.fitting(8, n_in, n_in) if data.kind == "I8" else _FORMATS[data.kind]
    kind = form.name if form is not None and n_in % form.block == 0 else "F32"

    def build(parts: Mapping[str, Values]) -> Stored:
        d = np.broadcast_to(parts[_SCALE].astype(np.float32).reshape(-1, 1), (n_out, 1))
        if isinstance(form, affine.Affine):
            return Stored(kind, n_out, n_in, form.rows(parts[_DATA], d, np.zeros_like(d)))
        if form is None:
            return plain(parts[_DATA] * d)
        if kind == "F32":
            return plain(parts[_DATA].view(form.dtype).astype(np.float32) * d)
        return Stored(kind, n_out, n_in, form.rows(parts[_DATA], d))

    return Layout(kind, data.shape, build)


def _small(data: Head, scale: Head, shift: Head | None) -> Layout:
    (lines, size), groups = data.shape, scale.shape[0] if scale.shape else 0
    bits = next((bits for bits in (4, 2) if lines == -(-groups * bits // 8)), 0)
    whole = shift is not None and shift.kind == "I8"
    good = shift is not None and scale.shape == shift.shape == (groups, 1) and (whole or shift.kind in _FLOATS)
    if data.kind != "U8" or not good or not bits:
        said = "not there" if shift is None else f"{shift.kind} {list(shift.shape)}"
        raise QuantError(
            f"_data._data is {data.kind} {list(data.shape)}, _scale {list(scale.shape)} and _shift {said}; uint8 "
            "[groups bits / 8, columns of one], and [groups, 1] of both for 4 or 2 bits are needed"
        )
    form = affine.fitting(4, size, size)
    return Layout(
        form.name if form else "F32", (groups, size), partial(_build_small, form, bits, whole), in_groups=True
    )


def _build_small(form: affine.Affine | None, bits: int, whole: bool, parts: Mapping[str, Values]) -> Stored:
    packed, d, shift = parts[_PACKED], parts[_SCALE].astype(np.float32), parts[_SHIFT].astype(np.float32)
    q = np.concatenate([packed >> at & 2**bits - 1 for at in range(0, 8, bits)])[: len(d)]
    m = -(d * shift) if whole else -shift
    if form is None:
        return plain(d * q + m)
    return Stored(form.name, len(q), q.shape[1], form.rows(q, d, m))
