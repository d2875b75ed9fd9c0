"""PyTorch's .bin files: a zip archive with a pickle of the tensors' places, and the data beside it, uncompressed.

Unpickling can run any code, so the pickle is read with an unpickler that knows nothing but tensors and plain
containers, after its opcodes were looked over. torchao's quantized tensors are objects of its classes, for which others
stand in that do nothing; what they consist of is named as torchao names it in safetensors files.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.tensor import AGAIN, U8, Tensor, map_file, number_of_elements

_STORAGES = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
    "UntypedStorage": ("U8", 1),
}

_FLOAT8 = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
"""Types whose tensors lie in storages without a type."""

_INERT = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("bfloat16", "float16", "float32", "uint8", "int8", *_FLOAT8)),
    *(("torch", f"int{bits}") for bits in range(1, 8)),
}
"""What else belongs to torchao's tensors."""

_MAX_PICKLE = 100_000_000
_LOCAL_HEADER = 30
"""Bytes of a zip entry's own header, before its name and extra field."""


class _StorageType(NamedTuple):
    kind: str
    size: int


class _Storage(NamedTuple):
    kind: str
    size: int
    data: U8


class _Place(NamedTuple):
    """A tensor: a part of a storage, in elements."""

    storage: Any
    offset: Any
    shape: Any
    stride: Any


class _Parts(NamedTuple):
    """A tensor of one of torchao's classes."""

    kind: Any
    shape: Sequence[int]
    state: dict[Any, Any]
    """Its attributes by name."""


class _StandIn:
    """Instead of an object of a class that is not imported: takes anything, keeps nothing."""

    __slots__ = ()

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        return


def read_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of one .bin file by name, as views of the mapped file. Raises CheckpointError."""
    file = map_file(path)
    if file[:4].tobytes() != b"PK\x03\x04":
        raise CheckpointError(
            f"{path} is not in the zip format that PyTorch 1.6 and later write. Save the model again "
            f"as safetensors: model.save_pretrained(folder)."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: _entry(path, file, info) for info in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{path} is broken or cut off: {e}. {AGAIN}") from None
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path} is not a PyTorch checkpoint: it has {len(pickles)} data.pkl entries, not 1.")
    root = pickles[0].removesuffix("data.pkl")
    if root + "byteorder" in entries and entries[root + "byteorder"].tobytes().strip() != b"little":
        raise CheckpointError(f"{path} was written on a big-endian machine. Save the model again as safetensors.")
    content = _unpickle(path, entries[pickles[0]].tobytes(), root, entries)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors.")
    return _tensors(path, {str(name): place for name, place in content.items()})


def _entry(path: Path, file: U8, info: zipfile.ZipInfo) -> U8:
    """The bytes of an entry: a view, so it must be stored without compression."""
    start = info.header_offset
    header = file[start : start + _LOCAL_HEADER].tobytes()
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path} is broken: no entry {info.filename!r} at byte {start:,}. {AGAIN}")
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(
            f"{path}: the entry {info.filename!r} is compressed or encrypted, which PyTorch never "
            f"does. Save the model again as safetensors."
        )
    start += _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if start + info.file_size > len(file):
        raise CheckpointError(f"{path} is shorter than its directory says, at {info.filename!r}. {AGAIN}")
    return file[start : start + info.file_size]


def _unpickle(path: Path, text: bytes, root: str, entries: dict[str, U8]) -> Any:
    refused = (
        f"{path} holds more than tensors (%s); it is not loaded, as it could run any code. Get the model as "
        f"safetensors."
    )
    if len(text) > _MAX_PICKLE:
        raise CheckpointError(f"{path} has a pickle of {len(text):,} bytes: too large to be right.")

    class Tensors(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("collections", "OrderedDict"):
                return OrderedDict
            if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
                return _RebuildTensor()
            if (module, name) == ("torch._utils", "_rebuild_parameter"):
                return _RebuildParameter()
            if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
                return _RebuildFloat8()
            if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
                return _RebuildParts()
            if module in ("torch", "torch.storage") and name in _STORAGES:
                return _StorageType(*_STORAGES[name])
            if (module, name) in _INERT or module.partition(".")[0] == "torchao":
                return type(name, (_StandIn,), {"__slots__": ()})
            raise CheckpointError(refused % f"{module}.{name}")

        def persistent_load(self, pid: Any) -> _Storage:
            word, kind, key, *_ = pid
            if word != "storage" or not isinstance(kind, _StorageType) or f"{root}data/{key}" not in entries:
                raise CheckpointError(f"{path} is broken: it has no data for the storage {pid!r}. {AGAIN}")
            return _Storage(kind.kind, kind.size, entries[f"{root}data/{key}"])

    try:
        for opcode, argument, _ in pickletools.genops(text):
            # The memo is an array: an index beyond what the pickle could fill would only serve to exhaust memory.
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(text):
                raise CheckpointError(refused % "an impossible memo index")
        return Tensors(io.BytesIO(text)).load()
    except CheckpointError:
        raise
    except Exception as e:  # a hostile pickle can raise anything
        raise CheckpointError(f"{path} has a broken pickle ({type(e).__name__}: {e}). {AGAIN}") from None


class _RebuildTensor:
    """What the pickle calls to make a tensor; without attributes that it could set."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Place:
        return _Place(storage, offset, shape, stride)


class _RebuildFloat8:
    __slots__ = ()

    def __call__(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any
    ) -> _Place:
        kind = _FLOAT8.get(_class_name(dtype))
        if kind is None or not isinstance(storage, _Storage):
            raise ValueError(f"a tensor without a type that is known ({_class_name(dtype)})")
        return _Place(storage._replace(kind=kind), offset, shape, stride)


class _RebuildParts:
    __slots__ = ()

    def __call__(self, _function: Any, kind: Any, arguments: Any, state: Any) -> _Parts:
        _, _, shape, *_ = arguments
        if not isinstance(state, dict) or not _are_sizes(shape):
            raise ValueError("a tensor of torchao without attributes or shape")
        return _Parts(kind, shape, state)


class _RebuildParameter:
    __slots__ = ()

    def __call__(self, place: Any, *_: Any) -> Any:
        return place


def _tensors(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of torchao as "NAME._weight_qdata", …, with what else they say in the metadata of all."""
    said = {name: json.dumps(_said(place)) for name, place in content.items() if isinstance(place, _Parts)}
    out = {}
    for name, place in content.items():
        if not isinstance(place, _Parts):
            out[name] = _tensor(path, name, place)._replace(metadata=said)
            continue
        module, _, attribute = name.rpartition(".")
        parts = {key: part for key, part in place.state.items() if isinstance(part, _Place)}
        if "qdata" not in parts:
            raise CheckpointError(
                f"{path}: {name!r} is a {_class_name(place.kind)} of torchao, which cannot be read. Save the model as "
                "safetensors with a newer version of torchao."
            )
        for key, part in parts.items():
            full = f"{module}._{attribute}_{key}"
            out[full] = _tensor(path, full, part)._replace(metadata=said)
    return out


def _said(parts: _Parts) -> dict[str, Any]:
    """As the metadata of torchao's safetensors files says it."""
    state = parts.state
    block = state.get("block_size")
    data: dict[str, Any] = {"block_size": list(block) if _are_sizes(block) else None, "shape": list(parts.shape)}
    if "target_dtype" in state:
        data["target_dtype"] = {"_type": "torch.dtype", "_data": _class_name(state["target_dtype"])}
    return {"_type": _class_name(parts.kind), "_data": data}


def _are_sizes(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, tuple | list) and all(type(n) is int for n in value)


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else type(kind).__name__


def _tensor(path: Path, name: str, place: Any) -> Tensor:
    """A view of the tensor's bytes, after everything the pickle says was checked."""
    if not isinstance(place, _Place) or not isinstance(place.storage, _Storage):
        raise CheckpointError(
            f"{path}: {name!r} is not a tensor but {type(place).__name__}. Save only the model's "
            f"weights, as safetensors."
        )
    kind, size, data = place.storage
    if not isinstance(place.shape, tuple) or not isinstance(place.stride, tuple):
        raise CheckpointError(f"{path} is broken: tensor {name!r} has no shape. {AGAIN}")
    elements = number_of_elements(path, name, place.shape)
    start = number_of_elements(path, name, (place.offset,)) * size
    if start + elements * size > len(data):
        raise CheckpointError(
            f"{path} is broken: tensor {name!r} needs {elements * size:,} bytes from byte "
            f"{start:,}, but its storage has {len(data):,}. {AGAIN}"
        )
    expected, step = [], 1
    for n in reversed(place.shape):
        expected.append(step)
        step *= n
    if any(n > 1 and have != want for n, have, want in zip(place.shape, place.stride, expected[::-1], strict=False)):
        raise CheckpointError(f"{path}: tensor {name!r} is not stored row by row. Save the model again as safetensors.")
    return Tensor(kind, place.shape, data[start : start + elements * size], path)
