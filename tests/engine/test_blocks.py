"""The block pool and the tables by themselves."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.engine.blocks import BlockPool
from octavo.engine.chain import block_digest, chain_root
from octavo.engine.tables import FullAttention, SlidingWindow, Table


def test_references_and_order_of_reuse() -> None:
    pool = BlockPool(3, 4)
    assert (pool.take(), pool.take(), pool.free, pool.used) == (0, 1, 1, 2)
    pool.publish(0, b"d0", b"root", (1, 2, 3, 4), step=1)
    pool.hold(0)
    pool.drop(0)
    assert pool.used == 2
    pool.drop(0)
    pool.drop(1)
    pool.check(Counter())
    assert [pool.take(), pool.take()] == [1, 2], "a block without content goes before a cached one"
    assert pool.find(b"d0") == 0
    assert pool.take() == 0 and pool.find(b"d0") is None
    with pytest.raises(KeyError):
        pool.take()


def test_a_free_block_can_be_held_again() -> None:
    pool = BlockPool(2, 4)
    block = pool.take()
    pool.fill(block, 4)
    pool.publish(block, b"d", b"root", (1, 2, 3, 4), step=1)
    pool.drop(block)
    assert pool.filled == 0
    assert pool.hold(block) == block and pool.filled == 4 and pool.used == 1
    pool.check(Counter([block]))
    with pytest.raises(AssertionError):
        pool.check(Counter())


def test_the_nearest_block_and_what_a_copy_may_use() -> None:
    pool = BlockPool(4, 4)
    for _ in range(3):
        pool.take()
    pool.publish(0, None, b"root", (1, 2), step=1)
    pool.publish(1, b"d1", b"root", (1, 2, 3, 9), step=1)
    pool.publish(2, None, b"other", (1, 2, 3, 4), step=1)
    assert pool.nearest(b"root", [1, 2, 3, 4], step=2) == (1, 3)
    assert pool.nearest(b"root", [1, 5], step=2)[1] == 1
    assert pool.nearest(b"root", [2], step=2) == (-1, 0)
    assert pool.nearest(b"root", [1, 2, 3, 4], step=1) == (-1, 0), "this very step writes them"
    pool.publish(0, b"d0", b"root", (1, 2, 7, 8), step=5)
    assert pool.nearest(b"root", [1, 2, 7, 8], step=5) == (0, 2), "two tokens were there before step 5"
    assert pool.nearest(b"root", [1, 2, 7, 8], step=6) == (0, 4)


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2, 4)
    pool.take(), pool.take()
    pool.publish(0, b"d", b"root", (1, 2, 3, 4), step=1)
    pool.publish(1, b"d", b"root", (1, 2, 3, 4), step=2)
    pool.unpublish(1)
    assert pool.find(b"d") == 0
    pool.unpublish(0)
    assert pool.find(b"d") is None


def test_a_window_reaches_back_as_far_as_it_should() -> None:
    window = SlidingWindow(4, 6)
    assert [window.first(p) for p in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert [window.span(n) for n in (1, 4, 5, 9, 100)] == [1, 1, 2, 3, 3]
    full = FullAttention(4)
    assert (full.first(100), full.span(9)) == (0, 3)


def test_a_table_slides_and_tells_news_once() -> None:
    pool = BlockPool(9, 4)
    table = Table(pool, SlidingWindow(4, 6))
    table.grow(3)
    assert table.news() == (0, (0, 1, 2)) and table.news() == (3, ())
    table.slide(9)
    assert table.blocks == [-1, 1, 2] and pool.used == 2 and table.held == 2
    table.grow(1)
    assert table.news()[0] == 3
    table.clear()
    assert pool.used == 0 and table.blocks == []


def test_digests_depend_on_history_salt_adapter_and_owner() -> None:
    roots = [
        chain_root(0, "", None),
        chain_root(1, "", None),
        chain_root(0, "1", None),
        chain_root(0, "", 1),
        chain_root(0, "", 2),
        chain_root(1, "1", None),
    ]
    digests = [block_digest(root, [1, 2]) for root in roots] + [block_digest(roots[0], [2, 1])]
    digests.append(block_digest(digests[0], [1, 2]))
    assert len(set(roots + digests)) == len(roots) + len(digests)
    assert block_digest(roots[0], [1, 2]) == digests[0] and len(digests[0]) == 32
