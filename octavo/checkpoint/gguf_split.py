"""Models that `llama-gguf-split` cut into several files: NAME-00001-of-00003.gguf and so on. The first part has all the
metadata; each has the tensors whose data it holds (https://github.com/ggml-org/llama.cpp, tools/gguf-split)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf import read_gguf
from octavo.checkpoint.tensor import AGAIN, Tensor

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MOST_PARTS = 99_999


def parts_of(name: str) -> list[str]:
    """Names of all parts of the model that a file of this name belongs to, the first one first; itself where it is no
    part. `name` may have folders before it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return [name]
    stem, count = match["stem"], int(match["count"])
    return [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def models_in(folder: Path) -> list[Path]:
    """The .gguf files of a folder, of a model in several parts the name of the first, whether it is there or not."""
    return sorted({folder / parts_of(file.name)[0] for file in folder.glob("*.gguf")})


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file as `read_gguf` gives them, and those of all other parts where it is the first of
    several. Raises CheckpointError that names what is missing."""
    names = parts_of(path.name)
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing and len(names) > 1:
        some = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {len(names)} parts of the model: {some}. Complete the download."
        )
    metadata, tensors = read_gguf(path)
    count = _number(path, metadata, "split.count", 1)
    if count <= 1:
        return metadata, tensors
    number = _number(path, metadata, "split.no", 0)
    if len(names) != count or path.name != names[number % count]:
        raise CheckpointError(
            f"{path} says that it is part {number + 1} of {count}, so it must be called "
            f"NAME-{number + 1:05d}-of-{count:05d}.gguf, beside the other parts. Give the files their own names back."
        )
    if number:
        raise CheckpointError(f"{path} is part {number + 1} of {count}: open the first, {names[0]}.")
    tensors = dict(tensors)
    for i, name in enumerate(names[1:], 1):
        part = path.with_name(name)
        said, more = read_gguf(part)
        if (_number(part, said, "split.no", 0), _number(part, said, "split.count", 1)) != (i, count):
            raise CheckpointError(f"{part} is not part {i + 1} of {count}, as its name says. {AGAIN}")
        for twice in sorted(tensors.keys() & more.keys())[:1]:
            raise CheckpointError(f"{part} has the tensor {twice!r}, which an earlier part has too. {AGAIN}")
        tensors.update(more)
    announced = _number(path, metadata, "split.tensors.count", len(tensors))
    if announced != len(tensors):
        raise CheckpointError(
            f"the {count} parts beside {path} hold {len(tensors):,} tensors, but {announced:,} are announced: parts of "
            f"different models have been mixed. Download them again."
        )
    return metadata, tensors


def _number(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= (_MOST_PARTS if key != "split.tensors.count" else 1 << 40):
        raise CheckpointError(f"{path} is broken: {key} is {str(value)[:40]}. {AGAIN}")
    return value
