"""Block tables: which blocks a sequence has in each KV group, and which of them each kind of attention needs."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple, Protocol

from octavo.engine.blocks import BlockPool


class Reach(Protocol):
    """How far back the attention of a KV group looks."""

    bounded: bool
    """Whether blocks ever fall out of reach."""

    def first(self, position: int) -> int:
        """Index of the first block that a query at `position`, or a later one, can see."""

    def span(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens holds once it advances token by token."""


class FullAttention:
    """A query sees every token before it: nothing is ever given back."""

    bounded = False

    def __init__(self, size: int) -> None:
        self.size = size

    def first(self, position: int) -> int:
        return 0

    def span(self, tokens: int) -> int:
        return -(-tokens // self.size)


class SlidingWindow:
    """A query at p sees (p - window, p]: blocks wholly behind that are given back."""

    bounded = True

    def __init__(self, size: int, window: int) -> None:
        self.size = size
        self.window = window

    def first(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.size

    def span(self, tokens: int) -> int:
        return min(-(-tokens // self.size), -(-(self.window - 1) // self.size) + 1)


class Table:
    """Blocks of one sequence in one KV group, by absolute block index."""

    __slots__ = ("pool", "reach", "blocks", "start", "sent")

    def __init__(self, pool: BlockPool, reach: Reach) -> None:
        self.pool = pool
        self.reach = reach
        self.blocks: list[int] = []
        """-1 where given back."""
        self.start = 0
        """Blocks before this index have been given back."""
        self.sent = 0
        """Blocks before this index are known to the runner."""

    def share(self, blocks: list[int]) -> None:
        """Begin the table with blocks others computed (-1 where none is needed)."""
        self.blocks = blocks
        self.start = sum(1 for block in blocks if block < 0)
        for block in blocks[self.start :]:
            self.pool.hold(block)

    def grow(self, count: int) -> None:
        """Take `count` more blocks."""
        for _ in range(count):
            self.blocks.append(self.pool.take())

    def slide(self, position: int) -> None:
        """Give back what no query at `position` or later sees."""
        first = min(self.reach.first(position), len(self.blocks))
        if first <= self.start:
            return
        for i in range(self.start, first):
            self.pool.drop(self.blocks[i])
            self.blocks[i] = -1
        self.start = first

    def clear(self) -> None:
        """Give everything back, last block first, so that the heads of prefixes live longest in the LRU order."""
        for i in range(len(self.blocks) - 1, self.start - 1, -1):
            self.pool.drop(self.blocks[i])
        self.blocks, self.start, self.sent = [], 0, 0

    def news(self) -> tuple[int, tuple[int, ...]]:
        """(first index, blocks) that the runner has not been told; from now on it has."""
        first = max(self.sent, self.start)
        self.sent = len(self.blocks)
        return first, tuple(self.blocks[first:])

    @property
    def held(self) -> int:
        return len(self.blocks) - self.start


class Hit(NamedTuple):
    """The longest common token prefix with what is cached: per KV group the full blocks to share (-1 where the group
    needs none), then the block of which the first `partial` tokens are to be copied."""

    blocks: tuple[list[int], ...]
    sources: tuple[int, ...]
    partial: int


def match(
    tables: tuple[Table, ...],
    root: bytes,
    hashes: list[bytes],
    tokens: Tokens[int],
    limit: int,
    step: int,
) -> Hit:
    """Look up at most `limit` tokens of a sequence whose full blocks have the digests `hashes`.

    A length of L full blocks is a hit if every group has all the blocks that a query at the first token after them
    sees: all L for full attention, those of the window for a windowed group. The longest such L is taken: full
    groups are asked once (what is a hit for them stays one when L shrinks), windowed ones in turn until none
    objects. The partial block after it is as long as the group that knows least of it allows.
    """
    size = tables[0].pool.size
    length = min(limit // size, len(hashes))
    for table in tables:
        if not table.reach.bounded:
            length = _hit(table, hashes, length)
    before = -1
    while length != before:
        before = length
        for table in tables:
            if table.reach.bounded:
                length = _hit(table, hashes, length)
    found = []
    for table in tables:
        first = min(table.reach.first(length * size), length)
        blocks = [-1] * first
        for digest in hashes[first:length]:
            block = table.pool.find(digest)
            assert block is not None
            blocks.append(block)
        found.append(blocks)
    rest = tokens[length * size : min(limit, (length + 1) * size)]
    if not rest:
        return Hit(tuple(found), (), 0)
    parent = hashes[length - 1] if length else root
    nearest = [table.pool.nearest(parent, rest, step) for table in tables]
    partial = min(same for _, same in nearest)
    return Hit(tuple(found), tuple(block for block, _ in nearest) if partial else (), partial)


def _hit(table: Table, hashes: list[bytes], length: int) -> int:
    """The longest hit of at most `length` blocks in this group alone, for a window perhaps an upper bound of it."""
    first = min(table.reach.first(length * table.pool.size), length)
    if first == 0:
        return next((i for i in range(length) if table.pool.find(hashes[i]) is None), length)
    # A block missing from the window rules out every length that ends after it, up to the one that skips it.
    return next((i for i in range(length - 1, first - 1, -1) if table.pool.find(hashes[i]) is None), length)
