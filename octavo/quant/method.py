"""How a quantization method keeps a matrix: in several tensors, by rules that its configuration gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, Stored

Values = npt.NDArray[Any]


class QuantError(ValueError):
    """The checkpoint's quantization cannot be read; says what, and what could."""


class Head(NamedTuple):
    """What a file's header says of a tensor."""

    kind: str
    """The file's word: "I32", "F16", …"""
    shape: tuple[int, ...]
    values: Callable[[], Values]
    """What it holds, as `build` gets it: for the small tensors that say how the others are to be read."""
    metadata: Mapping[str, str] = {}
    """What the header says beside the tensors."""


class Layout(NamedTuple):
    """A matrix (or, with three numbers in `shape`, a stack of them) that is to be put together."""

    kind: str
    """A format of `octavo.quant`."""
    shape: tuple[int, ...]
    build: Callable[[Mapping[str, Values]], Stored]
    """From the tensors by ending, of one entry for a stack."""
    ending: str = ".weight"
    """Of the name it then has."""
    in_groups: bool = False
    """Rows of `shape` are groups of neighbours in a row of the matrix; how many are a row, only the model knows."""


class Method(Protocol):
    """A value of quantization_config's quant_method. One file of `octavo.quant` per method, with `read(config)`."""

    @property
    def name(self) -> str:
        """As --quantization says it."""

    @property
    def endings(self) -> tuple[str, ...]:
        """What the names of a module's tensors end in; the module is what comes before."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Those of `endings` that only a quantized module has."""

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        """How the tensors of `module`, by ending, make its matrix. Raises QuantError."""


def plain(values: F32) -> Stored:
    """A float32 matrix: what a format becomes where no block format of ours holds its values."""
    matrix = np.ascontiguousarray(values, np.float32)
    n_out, n_in = matrix.shape
    return Stored("F32", n_out, n_in, matrix.view(np.uint8))
