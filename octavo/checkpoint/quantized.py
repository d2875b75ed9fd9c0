"""Matrices that a quantization method keeps in several tensors, seen as one tensor each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from octavo.checkpoint.errors import CheckpointError, believing
from octavo.checkpoint.tensor import AGAIN, U8, Tensor
from octavo.ops.contract import Stored
from octavo.quant import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    modelopt,
    mxfp4,
    quanto,
    torchao,
)
from octavo.quant.method import Head, Layout, Method, QuantError, Values

METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "auto-round": auto_round.read,
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "hqq": hqq.read,
    "intel/auto-round": auto_round.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
    "quanto": quanto.read,
    "torchao": torchao.read,
}
"""quant_method of config.json -> what reads the rest of quantization_config."""

READ_AT_ONCE = (
    *(".g_idx", ".weight_g_idx", ".weight_shape"),
    *(".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4", ".weight.quant_map"),
    ".weight_format",
    *(".nbits", ".group_size", ".shape", ".axis", ".packing", ".quant_scale", ".quant_zero"),
)
"""What the names of tensors end in whose values say what a matrix is: for all others their headers do."""

_DTYPES: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": np.int8,
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": np.uint8,
    "BOOL": np.uint8,
}
"""How a method gets a tensor; floats of 8 bits as their bytes."""


def quantized(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with those of each quantized module as one tensor "MODULE.weight" of a format of `octavo.quant`, put
    together when it is read: one matrix at a time is in memory.

    Everything is checked from the headers. Raises CheckpointError for a method that is not known and for tensors that
    do not fit together.
    """
    said = config.get("quantization_config")
    if not said:
        return tensors
    method = find(said)
    out = dict(tensors)
    for module in _modules(method, tensors):
        parts = {e: out.pop(module + e) for e in method.endings if module + e in out}
        where = next(iter(parts.values())).file
        try:
            layout = method.layout(module, {e: _head(t) for e, t in parts.items()})
        except QuantError as error:
            raise CheckpointError(f"{where}: {module!r} cannot be read as {method.name}: {error}") from None
        if (name := module + layout.ending) in out:
            raise CheckpointError(f"{where}: {name!r} is there twice, as it is and as {method.name} keeps it. {AGAIN}")
        out[name] = Tensor(
            layout.kind,
            layout.shape,
            np.zeros(0, np.uint8),
            where,
            join=partial(_join, layout, parts),
            joined_bytes=sum(t.bytes for t in parts.values()),
            in_groups=layout.in_groups,
        )
    return out


def find(said: Any) -> Method:
    """What reads a checkpoint with this quantization_config. Raises CheckpointError that lists the known methods."""
    if not isinstance(said, dict) or not isinstance(name := said.get("quant_method"), str):
        raise CheckpointError(
            f"quantization_config is {str(said)[:200]}; an object with a quant_method is needed. Download config.json "
            "again."
        )
    if name not in METHODS:
        raise CheckpointError(
            f"the checkpoint is quantized with {name!r}, which cannot be read; known are {', '.join(METHODS)} and GGUF "
            f"files. Use the unquantized model, or a GGUF file of it."
        )
    try:
        return METHODS[name](said)
    except QuantError as error:
        raise CheckpointError(f"quantization_config of the method {name!r}: {error}") from None


def _modules(method: Method, tensors: Mapping[str, Tensor]) -> list[str]:
    found = {name[: -len(mark)] for mark in method.marks for name in tensors if name.endswith(mark)}
    return sorted(found)


def _head(tensor: Tensor) -> Head:
    return Head(tensor.kind, tensor.shape, partial(_values, tensor), tensor.metadata)


def _join(layout: Layout, parts: Mapping[str, Tensor], index: int | None) -> Stored:
    """The matrix, or entry `index` of a stack."""
    where = next(iter(parts.values())).file
    with believing(f"{where}: a quantized matrix"):
        values = {
            ending: _values(tensor, index if tensor.shape[:1] == layout.shape[:1] else None)  # others are of all
            for ending, tensor in parts.items()
        }
        stored = layout.build(values)
    *rows, n_in = layout.shape if index is None else layout.shape[1:]
    if stored[:3] != (layout.kind, math.prod(rows), n_in):
        raise CheckpointError(f"{where} is broken: a matrix is not what its header says. {AGAIN}")
    return stored


def _values(tensor: Tensor, index: int | None = None) -> Values:
    data: U8 = tensor.data
    values: Values = data.view(_DTYPES[tensor.kind]) if data.nbytes else np.zeros(0, _DTYPES[tensor.kind])
    values = values.reshape(tensor.shape)
    return values if index is None else values[index]
