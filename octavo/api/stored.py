"""Answers that callers may come back to by id: in memory, bounded, each one's own."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MOST = 10_000
"""Answers that are kept."""
MOST_BYTES = 256 * 1024 * 1024
"""Of all of them, with what was asked."""
_OVERHEAD = 512
"""Bytes that an answer takes beside its texts."""


class Stored(NamedTuple):
    """One answer."""

    owner: int | None
    """Number of the API key that it belongs to; None on a server without keys."""
    previous: str | None
    """Id of the answer that it goes on from."""
    asked: bytes
    """Its input as JSON, without that of the ones before."""
    answer: bytes
    """Itself as JSON."""

    @property
    def size(self) -> int:
        return len(self.asked) + len(self.answer) + _OVERHEAD


class StoredAnswers:
    """Answers by id. What was not used for the longest time goes first when there are too many; an answer never goes
    before one that goes on from it, so that a conversation is there as a whole or not at all."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._found: OrderedDict[str, Stored] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._found)

    def put(self, name: str, answer: Stored) -> None:
        """Keep an answer under a name that is new."""
        self._found[name] = answer
        self._bytes += answer.size
        self._use(name)
        while len(self._found) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._found.popitem(last=False)[1].size

    def get(self, name: str, owner: int | None) -> Stored | None:
        """The answer of that name, if there is one that belongs to `owner`."""
        found = self._found.get(name)
        if found is None or found.owner != owner:
            return None
        self._use(name)
        return found

    def conversation(self, name: str, owner: int | None) -> list[Stored]:
        """The answer of that name and all that it goes on from, the oldest first.

        Raises:
            KeyError: with the name of the one that is not there.
        """
        if self.get(name, owner) is None:
            raise KeyError(name)
        turns: list[Stored] = []
        step: str | None = name
        while step is not None:
            turns.append(self._found[step])
            step = turns[-1].previous
        return turns[::-1]

    def remove(self, name: str, owner: int | None) -> bool:
        """Forget the answer; whether there was one that belongs to `owner`."""
        if self.get(name, owner) is None:
            return False
        self._bytes -= self._found.pop(name).size
        return True

    def _use(self, name: str) -> None:
        """What goes on comes before what it goes on from, in the order in which they are to go."""
        step: str | None = name
        while step is not None and step in self._found:
            self._found.move_to_end(step)
            step = self._found[step].previous
