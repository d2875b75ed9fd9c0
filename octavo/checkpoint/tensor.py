"""A tensor in a mapped file, and how files are mapped."""

from __future__ import annotations

import math
import mmap
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.errors import CheckpointError
from octavo.ops.contract import Stored

U8 = npt.NDArray[np.uint8]

AGAIN = "Download the file again."


class Tensor(NamedTuple):
    """Where a tensor lies: `data` is a flat uint8 view of the mapped file, rows in order."""

    kind: str
    """A format of `octavo.quant`, or the file's own word for a type that cannot be read as a matrix ("I64")."""
    shape: tuple[int, ...]
    data: U8
    file: Path
    paired_heads: int = 0
    """When > 0, the rows of each of that many heads lie as pairs (0, d/2, 1, d/2 + 1, …)."""
    join: Callable[[int | None], Stored] | None = None
    """Of a matrix whose codes, scales and zero points are tensors of their own in the file: puts it together (or entry
    `index` of a stack) whenever it is read. `data` is then empty."""
    joined_bytes: int = 0
    """Size of those tensors."""
    metadata: Mapping[str, str] = {}
    """What a safetensors file says beside its tensors: the same for all of them."""
    in_groups: bool = False
    """Rows of `shape` are groups of neighbours in a row of the matrix; how many are a row, only the model knows."""

    @property
    def bytes(self) -> int:
        """That it takes in its file."""
        return self.data.nbytes + self.joined_bytes


def check_regular(path: Path) -> None:
    """Refuse what never ends or never begins when it is read: devices, pipes, sockets, also behind links. Raises
    CheckpointError, and OSError where nothing is there."""
    if not stat.S_ISREG(mode := path.stat().st_mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise CheckpointError(f"{path} cannot be read: it is {what}, not a file. Put the file itself in its place.")


def map_file(path: Path) -> U8:
    """The bytes of a file as a read-only uint8 array; nothing is read until it is looked at.

    The mapping lives as long as a view of it. Raises CheckpointError for a file that is absent, unreadable or empty,
    and for the pointer that Git LFS leaves in place of a file.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}.") from e
    except CheckpointError:
        raise
    except ValueError:
        raise CheckpointError(f"{path} is empty. {AGAIN}") from None
    if data[:64].tobytes().startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder.")
    return data


def offset_of(tensor: Tensor) -> int:
    """Where in its file the bytes of a tensor begin."""
    whole = tensor.data.base
    assert isinstance(whole, np.ndarray), "data is a part of a mapped file"
    first, at = (array.__array_interface__["data"][0] for array in (whole, tensor.data))
    return int(at - first)


def check_spans(path: Path, spans: Iterable[tuple[str, int, int]], size: int) -> None:
    """Check that the byte spans (name, start, end) lie in [0, size) and do not overlap."""
    before, last = 0, ""
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        if end > size:
            raise CheckpointError(
                f"{path} is shorter than its header says: tensor {name!r} ends at byte {end:,} of "
                f"the data, which has {size:,} bytes. {AGAIN}"
            )
        if start < before:
            raise CheckpointError(f"{path} is broken: tensors {last!r} and {name!r} overlap. {AGAIN}")
        before, last = end, name


_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 40
"""Of a tensor without elements, the product of its other dimensions: beyond, the arithmetic of arrays overflows. One
with elements is bounded by its file."""


def number_of_elements(path: Path, name: str, shape: Iterable[object]) -> int:
    """Product of a shape read from a file, which must hold a few whole numbers >= 0."""
    sizes: list[int] = []
    for n in shape:
        if type(n) is not int or n < 0 or len(sizes) == _MAX_DIMENSIONS:
            raise CheckpointError(f"{path} is broken: tensor {name!r} has the size {n!r}. {AGAIN}")
        sizes.append(n)
    if 0 in sizes and math.prod(n or 1 for n in sizes) > _MAX_SIZE:
        raise CheckpointError(f"{path} is broken: tensor {name!r} has the shape {sizes}. {AGAIN}")
    return math.prod(sizes)
