"""torchao: its quantized tensors as safetensors keep them, taken apart into plain ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.ops.contract import F32, Stored
from octavo.quant.affine import INT4_32, fitting
from octavo.quant.float8 import F8_E4M3_32, F8_E5M2_32
from octavo.quant.method import Head, Layout, QuantError, Values, plain

_FLOATS = ("F32", "F16", "BF16")

_QDATA, _SCALE, _ZERO, _SMOOTH = (f"._weight_{name}" for name in ("qdata", "scale", "zero_point", "act_pre_scale"))
_TILED = "._weight_scale_and_zero"

_TENSORS = {
    "Int8Tensor": ("I8",),
    "IntxUnpackedToInt8Tensor": ("I8",),
    "Int4Tensor": ("I8", "U8"),
    "Float8Tensor": ("F8_E4M3", "F8_E5M2"),
}
"""What can be read: the names of torchao's classes, and the types of their integers or floats."""

_TILES = "Int4TilePackedTo4dTensor"
_IN_WORD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its 8 numbers each half byte of a word is, from the lowest on."""
_IN_TILES = (0, 1, 8, 9, 16, 17, 24, 25)
"""How far each of these lies behind the first, in two tiles of 16 columns."""


class Torchao:
    """Matrices as transformers saves them with torchao's flatten_tensor_state_dict: NAME._weight_qdata, _scale and
    _zero_point, and what class they were in the metadata of the file.

    Int8Tensor, and IntxUnpackedToInt8Tensor of 1 to 8 bits: a value is (q - zero) scale; that is rounded once, to
    float32, where scale * zero is a float32 number (zero is 0, or scale has 16 bits). Int4Tensor: q scale + zero, q
    from -8 to 7, which torchao computes as (q + 8) scale + (zero - 8 scale). Float8Tensor: q scale.
    Int4TilePackedTo4dTensor: the same numbers in the order in which NVIDIA's tensor cores take tiles of 8 rows and 16
    columns (PyTorch, aten/src/ATen/native/cuda/int4mm.cu), filled up with rows and columns of no meaning.
    Quantization of activations that belongs to a matrix is not done.
    """

    name = "torchao"
    endings = (_QDATA, _SCALE, _ZERO, _SMOOTH, _TILED)
    marks = (_QDATA, _SCALE)

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        missing = Head("not there", (), lambda: np.zeros(0))
        q, scale = heads.get(_QDATA, missing), heads.get(_SCALE, missing)
        said = _said(module, q)
        kind = said.get("_type")
        if kind not in (*_TENSORS, _TILES):
            raise QuantError(
                f"it is a {kind}; {', '.join((*_TENSORS, _TILES))} are supported. Save the model in one of them"
            )
        if _SMOOTH in heads:
            raise QuantError(f"{_SMOOTH} (a scale of activations) is not supported")
        if kind == _TILES:
            return _tiles(q, heads.get(_TILED, missing), said)
        if q.kind not in _TENSORS[kind] or len(q.shape) != 2 or scale.kind not in _FLOATS:
            raise QuantError(
                f"{_QDATA} is {q.kind} {list(q.shape)} and {_SCALE} {scale.kind}; {'/'.join(_TENSORS[kind])} "
                f"[n_out, n_in] and {'/'.join(_FLOATS)} are needed"
            )
        zero = heads.get(_ZERO)
        if zero is not None and zero.shape != scale.shape:
            raise QuantError(f"{_ZERO} has shape {list(zero.shape)} and {_SCALE} {list(scale.shape)}")
        if kind == "Int4Tensor":
            return _int4(q, scale, zero)
        group = _group(q, scale)
        if kind == "Float8Tensor":
            return _float8(q, group)
        return _integers(q, group, small=_target(said) in ("int1", "int2", "int3", "int4"))


def read(config: Mapping[str, Any]) -> Torchao:
    """What the configuration says, each matrix says for itself."""
    return Torchao()


def _said(module: str, head: Head) -> dict[str, Any]:
    """What the file's metadata says of the weight of a module."""
    try:
        said = json.loads(head.metadata.get(f"{module}.weight", ""))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise QuantError("the metadata of its file does not say what it is, as torchao would have written there")
    return said


def _target(said: Mapping[str, Any]) -> Any:
    """The type whose range the integers have, though they are stored as int8."""
    data = said.get("_data")
    target = data.get("target_dtype") if isinstance(data, dict) else None
    return target.get("_data") if isinstance(target, dict) else None


def _group(q: Head, scale: Head) -> int:
    """Neighbours in a row that share a scale; rows that share one are repeated."""
    (n_out, n_in), shape = q.shape, scale.shape
    if len(shape) != 2 or n_out % max(1, shape[0]) or n_in % max(1, shape[1]) or 0 in shape:
        raise QuantError(f"{_SCALE} has shape {list(shape)}, which does not divide {[n_out, n_in]}")
    return n_in // shape[1]


def _by_rows(values: Values, n_out: int) -> F32:
    """float32 [n_out, groups in a row]."""
    out: F32 = np.repeat(values.astype(np.float32), n_out // values.shape[0], axis=0)
    return out


def _integers(q: Head, group: int, small: bool) -> Layout:
    n_out, n_in = q.shape
    form = fitting(4 if small else 8, n_in, group)

    def build(parts: Mapping[str, Values]) -> Stored:
        codes, d = parts[_QDATA], _by_rows(parts[_SCALE], n_out)
        zero = _by_rows(parts[_ZERO], n_out) if _ZERO in parts else np.zeros_like(d)
        if form is None:
            wide, shift = (np.repeat(v, group, axis=1) for v in (d, d * zero))
            return plain(wide * codes.astype(np.float32) - shift)
        if small:
            codes, zero = codes + 8, zero + 8
        return Stored(form.name, n_out, n_in, form.rows(codes, d, -d * zero))

    return Layout("F32" if form is None else form.name, q.shape, build)


def _int4(q: Head, scale: Head, zero: Head | None) -> Layout:
    n_out, n_in = q.shape[0], 2 * q.shape[1]
    groups = scale.shape[0] if scale.shape[1:] == (n_out,) else 0
    if zero is None or not groups or n_in % (groups * INT4_32.block):
        raise QuantError(
            f"{_SCALE} has shape {list(scale.shape)}; [groups of a multiple of {INT4_32.block}, {n_out}] and {_ZERO} "
            "are needed"
        )
    form = fitting(4, n_in, n_in // groups) or INT4_32

    def build(parts: Mapping[str, Values]) -> Stored:
        packed = parts[_QDATA].view(np.uint8)
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(n_out, n_in) ^ 8
        d, m = (np.ascontiguousarray(parts[e].astype(np.float32).T) for e in (_SCALE, _ZERO))
        return Stored(form.name, n_out, n_in, form.rows(codes, d, m - 8 * d))

    return Layout(form.name, (n_out, n_in), build)


def _tiles(q: Head, both: Head, said: Mapping[str, Any]) -> Layout:
    """Words int32 [rows / 8, columns / 16 k, 32, k / 2] of k tiles, thread t of 32 having row t / 4 and columns from
    2 (t % 4) on; scales and zeros [groups, rows, 2]."""
    data = said.get("_data")
    n_out, n_in = _sizes(data, "shape")
    _, group = _sizes(data, "block_size")
    if not n_out or not group or q.kind != "I32" or len(q.shape) != 4 or q.shape[2] != 32 or both.kind not in _FLOATS:
        raise QuantError(
            f"{_QDATA} is {q.kind} {list(q.shape)} and {_TILED} {both.kind}; I32 [rows / 8, n, 32, m], "
            f"{'/'.join(_FLOATS)}, and a shape and block_size of two numbers are needed"
        )
    rows, columns = 8 * q.shape[0], 32 * q.shape[1] * q.shape[3]
    form = fitting(4, n_in, group)
    if both.shape != (columns // group, rows, 2) or n_out > rows or n_in > columns or form is None:
        raise QuantError(
            f"{_TILED} has shape {list(both.shape)} beside {rows} rows and {columns} columns in groups of {group}, of "
            f"which {[n_out, n_in]} count; groups of a multiple of {INT4_32.block} are needed"
        )

    def build(parts: Mapping[str, Values]) -> Stored:
        words = np.ascontiguousarray(parts[_QDATA]).view(np.uint32)
        thread = np.arange(32)
        pair = (np.arange(q.shape[1])[:, None] * q.shape[3] + np.arange(q.shape[3])) * 32  # its first column
        codes = np.empty((rows, columns), np.uint8)
        row = np.arange(0, rows, 8)[:, None, None, None] + thread[:, None] // 4
        for place, number in enumerate(_IN_WORD):
            column = pair[:, None, :] + (thread % 4 * 2 + _IN_TILES[number])[:, None]
            codes[row, column] = words >> np.uint32(4 * place) & 15
        of_block = np.arange(0, n_in, form.block) // group
        scale, zero = (parts[_TILED][:, :n_out, i].astype(np.float32).T[:, of_block] for i in range(2))
        return Stored(form.name, n_out, n_in, form.rows(codes[:n_out, :n_in], scale, zero - 8 * scale))

    return Layout(form.name, (n_out, n_in), build)


def _sizes(data: Any, key: str) -> tuple[int, int]:
    """Two sizes that metadata has under a key; zeros where it has not."""
    value = data.get(key) if isinstance(data, dict) else None
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return 0, 0


def _float8(q: Head, group: int) -> Layout:
    n_out, n_in = q.shape
    form = F8_E4M3_32 if q.kind == "F8_E4M3" else F8_E5M2_32
    fits = group % form.block == 0

    def build(parts: Mapping[str, Values]) -> Stored:
        d = _by_rows(parts[_SCALE], n_out)
        if not fits:
            return plain(parts[_QDATA].view(form.dtype).astype(np.float32) * np.repeat(d, group, axis=1))
        return Stored(form.name, n_out, n_in, form.rows(parts[_QDATA], d))

    return Layout(form.name if fits else "F32", q.shape, build)
