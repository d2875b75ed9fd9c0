"""`Lists`: linked lists that take no memory once they are made."""

from __future__ import annotations

from array import array


class Lists:
    """So many lists, numbered from 0, of the numbers 0 … `members` - 1, each of which is in at most one of them.

    Each operation takes a fixed time. All memory is taken here: dictionaries that come and go are made anew now and
    then, at the cost of all that is in them, in the middle of a step.
    """

    __slots__ = ("_members", "_after", "_before")

    def __init__(self, members: int, lists: int) -> None:
        self._members = members
        # Rings: behind the members the heads, each of which stands before the first and after the last of its list.
        self._after = array("i", range(members + lists))
        self._before = array("i", range(members + lists))

    def first(self, number: int) -> int:
        """Of a list; -1 when it is empty."""
        return self.following(self._members + number)

    def following(self, member: int) -> int:
        """The one behind `member` in its list; -1 behind the last."""
        after = self._after[member]
        return after if after < self._members else -1

    def prepend(self, number: int, member: int) -> None:
        """Put a member that is in no list at the front of one."""
        self._link(self._members + number, member)

    def append(self, number: int, member: int) -> None:
        """Put a member that is in no list at the end of one."""
        self._link(self._before[self._members + number], member)

    def remove(self, member: int) -> None:
        """Take a member out of the list that it is in."""
        before, after = self._before[member], self._after[member]
        self._after[before] = after
        self._before[after] = before

    def _link(self, before: int, member: int) -> None:
        after = self._after[before]
        self._after[before] = self._before[after] = member
        self._before[member], self._after[member] = before, after
