"""`BlockPool`: the KV pages of one KV group. Who holds them, what they contain, which to reuse first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Tokens

from octavo.engine.lists import Lists

CANDIDATES = 32
"""Blocks compared at most in a search for a partial match; the search is a saving, never a need."""


class Content:
    """What a published block holds: `tokens` after the history whose digest is `parent`."""

    __slots__ = ("digest", "parent", "tokens", "ready", "step")

    def __init__(self, digest: bytes | None, parent: bytes, tokens: tuple[int, ...], ready: int, step: int) -> None:
        self.digest = digest
        """Of the history with this block; None while the block is not full."""
        self.parent = parent
        self.tokens = tokens
        self.ready = ready
        """Tokens written by steps before `step`: what a copy made in `step` itself may use."""
        self.step = step


class BlockPool:
    """`count` blocks of `size` tokens with reference counts, content digests and an LRU order of the free ones.

    A free block keeps its content until it is taken for something else, so a finished request leaves a prefix cache
    behind at no cost. Blocks without content are taken first, then those dropped longest ago.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self.free = count
        """Blocks nobody holds."""
        self.cached = 0
        """Blocks whose content is published, held or free."""
        self.filled = 0
        """Tokens in held blocks, each block counted once."""
        self._references = [0] * count
        self._fill = [0] * count
        self._content: list[Content | None] = [None] * count
        self._unused = Lists(count, 1)
        """The free blocks, in the order in which they are taken."""
        for block in range(count):
            self._unused.append(0, block)
        # Hash tables of the published blocks, by digest and by what they follow. (`hash` of bytes is keyed per process:
        # nobody knows which tokens would make many blocks share a list.)
        self._buckets = 1 << max(count - 1, 0).bit_length()
        self._full = Lists(count, self._buckets)
        self._children = Lists(count, self._buckets)

    @property
    def used(self) -> int:
        return self.count - self.free

    def hold(self, block: int) -> int:
        """One more reference."""
        if self._references[block] == 0:
            self._unused.remove(block)
            self.free -= 1
            self.filled += self._fill[block]
        self._references[block] += 1
        return block

    def take(self) -> int:
        """A free block for new content, with one reference. Raises KeyError when none is free."""
        block = self._unused.first(0)
        if block < 0:
            raise KeyError("no block is free")
        self._unused.remove(block)
        self.free -= 1
        self.unpublish(block)
        self._references[block] = 1
        self._fill[block] = 0
        return block

    def drop(self, block: int) -> None:
        """One reference less; the last one frees the block."""
        self._references[block] -= 1
        if self._references[block]:
            return
        self.filled -= self._fill[block]
        self.free += 1
        if self._content[block] is None:
            self._unused.prepend(0, block)
        else:
            self._unused.append(0, block)

    def fill(self, block: int, tokens: int) -> None:
        """Say how many tokens a held block has."""
        self.filled += tokens - self._fill[block]
        self._fill[block] = tokens

    def publish(self, block: int, digest: bytes | None, parent: bytes, tokens: tuple[int, ...], step: int) -> None:
        """Offer a block to others; `digest` None says that it is not full yet. A full block whose content is
        published already stays private."""
        if digest is not None and self.find(digest) is not None:
            return
        old = self._content[block]
        ready = 0
        if old is not None:
            ready = len(old.tokens) if old.step < step else old.ready
            self.unpublish(block)
        self._content[block] = Content(digest, parent, tokens, ready, step)
        self.cached += 1
        self._children.prepend(self._bucket((parent, tokens[0])), block)
        if digest is not None:
            self._full.append(self._bucket(digest), block)

    def unpublish(self, block: int) -> None:
        """Forget what a block holds; no-op if it is not published."""
        content = self._content[block]
        if content is None:
            return
        self._content[block] = None
        self.cached -= 1
        self._children.remove(block)
        if content.digest is not None:
            self._full.remove(block)

    def find(self, digest: bytes) -> int | None:
        """The full block with this history."""
        block = self._full.first(self._bucket(digest))
        while block >= 0:
            content = self._content[block]
            if content is not None and content.digest == digest:
                return block
            block = self._full.following(block)
        return None

    def nearest(self, parent: bytes, tokens: Tokens[int], step: int) -> tuple[int, int]:
        """(block, length) of the published block after `parent` that has the longest common start with `tokens`, as
        far as a copy made in step `step` may use it; (-1, 0) if there is none."""
        best, longest = -1, 0
        tried = 0
        block = self._children.first(self._bucket((parent, tokens[0])))
        while block >= 0 and tried < CANDIDATES:
            content = self._content[block]
            if content is not None and content.parent == parent and content.tokens[0] == tokens[0]:
                tried += 1
                most = min(len(tokens), len(content.tokens) if content.step < step else content.ready)
                same = 0
                while same < most and content.tokens[same] == tokens[same]:
                    same += 1
                if same > longest:
                    best, longest = block, same
            block = self._children.following(block)
        return best, longest

    def _bucket(self, key: bytes | tuple[bytes, int]) -> int:
        return hash(key) % self._buckets

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless the references are exactly `held` and all books agree (for tests)."""
        free = set(_members(self._unused, 1))
        assert len(free) == self.free, "free blocks are counted wrongly"
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, {held[block]} holders"
            assert (references == 0) == (block in free), f"block {block}: held and free at once"
        assert self.filled == sum(self._fill[b] for b in range(self.count) if self._references[b])
        contents = {block: content for block, content in enumerate(self._content) if content is not None}
        assert len(contents) == self.cached
        assert sorted(_members(self._children, self._buckets)) == sorted(contents), "children and contents differ"
        full = {block: content.digest for block, content in contents.items() if content.digest is not None}
        assert sorted(_members(self._full, self._buckets)) == sorted(full), "full blocks and contents differ"
        assert all(self.find(digest) == block for block, digest in full.items())


def _members(lists: Lists, count: int) -> Iterator[int]:
    for number in range(count):
        member = lists.first(number)
        while member >= 0:
            yield member
            member = lists.following(member)
