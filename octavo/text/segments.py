"""Where a text may be cut without changing its token ids, and the ids of parts seen before.

A conversation comes again with every turn, and all but its end has been tokenized before. Control tokens cut a text
before anything else looks at it, so the ids of a text are those of its parts, each beginning with a control token,
one after the other. What stands between two of them is looked up by content.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

from tokenizers import AddedToken

MOST_BYTES = 64 << 20
"""Memory of the parts remembered: about 20 million characters of English."""
LEAST = 64
"""Characters of a part, so that the openings of turns do not become parts of their own."""
_ENTRY_BYTES = 250
"""Of a part, beside its text and ids."""


def any_of(texts: Iterable[str]) -> str:
    """A regular expression that finds the longest of `texts` at a place; its speed does not depend on their number."""
    words = sorted({text for text in texts if text})
    return _tree(words) if words else r"(?!)"


def _tree(words: list[str]) -> str:
    """The expression for sorted, different, not empty words."""
    first, last = words[0], words[-1]
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    if shared:
        rest = [word[shared:] for word in words if len(word) > shared]
        tail = f"(?:{_tree(rest)})" if rest else ""
        return re.escape(first[:shared]) + tail + ("?" if rest and len(first) == shared else "")
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[0], []).append(word)
    return "|".join(map(_tree, groups.values()))


def safe_cuts(tokens: Sequence[AddedToken]) -> list[str]:
    """Those control tokens among the added `tokens` before which any text may be cut.

    The ids of `a + token + b` are those of `a`, then those of `token + b`, if the library always takes the token
    where it is spelled, and if nothing before it can tell that it is there. So it must be looked for in the text as
    it is (not `normalized`), take no space from before it, be no part of a longer added token, and overlap with the
    end of none; and it must not begin like a word or with a space, which others look for at their ends.
    """
    plain = [token.content for token in tokens if token.content and not token.normalized]
    able = {
        token.content
        for token in tokens
        if token.special
        and token.content in plain
        and not (token.normalized or token.lstrip or token.single_word)
        and not (token.content[0].isalnum() or token.content[0].isspace() or token.content[0] == "_")
    }
    ends = {text[start:] for text in plain for start in range(1, len(text))}
    lengths = sorted({len(text) for text in able})
    refused = {text for text in able if any(text[:n] in ends for n in range(1, len(text) + 1))}
    for text in plain:
        for start in range(len(text)):
            inside = (text[start : start + n] for n in lengths if n < len(text) and start + n <= len(text))
            refused.update(part for part in inside if part in able)
    return sorted(able - refused)


Part = tuple[int, str]
"""The way to encode a stretch of text, and the text."""


def parts_of(text: str, cuts: re.Pattern[str], kind: int) -> list[Part]:
    """`text`, cut where `cuts` matches, but not into parts of less than `LEAST` characters.

    Whatever comes before, the first cut after a stretch of that length without one is made: so texts that differ in one
    place have the same parts elsewhere.
    """
    starts = [0]
    next_start = LEAST
    for match in cuts.finditer(text):
        at = match.start()
        if at >= next_start:
            starts.append(at)
            next_start = at + LEAST
    ends = [*starts[1:], len(text)]
    return [(kind, text[start:end]) for start, end in zip(starts, ends, strict=True)]


class SegmentCache:
    """Token ids of parts of texts. May be used from several threads.

    Ids depend on the part alone, so whoever finds them here could have computed them: that a part was seen before
    shows in nothing but time. What was not used lately is forgotten: when new parts have filled half of the memory,
    only those of the other half that are used again are kept.
    """

    def __init__(self, encode: Callable[[list[Part]], list[list[int]]], vocab_size: int, most_bytes: int) -> None:
        """`encode`: computes the ids of parts. `most_bytes`: memory for parts, their texts included."""
        self._encode = encode
        self._vocab_size = vocab_size
        self._half = most_bytes // 2
        self._lock = threading.Lock()
        self._new: dict[Part, tuple[int, ...]] = {}
        self._old: dict[Part, tuple[int, ...]] = {}
        self._new_bytes = self._old_bytes = 0
        self._integers: list[int] = []
        """One object per id, so that an id that is remembered takes a pointer only."""

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return self._new_bytes + self._old_bytes

    def ids(self, parts: list[Part]) -> list[int]:
        """The ids of all `parts`, in order."""
        with self._lock:
            found = list(map(self._new.get, parts))
            if None in found:
                found = [self._again(part) if ids is None else ids for part, ids in zip(parts, found, strict=True)]
        if None in found:
            found = self._complete(parts, found)
        joined: list[int] = []
        for ids in found:
            joined += ids or ()
        return joined

    def _again(self, part: Part) -> tuple[int, ...] | None:
        ids = self._old.get(part)
        if ids is not None:
            self._add(part, ids)
        return ids

    def _complete(self, parts: list[Part], found: list[tuple[int, ...] | None]) -> list[tuple[int, ...] | None]:
        """`found` with the ids of those parts that nobody knew."""
        missing = list(dict.fromkeys(part for part, ids in zip(parts, found, strict=True) if ids is None))
        made = dict(zip(missing, map(self._compact, self._encode(missing)), strict=True))
        with self._lock:
            for part, ids in made.items():
                self._add(part, ids)
        return [made[part] if ids is None else ids for part, ids in zip(parts, found, strict=True)]

    def _compact(self, ids: list[int]) -> tuple[int, ...]:
        if not self._integers:
            self._integers = list(range(self._vocab_size))
        return tuple(map(self._integers.__getitem__, ids))

    def _add(self, part: Part, ids: tuple[int, ...]) -> None:
        size = sys.getsizeof(part[1]) + 8 * len(ids) + _ENTRY_BYTES
        if size > self._half or part in self._new:
            return
        if self._new_bytes + size > self._half:
            self._old, self._old_bytes = self._new, self._new_bytes
            self._new, self._new_bytes = {}, 0
        self._new[part] = ids
        self._new_bytes += size
