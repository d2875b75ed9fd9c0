"""Which requests the engine computes at this moment, in memory that outlives its process.

The engine's process writes the ids of a step's requests before it starts the step; when the process dies, or hangs, the
front end reads who was there. One writer, one reader; the reader asks while the writer may be dead, so a half-written
record reads as an empty one.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence

import msgspec

_HEAD = struct.Struct("<dI")
"""When the step started, in seconds of the monotonic clock, which all processes of a machine share (0: the engine is
idle), and the bytes of the record behind."""
_LENGTH = struct.Struct("<I")
_LONGEST_ID = 512


class FlightRecorder:
    """The record, in a file without a name.

    Args:
        fd: an open file descriptor of such a file, as `file()` made it; it is closed here.
    """

    def __init__(self, fd: int) -> None:
        try:
            self._memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    @staticmethod
    def file(requests: int) -> int:
        """The descriptor of a new file with room for the ids of so many requests; the caller closes it."""
        size = _HEAD.size + requests * _LONGEST_ID
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("octavo-flight-recorder")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        return fd

    def note(self, ids: Sequence[str]) -> None:
        """A step with these requests starts now; with none, the engine is idle. Ids there is no room for are left
        out."""
        body = msgspec.msgpack.encode(ids) if ids else b""
        while _HEAD.size + len(body) > len(self._memory):
            ids = ids[: len(ids) // 2]
            body = msgspec.msgpack.encode(ids)
        _LENGTH.pack_into(self._memory, _HEAD.size - _LENGTH.size, 0)
        self._memory[_HEAD.size : _HEAD.size + len(body)] = body
        _HEAD.pack_into(self._memory, 0, time.monotonic() if ids else 0.0, len(body))

    def ids(self) -> list[str]:
        """The requests of the step that has started and not ended."""
        _, length = _HEAD.unpack_from(self._memory)
        try:
            return msgspec.msgpack.decode(self._memory[_HEAD.size : _HEAD.size + length], type=list[str])
        except msgspec.MsgspecError:
            return []

    def seconds(self) -> float:
        """How long ago the last step started; 0.0 while the engine is idle."""
        started, _ = _HEAD.unpack_from(self._memory)
        return time.monotonic() - float(started) if started else 0.0

    def close(self) -> None:
        self._memory.close()
