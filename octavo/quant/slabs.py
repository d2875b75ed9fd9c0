"""Large matrices are converted in slabs of rows, several at a time: numpy lets other threads run while it computes, and
what a slab needs on the way stays in the caches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SLAB = 1 << 18
"""Elements converted at a time by a thread: bounds the memory that intermediate values take."""


def slab_rows(n_in: int, together: int) -> int:
    """Rows of a slab: a multiple of `together`, about SLAB elements."""
    return max(1, SLAB // max(1, n_in) // together) * together


def each_slab(work: Callable[[int], Any], n_out: int, rows: int, threads: int) -> None:
    """work(first row) for each slab of `rows` rows, on so many threads. Raises what `work` raises."""
    starts = range(0, n_out, rows)
    if threads == 1 or len(starts) < 2:
        for start in starts:
            work(start)
        return
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        for _ in pool.map(work, starts):
            pass
