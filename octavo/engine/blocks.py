"""`BlockPool`: the KV pages of one KV group. Who holds them, what they contain, which to reuse first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Tokens

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
        self.filled = 0
        """Tokens in held blocks, each block counted once."""
        self._references = [0] * count
        self._fill = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._content: dict[int, Content] = {}
        self._full: dict[bytes, int] = {}
        self._children: dict[tuple[bytes, int], dict[int, None]] = {}

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - len(self._free)

    @property
    def cached(self) -> int:
        """Blocks whose content is published, held or free."""
        return len(self._content)

    def hold(self, block: int) -> int:
        """One more reference."""
        if self._references[block] == 0:
            del self._free[block]
            self.filled += self._fill[block]
        self._references[block] += 1
        return block

    def take(self) -> int:
        """A free block for new content, with one reference. Raises KeyError when none is free."""
        block, _ = self._free.popitem(last=False)
        if block in self._content:
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
        self._free[block] = None
        if block not in self._content:
            self._free.move_to_end(block, last=False)

    def fill(self, block: int, tokens: int) -> None:
        """Say how many tokens a held block has."""
        self.filled += tokens - self._fill[block]
        self._fill[block] = tokens

    def publish(self, block: int, digest: bytes | None, parent: bytes, tokens: tuple[int, ...], step: int) -> None:
        """Offer a block to others; `digest` None says that it is not full yet. A full block whose content is
        published already stays private."""
        if digest is not None and digest in self._full:
            return
        old = self._content.get(block)
        ready = 0
        if old is not None:
            ready = len(old.tokens) if old.step < step else old.ready
            self.unpublish(block)
        self._content[block] = Content(digest, parent, tokens, ready, step)
        self._children.setdefault((parent, tokens[0]), {})[block] = None
        if digest is not None:
            self._full[digest] = block

    def unpublish(self, block: int) -> None:
        """Forget what a block holds; no-op if it is not published."""
        content = self._content.pop(block, None)
        if content is None:
            return
        if content.digest is not None:
            del self._full[content.digest]
        key = (content.parent, content.tokens[0])
        siblings = self._children[key]
        del siblings[block]
        if not siblings:
            del self._children[key]

    def find(self, digest: bytes) -> int | None:
        """The full block with this history."""
        return self._full.get(digest)

    def nearest(self, parent: bytes, tokens: Tokens[int], step: int) -> tuple[int, int]:
        """(block, length) of the published block after `parent` that has the longest common start with `tokens`, as
        far as a copy made in step `step` may use it; (-1, 0) if there is none."""
        best, longest = -1, 0
        for tried, block in enumerate(reversed(self._children.get((parent, tokens[0]), {}))):
            if tried == CANDIDATES:
                break
            content = self._content[block]
            most = min(len(tokens), len(content.tokens) if content.step < step else content.ready)
            same = 0
            while same < most and content.tokens[same] == tokens[same]:
                same += 1
            if same > longest:
                best, longest = block, same
        return best, longest

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless the references are exactly `held` and all books agree (for tests)."""
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, {held[block]} holders"
            assert (references == 0) == (block in self._free), f"block {block}: held and free at once"
        assert self.filled == sum(self._fill[b] for b in range(self.count) if self._references[b])
        assert all(self._content[block].digest == digest for digest, block in self._full.items())
        listed = [block for siblings in self._children.values() for block in siblings]
        assert sorted(listed) == sorted(self._content), "children and contents differ"
