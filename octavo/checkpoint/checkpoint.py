"""A checkpoint: what a model loader asks, whatever the files look like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.cache_scales import NO_SCALES, CacheScales
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.tensor import Tensor
from octavo.ops.contract import Stored
from octavo.quant import KINDS, dense, multiplied_as, row_bytes

Style = Literal["hf", "gguf"]
Number = TypeVar("Number", bound=np.generic)


class Checkpoint:
    """Configuration and tensors of a model, under Hugging Face names, in files that are mapped and read on demand.

    `style` says which conventions the *values* follow where the two differ: Gemma's norm weights w mean (1 + w) in
    Hugging Face files, while GGUF files hold 1 + w. Nothing else differs: rows of q and k are in Hugging Face order.
    Use as a context manager, or `close()`.
    """

    def __init__(
        self,
        path: Path,
        style: Style,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        metadata: dict[str, Any] | None = None,
        cache: CacheScales = NO_SCALES,
    ) -> None:
        self.path = path
        self.style: str = style
        self.config = config
        """The content of config.json, or what a GGUF file's metadata says in its words."""
        self.generation_config = generation_config
        """The content of generation_config.json; {} when there is none."""
        self.metadata = metadata
        """GGUF only: the file's own keys and values; arrays of numbers are numpy arrays."""
        self.cache = cache
        """What it says of an FP8 KV cache."""
        self._tensors = dict(tensors)

    def names(self) -> set[str]:
        """Names of all tensors. GGUF tensors without a Hugging Face name keep their own."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in elements; of a matrix [n_out, n_in]. Raises CheckpointError when there is no such tensor."""
        return self._tensor(name).shape

    def in_groups(self, name: str) -> bool:
        """Whether rows of a tensor's shape are groups of neighbours in a row of the matrix, of which only the model
        knows how many are a row (optimum-quanto). Raises CheckpointError as `shape` does."""
        return self._tensor(name).in_groups

    def as_linear(self, name: str) -> bool:
        """Whether a quantization method has put a matrix together: it is [n_out, n_in] as of a linear layer, though the
        model may keep its floats for x @ W (GPT-2). Raises CheckpointError as `shape` does."""
        return self._tensor(name).join is not None

    def kind(self, name: str) -> str:
        """Format of a tensor: a name of `octavo.quant`, or another type's name ("I64") that cannot be read here."""
        return self._tensor(name).kind

    def bytes_of(self, name: str) -> int:
        """Bytes that a tensor takes in its file."""
        return self._tensor(name).bytes

    @property
    def files(self) -> set[Path]:
        """That tensors are in."""
        return {tensor.file for tensor in self._tensors.values()}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self._tensors.values())

    @property
    def multiplied_bytes(self) -> int:
        """Bytes of all tensors in the formats that devices multiply with."""
        total = 0
        for tensor in self._tensors.values():
            (block, size), (wide_block, wide_size) = (
                KINDS.get(kind, (1, 1)) for kind in (tensor.kind, multiplied_as(tensor.kind))
            )
            total += tensor.bytes // size * block // wide_block * wide_size
        return total

    def stored(self, name: str, index: int | None = None) -> Stored:
        """A matrix [n_out, n_in] in its format: a read-only view of the file, not necessarily aligned. `index`: which
        matrix of a stack [count, n_out, n_in]. Without it, all dimensions but the last are rows.

        Bytes are copied only where a GGUF file has the rows of q and k in another order (into Hugging Face order), and
        where the parts of its blocks lie apart in the file.
        Raises CheckpointError when the tensor is absent, a vector, or of a type that is no weight format.
        """
        tensor = self._readable(name)
        if tensor.join is not None:
            return tensor.join(index)
        data, shape = _entry(tensor, index)
        if len(shape) < 2:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}; a matrix was "
                f"expected. Check that config.json and the weights belong together."
            )
        n_out, n_in = math.prod(shape[:-1]), shape[-1]
        rows = data.reshape(n_out, row_bytes(tensor.kind, n_in))
        return Stored(tensor.kind, n_out, n_in, _unpaired(rows, tensor.paired_heads))

    def vector(self, name: str, index: int | None = None) -> npt.NDArray[np.float32]:
        """A tensor of any shape (or one of a stack) as a new flat float32 array. Raises CheckpointError as `stored`
        does."""
        tensor = self._readable(name)
        if tensor.join is not None:
            return dense(tensor.join(index)).reshape(-1)
        data, shape = _entry(tensor, index)
        count = math.prod(shape)
        values = dense(Stored(tensor.kind, 1, count, data.reshape(1, -1)))[0]
        return _unpaired(values, tensor.paired_heads)

    def close(self) -> None:
        """Let go of the files. Matrices already handed out stay valid: a file is unmapped with its last view."""
        self._tensors.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.") from None

    def _readable(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        if tensor.kind not in KINDS:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has the type {tensor.kind}; weights can be read as "
                f"{', '.join(KINDS)}. Convert the model to bfloat16."
            )
        return tensor


def _entry(tensor: Tensor, index: int | None) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
    """Bytes and shape of a tensor, or of one entry of a stack."""
    if index is None:
        return tensor.data, tensor.shape
    return tensor.data.reshape(tensor.shape[0], -1)[index], tensor.shape[1:]


def _unpaired(rows: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Rows (0, d/2, 1, d/2 + 1, …) of each head back into the order 0, 1, 2, …; `heads` 0 means they are."""
    if not heads:
        return rows
    n = len(rows)
    paired: npt.NDArray[Number] = rows.reshape(heads, n // heads // 2, 2, *rows.shape[1:])
    ordered: npt.NDArray[Number] = paired.swapaxes(1, 2).reshape(rows.shape)
    return ordered
