"""Hash chains: one digest per full block of a history, so that equal digests mean equal histories."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict

STRIDE = 64
"""Blocks whose digests are found together."""
ENTRY_BYTES = STRIDE * (65 + 8) + 400
"""Memory of the digests of one stride."""


def chain_root(adapter: int, salt: str, private: int | None) -> bytes:
    """Digest at the start of a hash chain. `private` (a serial number) makes a chain that no other request shares."""
    own = b"shared" if private is None else b"private" + struct.pack("<q", private)
    return hashlib.sha256(own + struct.pack("<q", adapter) + salt.encode("utf-8", "surrogatepass")).digest()


def block_digest(past: bytes, tokens: list[int]) -> bytes:
    """SHA-256 of the chain so far and one block of tokens."""
    return hashlib.sha256(past + struct.pack(f"<{len(tokens)}q", *tokens)).digest()


class Chains:
    """Makes hash chains, and remembers those of long histories, because a conversation comes again with every turn.

    What is remembered is a function of the content alone: a digest found here is the one that would be computed. Those
    used longest ago are forgotten first, so that at most `most_bytes` are used.
    """

    def __init__(self, most_bytes: int = 16 << 20) -> None:
        self._most = most_bytes // ENTRY_BYTES
        self._known: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        """By the SHA-256 of the chain so far and a stride of tokens."""

    def __len__(self) -> int:
        """Strides remembered."""
        return len(self._known)

    def extend(self, hashes: list[bytes], root: bytes, tokens: list[int], count: int, size: int) -> None:
        """Extend the digests `hashes` of a history that starts at `root` to `count` blocks of `size` tokens."""
        done = len(hashes)
        if count - done < STRIDE:
            past = hashes[-1] if hashes else root
            for i in range(done, count):
                past = block_digest(past, tokens[i * size : (i + 1) * size])
                hashes.append(past)
            return
        packed = struct.pack(f"<{(count - done) * size}q", *tokens[done * size : count * size])
        width = STRIDE * size * 8
        for start in range(0, len(packed), width):
            past = hashes[-1] if hashes else root
            stride = packed[start : start + width]
            hashes += self._stride(past, stride, size * 8) if len(stride) == width else _digests(past, stride, size * 8)

    def _stride(self, past: bytes, packed: bytes, width: int) -> tuple[bytes, ...]:
        key = hashlib.sha256(past + packed).digest()
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            return found
        found = self._known[key] = _digests(past, packed, width)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return found


def _digests(past: bytes, packed: bytes, width: int) -> tuple[bytes, ...]:
    """Digests of the blocks of `width` bytes in `packed`."""
    found = []
    for start in range(0, len(packed), width):
        past = hashlib.sha256(past + packed[start : start + width]).digest()
        found.append(past)
    return tuple(found)
