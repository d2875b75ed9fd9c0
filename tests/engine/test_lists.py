"""Linked lists in fixed memory behave like lists of Python."""

from __future__ import annotations

import random

from octavo.engine.lists import Lists

MEMBERS, LISTS = 12, 4


def members(lists: Lists, number: int) -> list[int]:
    found = []
    member = lists.first(number)
    while member >= 0:
        found.append(member)
        member = lists.following(member)
    return found


def test_any_order_of_operations() -> None:
    chance = random.Random(5)
    lists = Lists(MEMBERS, LISTS)
    want: list[list[int]] = [[] for _ in range(LISTS)]
    for _ in range(2000):
        member = chance.randrange(MEMBERS)
        home = next((one for one in want if member in one), None)
        number = chance.randrange(LISTS)
        if home is not None:
            lists.remove(member)
            home.remove(member)
        elif chance.random() < 0.5:
            lists.append(number, member)
            want[number].append(member)
        else:
            lists.prepend(number, member)
            want[number].insert(0, member)
        assert [members(lists, each) for each in range(LISTS)] == want
