"""One of several devices that hold a model together: tensor parallelism as in Shoeybi et al., "Megatron-LM" (2019).

Attention is divided by heads and an MLP by its inner width: the first matrix of a branch by rows, the last by columns,
and what the last one gives is summed over the ranks. Everything else is the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SplitError(ValueError):
    """The model cannot be divided among so many ranks."""


class Cut(NamedTuple):
    """A rank's share of one dimension: elements [start, start + size) of `whole`."""

    start: int
    size: int
    whole: int

    def of_parts(self, size: int) -> Cut:
        """The same share where each element is `size` elements (a head, say)."""
        return Cut(self.start * size, self.size * size, self.whole * size)


@dataclass(frozen=True)
class Rank:
    """Number `index` of `count`."""

    index: int
    count: int

    @property
    def first(self) -> bool:
        return self.index == 0

    def share(self, whole: int, what: str) -> Cut:
        """An equal part of `whole`. Raises SplitError that names `what` when it has none."""
        if whole % self.count:
            raise SplitError(f"{whole} {what} cannot be divided among {self.count} ranks")
        size = whole // self.count
        return Cut(self.index * size, size, whole)

    def share_or_copy(self, whole: int, what: str) -> Cut:
        """An equal part; of fewer than there are ranks, one that several ranks then share."""
        if whole >= self.count:
            return self.share(whole, what)
        if self.count % whole:
            raise SplitError(f"{whole} {what} cannot be divided among {self.count} ranks")
        return Cut(self.index * whole // self.count, 1, whole)
