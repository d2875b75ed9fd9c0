"""Safetensors files: a JSON header with names, types, shapes and offsets, then the data.

The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.tensor import AGAIN, Tensor, check_spans, map_file, number_of_elements

_MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file by name. Only the header is read; every offset is checked against the file's size.

    Raises CheckpointError.
    """
    file = map_file(path)
    size = int.from_bytes(file[:8].tobytes(), "little") if len(file) >= 8 else len(file)
    if size > _MAX_HEADER:
        raise CheckpointError(
            f"{path} is not a safetensors file: it announces a header of {size:,} bytes (at most "
            f"{_MAX_HEADER:,} are allowed). {AGAIN}"
        )
    if len(file) < 8 + size:
        raise CheckpointError(f"{path} is shorter than its header: {len(file):,} bytes. {AGAIN}")
    header = _header(path, file[8 : 8 + size].tobytes())
    said = header.pop("__metadata__", {})
    metadata = {key: value for key, value in said.items() if isinstance(value, str)} if isinstance(said, dict) else {}
    data = file[8 + size :]
    spans, tensors = [], {}
    for name, entry in header.items():
        kind, shape, start, end = _entry(path, name, entry)
        spans.append((name, start, end))
        tensors[name] = Tensor(kind, shape, data[start:end], path, metadata=metadata)
    check_spans(path, spans, len(data))
    used = max((end for _, _, end in spans), default=0)
    if used != len(data):
        raise CheckpointError(f"{path} has {len(data) - used:,} bytes that belong to no tensor. {AGAIN}")
    return tensors


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(f"{path} is broken: its header has {twice!r} twice. {AGAIN}")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({e}). {AGAIN}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object. {AGAIN}")
    return header


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, start and end of one tensor, checked against each other."""
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path} is broken: the entry of tensor {name!r} is incomplete. {AGAIN}") from None
    elements = number_of_elements(path, name, shape)
    if not isinstance(kind, str) or kind not in _BITS:
        raise CheckpointError(
            f"{path}: tensor {name!r} has the type {kind!r}; known are {', '.join(_BITS)}. Convert "
            f"the model to bfloat16."
        )
    if (
        type(start) is not int
        or type(end) is not int
        or not 0 <= start <= end
        or elements * _BITS[kind] != (end - start) * 8
    ):
        raise CheckpointError(
            f"{path} is broken: tensor {name!r} of type {kind} and shape {list(shape)} does not fit "
            f"its offsets [{start!r}, {end!r}). {AGAIN}"
        )
    return kind, shape, start, end
