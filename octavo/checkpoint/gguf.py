"""GGUF files: key/value metadata, tensor infos, then the data.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little-endian here.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.tensor import AGAIN, U8, Tensor, check_spans, map_file, number_of_elements
from octavo.quant import KINDS

_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_U64 = struct.Struct("<Q")


class HeaderCutOff(CheckpointError):
    """The file ends before its header does."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file, under the file's own names; shapes are [n_out, n_in].

    Values are bool, int, float, str, list[str], or a numpy array where the file has an array of numbers. The tensors'
    data is not read; every offset is checked against the file's size. Raises CheckpointError.
    """
    file = map_file(path)
    reader = _Reader(path, file)
    tensor_count, pair_count = _start(reader)
    reader.check_count("metadata entries", pair_count, 8 + 4 + 1)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.text("a metadata key")
        if key in metadata:
            raise CheckpointError(f"{path} is broken: its metadata has {key!r} twice. {AGAIN}")
        metadata[key] = reader.value(key, reader.u32())
    reader.check_count("tensors", tensor_count, 8 + 4 + 4 + 8)
    infos: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = reader.text("a tensor's name")
        if name in infos:
            raise CheckpointError(f"{path} is broken: it has the tensor {name!r} twice. {AGAIN}")
        infos[name] = _info(reader, name)
    return metadata, _tensors(reader, metadata, infos)


def _tensors(
    reader: _Reader, metadata: dict[str, Any], infos: dict[str, tuple[str, tuple[int, ...], int, int]]
) -> dict[str, Tensor]:
    """Tensors from their infos (kind, shape, offset, bytes), once all offsets are known to be sound."""
    path = reader.path
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{path} is broken: general.alignment is {alignment!r}, not a power of two. {AGAIN}")
    data = reader.file[-(-reader.at // alignment) * alignment :]
    for name, (_, _, offset, _) in infos.items():
        if offset % alignment:
            raise CheckpointError(
                f"{path} is broken: the offset {offset} of tensor {name!r} is not a multiple of {alignment}. {AGAIN}"
            )
    check_spans(path, ((name, offset, offset + size) for name, (_, _, offset, size) in infos.items()), len(data))
    return {
        name: Tensor(kind, shape, data[offset : offset + size], path)
        for name, (kind, shape, offset, size) in infos.items()
    }


def _start(reader: _Reader) -> tuple[int, int]:
    """Magic and version; returns the numbers of tensors and of metadata entries."""
    path, magic = reader.path, reader.file[:4].tobytes()
    if magic != b"GGUF":
        raise CheckpointError(
            f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'. "
            f"Older ggml files must be converted again from the original model."
        )
    reader.at = 4
    version = reader.u32()
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{path} is a big-endian GGUF file. Convert it with `gguf-convert-endian PATH little`.")
    if version not in (2, 3):
        raise CheckpointError(
            f"{path} has GGUF version {version}; versions 2 and 3 can be read. Convert the model "
            f"again with a current tool."
        )
    return reader.u64(), reader.u64()


def _info(reader: _Reader, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """Kind, shape, offset and bytes of the tensor whose info follows."""
    path = reader.path
    dimensions = reader.u32()
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{path} is broken: tensor {name!r} has {dimensions} dimensions. {AGAIN}")
    shape = tuple(reader.u64() for _ in range(dimensions))[::-1]
    number, offset = reader.u32(), reader.u64()
    kind = _TYPES.get(number, f"number {number}")
    if kind not in KINDS:
        readable = ", ".join(known for known in _TYPES.values() if known in KINDS)
        raise CheckpointError(
            f"{path}: tensor {name!r} has the type {kind}, which cannot be read; readable are {readable}. Take a file "
            f"in one of these (Q4_K_M or Q8_0 are common) or convert it with `llama-quantize --allow-requantize`."
        )
    block, size = KINDS[kind]
    if shape[-1] % block:
        raise CheckpointError(
            f"{path} is broken: tensor {name!r} of type {kind} has rows of {shape[-1]} elements, not "
            f"a multiple of {block}. {AGAIN}"
        )
    return kind, shape, offset, number_of_elements(path, name, shape) // block * size


class _Reader:
    """Walks through the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, file: U8) -> None:
        self.path = path
        self.file = file
        self.view = file.data
        self.at = 0

    def take(self, n: int) -> memoryview:
        if n > len(self.view) - self.at:
            raise HeaderCutOff(f"{self.path} ends inside its header, at byte {len(self.view):,}. {AGAIN}")
        self.at += n
        return self.view[self.at - n : self.at]

    def check_count(self, what: str, count: int, least: int) -> None:
        """`count` things of at least `least` bytes each must fit into the rest of the file."""
        if count * least > len(self.view) - self.at:
            raise HeaderCutOff(f"{self.path} is shorter than its header says: it announces {count:,} {what}. {AGAIN}")

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self, what: str) -> str:
        raw = self.take(self.u64())
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path} is broken: {what} is not UTF-8. {AGAIN}") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(f"the value of {key!r}")
        if kind == _ARRAY:
            element, count = self.u32(), self.u64()
            if element == _STRING:
                return self.texts(key, count)
            return self.numbers(key, element, count)
        return self.numbers(key, kind, 1)[0].item()

    def numbers(self, key: str, kind: int, count: int) -> Any:
        """A numpy array of `count` numbers, copied out of the file."""
        dtype = "|b1" if kind == _BOOL else _NUMBERS.get(kind)
        if dtype is None:
            what = "arrays of arrays" if kind == _ARRAY else f"values of type {kind}"
            raise CheckpointError(f"{self.path}: the metadata {key!r} has {what}, which no known model uses. {AGAIN}")
        raw = self.take(count * np.dtype(dtype).itemsize)
        if kind == _BOOL:
            return np.frombuffer(raw, np.uint8) != 0
        return np.frombuffer(raw, dtype).copy()

    def texts(self, key: str, count: int) -> list[str]:
        """`count` strings: a vocabulary has 10^5 of them, so this loop is kept bare."""
        self.check_count(f"strings in {key!r}", count, 8)
        view, at, end, length = self.view, self.at, len(self.view), _U64.unpack_from
        found: list[str] = []
        add = found.append
        try:
            for _ in range(count):
                (n,) = length(view, at)
                at += 8 + n
                if at > end:
                    break
                add(str(view[at - n : at], "utf-8"))
        except UnicodeDecodeError:
            where = f"entry {len(found)} of {key!r}"
            raise CheckpointError(f"{self.path} is broken: {where} is not UTF-8. {AGAIN}") from None
        except struct.error:
            pass
        if len(found) < count:
            raise HeaderCutOff(f"{self.path} ends inside its header, in the strings of {key!r}. {AGAIN}")
        self.at = at
        return found
