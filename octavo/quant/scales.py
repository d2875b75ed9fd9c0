"""Scales that rectangles of a matrix share: the whole of it, its rows, groups of columns, blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.ops.contract import F32
from octavo.quant.method import QuantError, Values


class Grid(NamedTuple):
    """Rows and columns of the rectangles that share a scale in a matrix [n_out, n_in]; those at its end may be cut."""

    n_out: int
    n_in: int
    rows: int
    columns: int

    def fits(self, block: int) -> bool:
        """Whether rows are whole blocks of `block` columns, each with one scale."""
        return self.n_in % block == 0 and (self.columns >= self.n_in or self.columns % block == 0)

    def spread(self, scales: Values, block: int) -> F32:
        """float32 [n_out, n_in / block] of the stored scales: of each block of a row."""
        table = scales.astype(np.float32).reshape(-(-self.n_out // self.rows), -1)
        wide: F32 = table[:, np.arange(0, self.n_in, block) // self.columns]
        return np.repeat(wide, self.rows, axis=0)[: self.n_out]


def grid(n_out: int, n_in: int, shape: tuple[int, ...], cell: tuple[int, int] | None = None) -> Grid:
    """How scales of this shape lie: one number, [n_out], or two dimensions of which each is one, one per row or column,
    or one per `cell` rows or columns. Raises QuantError for any other shape."""
    given = (1, 1) if shape in ((), (1,)) else (n_out, 1) if shape == (n_out,) else shape
    steps = [_step(size, count, step) for size, count, step in zip((n_out, n_in), given, cell or (0, 0), strict=False)]
    if len(given) != 2 or 0 in steps:
        blocks = f" or one per block of {list(cell)}" if cell else ""
        raise QuantError(f"a matrix {[n_out, n_in]} has scales {list(shape)}; one, one per row{blocks} can be read")
    return Grid(n_out, n_in, *steps)


def _step(size: int, count: int, step: int) -> int:
    """Rows or columns that share a scale; 0 where `count` scales are not what `size` of them have."""
    if count == 1:
        return size
    if count == size:
        return 1
    return step if step and count == -(-size // step) else 0


def power(exponents: Values) -> F32:
    """2^(e - 127) of uint8 e: scales in E8M0 (Open Compute Project, "Microscaling formats"); 255 is NaN there."""
    with np.errstate(over="ignore"):  # of 255
        values: F32 = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    values[exponents == 255] = np.nan
    return values
