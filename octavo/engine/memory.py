"""`KVMemory`: the block pools of all KV groups, as one memory that sequences attach to, grow in and leave."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from octavo.engine.blocks import BlockPool
from octavo.engine.chain import Chains
from octavo.engine.sequence import Sequence
from octavo.engine.tables import FullAttention, Reach, SlidingWindow, Table, match
from octavo.types import KVGroup

Held = tuple[BlockPool, int]
"""A reference to a block outside any table."""


class KVMemory:
    """One pool per KV group, all with blocks of `size` tokens; `blocks` gives their counts."""

    def __init__(self, groups: tuple[KVGroup, ...], blocks: tuple[int, ...], size: int) -> None:
        if not groups or len(groups) != len(blocks):
            raise ValueError(f"{len(groups)} KV groups need as many block counts, got {len(blocks)}")
        self.size = size
        self.pools = [BlockPool(count, size) for count in blocks]
        self.reaches: list[Reach] = [
            SlidingWindow(size, group.window) if group.window else FullAttention(size) for group in groups
        ]
        self.step = 0
        """Number of the newest plan: what is published now waits on its success."""
        self._chains = Chains()
        self._windowed = any(reach.bounded for reach in self.reaches)
        self._published: deque[tuple[int, BlockPool, int, Sequence]] = deque()
        """(step, pool, block, who) of what steps not yet committed publish, oldest first."""

    def tables(self) -> tuple[Table, ...]:
        """Empty tables for a new sequence."""
        return tuple(Table(pool, reach) for pool, reach in zip(self.pools, self.reaches, strict=True))

    def refusal(self, tokens: int, whole: int) -> str | None:
        """Why a sequence that grows to `tokens` tokens, `whole` of them in one step, can never fit; None if it can."""
        for pool, reach in zip(self.pools, self.reaches, strict=True):
            need = max(reach.span(tokens), -(-whole // self.size))
            if need > pool.count:
                return (
                    f"The request may grow to {tokens} tokens, which need {need} KV blocks of {self.size} tokens, but "
                    f"the KV cache has only {pool.count} blocks ({pool.count * self.size} tokens). Shorten the prompt "
                    f"or max_tokens, or start with a larger KV cache."
                )
        return None

    # -- one sequence -------------------------------------------------------------------------------------------
    def attach(self, seq: Sequence, limit: int, copy: bool) -> tuple[list[tuple[int, int, int]], list[Held]]:
        """Give a sequence without blocks the longest cached prefix of at most `limit` tokens; `computed` becomes its
        length. Returns the (group, source, destination) copies to make and the references that keep the sources
        until the step is committed. With `copy` False only full blocks are used."""
        size = self.size
        self._hash(seq, len(seq.tokens) // size)
        hit = match(seq.tables, seq.family.root, seq.hashes, seq.tokens, limit, self.step)
        for table, blocks in zip(seq.tables, hit.blocks, strict=True):
            table.share(blocks)
        full = len(hit.blocks[0])
        seq.computed, seq.shared, seq.published = full * size, full, full
        copies: list[tuple[int, int, int]] = []
        held: list[Held] = []
        if not (copy and hit.partial):
            return copies, held
        for pool, source in zip(self.pools, hit.sources, strict=True):
            held.append((pool, pool.hold(source)))
        if any(pool.free == 0 for pool in self.pools):
            self.release_held(held)
            return copies, []
        for group, (table, source) in enumerate(zip(seq.tables, hit.sources, strict=True)):
            table.grow(1)
            table.pool.fill(table.blocks[-1], hit.partial)
            copies.append((group, source, table.blocks[-1]))
        seq.computed += hit.partial
        return copies, held

    def room(self, seq: Sequence, n: int) -> int:
        """How many of the next `n` tokens its blocks and the free ones can take."""
        have = len(seq.tables[0].blocks)
        if seq.computed + n <= have * self.size:
            return n
        free = min(pool.free for pool in self.pools)
        return min(n, (have + free) * self.size - seq.computed)

    def grow(self, seq: Sequence, n: int) -> None:
        """Make place for the next `n` tokens, which `room` has allowed, and count them as filled."""
        size = self.size
        start, end = seq.computed, seq.computed + n
        index, offset = divmod(start, size)
        if n == 1 and offset:  # most sequences in most steps
            for table in seq.tables:
                table.pool.fill(table.blocks[index], offset + 1)
            return
        for table in seq.tables:
            more = -(-end // size) - len(table.blocks)
            if more > 0:
                table.grow(more)
            pool, blocks = table.pool, table.blocks
            for i in range(index, (end - 1) // size + 1):
                pool.fill(blocks[i], min(end - i * size, size))

    def retract(self, seq: Sequence, n: int) -> None:
        """The last `n` computed tokens were wrong guesses: their places are free again."""
        size = self.size
        last = (seq.computed - 1) // size
        seq.computed -= n
        for table in seq.tables:
            for i in range(seq.computed // size, last + 1):
                table.pool.fill(table.blocks[i], max(0, min(seq.computed - i * size, size)))

    def slide(self, seq: Sequence) -> None:
        """Give back the blocks behind the windows of a sequence that goes on at `computed`."""
        if not self._windowed:
            return
        for table in seq.tables:
            if table.reach.bounded:
                table.slide(seq.computed)

    def release(self, seq: Sequence) -> None:
        """Give back all blocks; the sequence has computed nothing then."""
        for table in seq.tables:
            table.clear()
        seq.computed = seq.shared = seq.published = 0

    def release_held(self, held: Iterable[Held]) -> None:
        for pool, block in held:
            pool.drop(block)

    # -- the prefix cache ---------------------------------------------------------------------------------------
    def publish(self, seq: Sequence, tail: bool = False) -> None:
        """Offer the blocks that known, planned tokens have filled since the last call; with `tail` also the block
        they fill in part."""
        size = self.size
        known = len(seq.tokens) if seq.computed > len(seq.tokens) else seq.computed
        full = known // size
        if full > seq.published:
            self._hash(seq, full)
            for i in range(seq.published, full):
                parent = seq.hashes[i - 1] if i else seq.family.root
                self._offer(seq, i, seq.hashes[i], parent, tuple(seq.tokens[i * size : (i + 1) * size]))
            seq.published = full
        if tail and known > full * size:
            parent = seq.hashes[full - 1] if full else seq.family.root
            self._offer(seq, full, None, parent, tuple(seq.tokens[full * size : known]))

    def _hash(self, seq: Sequence, count: int) -> None:
        """Extend the sequence's digests to `count` blocks; each block is hashed once in its lifetime."""
        self._chains.extend(seq.hashes, seq.family.root, seq.tokens, count, self.size)

    def _offer(
        self,
        seq: Sequence,
        index: int,
        digest: bytes | None,
        parent: bytes,
        tokens: tuple[int, ...],
    ) -> None:
        for table in seq.tables:
            block = table.blocks[index]
            if block >= 0:
                table.pool.publish(block, digest, parent, tokens, self.step)
                self._published.append((self.step, table.pool, block, seq))

    def settle(self, step: int) -> None:
        """Step `step` is committed: what it published stays."""
        published = self._published
        while published and published[0][0] <= step:
            published.popleft()

    def forget(self) -> None:
        """The steps in flight have failed: what they published was never computed."""
        for _, pool, block, _ in self._published:
            pool.unpublish(block)
        self._published.clear()

    def disown(self, seq: Sequence) -> set[tuple[int, int]]:
        """Unpublish all that this sequence has computed; returns the (group, block) pairs others may hold."""
        tainted: set[tuple[int, int]] = set()
        for group, table in enumerate(seq.tables):
            for index in range(seq.shared, len(table.blocks)):
                block = table.blocks[index]
                if block < 0 and index < len(seq.hashes):  # given back, but perhaps still cached
                    block = -1 if (found := table.pool.find(seq.hashes[index])) is None else found
                if block >= 0:
                    table.pool.unpublish(block)
                    tainted.add((group, block))
        return tainted

    # -- numbers ------------------------------------------------------------------------------------------------
    def missing(self, seq: Sequence, tokens: int) -> list[int]:
        """Blocks per KV group that a sequence lacks to be `tokens` tokens long."""
        return [max(0, table.reach.span(tokens) - len(table.blocks) + table.start) for table in seq.tables]

    @property
    def total(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def filled(self) -> int:
        return sum(pool.filled for pool in self.pools)

    def check(self, live: Iterable[Sequence], held: Iterable[Held] = ()) -> None:
        """Raise AssertionError unless every reference belongs to a table of `live` or to `held` (for tests)."""
        want = [Counter[int]() for _ in self.pools]
        for seq in live:
            for counter, table in zip(want, seq.tables, strict=True):
                counter.update(table.blocks[table.start :])
        for pool, block in held:
            want[self.pools.index(pool)][block] += 1
        for pool, counter in zip(self.pools, want, strict=True):
            pool.check(counter)
