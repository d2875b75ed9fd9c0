"""Hash chains: remembered digests are those that would be computed."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.chain import ENTRY_BYTES, STRIDE, Chains, chain_root

ROOT = chain_root(0, "", None)
SIZE = 2
"""Tokens per block; small, so that histories of several strides are short."""


def plain(root: bytes, tokens: list[int], count: int, size: int = SIZE) -> list[bytes]:
    """The chain block by block, as the format says."""
    found = []
    for i in range(count):
        root = hashlib.sha256(root + struct.pack(f"<{size}q", *tokens[i * size : (i + 1) * size])).digest()
        found.append(root)
    return found


@given(
    lengths=st.lists(st.integers(0, 5 * STRIDE * SIZE), min_size=1, max_size=8),
    change=st.none() | st.integers(0, 5 * STRIDE * SIZE - 1),
    steps=st.lists(st.integers(1, 2 * STRIDE), max_size=6),
    strides=st.integers(0, 4),
)
def test_any_way_to_a_chain_gives_the_same_digests(
    lengths: list[int], change: int | None, steps: list[int], strides: int
) -> None:
    """Histories that share a beginning, or differ in one token, extended in any steps, whatever is forgotten."""
    chains = Chains(strides * ENTRY_BYTES)
    whole = list(range(5 * STRIDE * SIZE))
    for turn, length in enumerate(lengths):
        tokens = whole[:length]
        if change is not None and turn % 2 and change < length:
            tokens[change] = -1
        hashes: list[bytes] = []
        counts = [min(sum(steps[: i + 1]), length // SIZE) for i in range(len(steps))]
        for count in [*counts, length // SIZE]:
            chains.extend(hashes, ROOT, tokens, count, SIZE)
            assert hashes == plain(ROOT, tokens, count)
        assert len(chains) <= strides


def test_roots_are_apart() -> None:
    chains, tokens = Chains(), list(range(STRIDE * SIZE))
    salted = chain_root(0, "mine", None)
    for root in (ROOT, salted, ROOT):
        hashes: list[bytes] = []
        chains.extend(hashes, root, tokens, STRIDE, SIZE)
        assert hashes == plain(root, tokens, STRIDE)
    assert len(chains) == 2


def test_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = Chains(2 * ENTRY_BYTES)

    def digests_made(first: int) -> int:
        made: list[bytes] = []
        real = hashlib.sha256

        def counted(data: bytes) -> object:
            made.append(data)
            return real(data)

        monkeypatch.setattr(hashlib, "sha256", counted)
        chains.extend([], ROOT, [first] * STRIDE * SIZE, STRIDE, SIZE)
        monkeypatch.undo()
        return len(made)

    fresh, again = STRIDE + 1, 1
    assert [digests_made(n) for n in (1, 2, 1, 3, 1, 2, 3)] == [fresh, fresh, again, fresh, again, fresh, fresh]


def test_tokens_that_are_no_numbers_of_64_bits_are_refused() -> None:
    with pytest.raises(struct.error):
        Chains().extend([], ROOT, [1 << 63] * STRIDE * SIZE, STRIDE, SIZE)
