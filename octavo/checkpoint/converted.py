"""Matrices that took work to read, kept on disk for the next start: those quantized while they are loaded, put together
from codes and scales, or rewritten in a format that products can read.

They are kept as rows in a format of `octavo.quant`, mapped when they are read and packed into panels like any others.
Panels themselves are not kept: packing goes at the speed of reading, and panels lie in huge pages, which a mapped file
does not have.

A file holds MAGIC · the matrices, each at a multiple of 64 bytes · an index in JSON · TRAILER (where the index is, its
size, its CRC-32, MAGIC). It is written under another name and renamed when it is whole and on the disk; a file that is
not what it should be is ignored, and written again. Who writes a file holds a lock on it, which ends with its process:
what has no lock was left by one that was killed, and the next start removes it, so that no number of them fills the
disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import Stored
from octavo.quant import row_bytes

logger = logging.getLogger(__name__)

MAGIC = b"octavo matrices\x01"
TRAILER = struct.Struct("<QQI16s")
ALIGNMENT = 64

LEAST = 16 << 20
"""Bytes below which nothing is kept: so little is converted in a moment."""


class Place(NamedTuple):
    """Where a matrix lies in the file."""

    kind: str
    n_out: int
    n_in: int
    at: int
    columns_at: int | None
    """Of the order of columns, int32, where it has one."""


class Converted:
    """The converted matrices of one checkpoint in `folder`. As a context manager it keeps what is made in the block,
    unless that ends with an error.

    `key`: everything that the matrices follow from (`identity`). `limit`: the most bytes that all files of the folder
    may take; the least recently used make room.
    """

    def __init__(self, folder: Path, key: str, limit: int) -> None:
        self.file = folder / f"{key}.matrices"
        self._limit = limit
        self._places: dict[str, Place] = {}
        self._data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._writer: _Writer | None = None
        try:
            self._data, self._places = _open(self.file)
            with suppress(OSError):  # a folder may be there to be read alone
                os.utime(self.file)  # the least recently used are removed first
        except FileNotFoundError:
            self._writer = _begin(self.file, limit)
        except (OSError, ValueError, TypeError, struct.error) as error:
            logger.warning("%s is not used and will be written again: %s", self.file, error)
            self._writer = _begin(self.file, limit)

    @property
    def found(self) -> bool:
        """Whether an earlier start has left matrices."""
        return bool(self._places)

    def matrix(self, name: str, make: Callable[[], Stored]) -> Stored:
        """The matrix called `name`: as it was kept, or else made now. One whose data may be written to was made, and is
        kept; one that is a view of the checkpoint's file is not."""
        place = self._places.get(name)
        if place is not None:
            return self._read(place)
        stored = make()
        if self._writer is not None and stored.data.flags.writeable:
            try:
                self._writer.add(name, stored)
            except OSError as error:
                logger.warning("converted weights are not kept: %s", error)
                self._writer.discard()
                self._writer = None
        return stored

    def _read(self, place: Place) -> Stored:
        kind, n_out, n_in, at, columns_at = place
        width = row_bytes(kind, n_in)
        rows = self._data[at : at + n_out * width].reshape(n_out, width)
        columns = None
        if columns_at is not None:
            columns = self._data[columns_at : columns_at + 4 * n_in].view(np.int32)
        return Stored(kind, n_out, n_in, rows, columns)

    def __enter__(self) -> Converted:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if error is not None or writer.bytes < LEAST:
            writer.discard()
        else:  # the disk may take long, and nobody waits for it but the end of the process
            threading.Thread(target=writer.finish, args=(self._limit,), name="octavo-converted").start()


def identity(files: Iterable[Path], config: Any, code: Iterable[Path]) -> str:
    """A key for what is converted from `files` as `config` says (anything that is JSON) by the modules `code`. It
    changes when a file is replaced or written to, also by a copy with the times of its source (nobody can set when a
    file itself was changed), and with every change of the code."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        digest.update(f"{file.resolve()}\n{stat.st_size} {times} {stat.st_ino}\n".encode())
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for module in sorted(code):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:32]


def _open(file: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Place]]:
    """Raises OSError, ValueError, TypeError, struct.error for what is no whole file of ours."""
    with file.open("rb") as opened:
        data = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    at, size, crc, magic = TRAILER.unpack(data[-TRAILER.size :].tobytes())
    index = data[at : at + size].tobytes()
    if magic != MAGIC or at + size + TRAILER.size != len(data) or zlib.crc32(index) != crc:
        raise ValueError("it is broken, or not a file of converted weights")
    places = {name: Place(*place) for name, place in json.loads(index).items()}
    for kind, n_out, n_in, begin, columns_at in places.values():
        columns = (columns_at, columns_at + 4 * n_in) if columns_at is not None else (0, 0)
        if min(begin, n_out, n_in, columns[0]) < 0 or max(begin + n_out * row_bytes(kind, n_in), columns[1]) > at:
            raise ValueError("its index does not fit")
    return data, places


def _begin(file: Path, limit: int) -> _Writer | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(file.parent)
        return _Writer(file, limit)
    except OSError as error:
        logger.warning("converted weights are not kept: %s", error)
        return None


class _Writer:
    """Writes a file under another name."""

    def __init__(self, file: Path, limit: int) -> None:
        self._file = file
        self._limit = limit
        descriptor, name = tempfile.mkstemp(".unfinished", file.stem + ".", file.parent)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._unfinished = Path(name)
        self._out: BinaryIO = os.fdopen(descriptor, "wb")
        self._places: dict[str, Place] = {}
        self._out.write(MAGIC)

    @property
    def bytes(self) -> int:
        return self._out.tell()

    def add(self, name: str, stored: Stored) -> None:
        """Raises OSError, also for what would be more than the limit."""
        if self.bytes + stored.data.nbytes > self._limit:
            raise OSError(f"they take more than {self._limit:,} bytes")
        at = self._put(stored.data)
        columns_at = None if stored.columns is None else self._put(stored.columns.astype("<i4"))
        self._places[name] = Place(stored.kind, stored.n_out, stored.n_in, at, columns_at)

    def _put(self, values: npt.NDArray[Any]) -> int:
        self._out.write(bytes(-self.bytes % ALIGNMENT))
        at = self.bytes
        self._out.write(np.ascontiguousarray(values).data)
        return at

    def finish(self, limit: int) -> None:
        """Bring the file to the disk and give it its name; older ones make room."""
        try:
            index = json.dumps(self._places).encode()
            at = self.bytes
            self._out.write(index + TRAILER.pack(at, len(index), zlib.crc32(index), MAGIC))
            self._out.flush()
            os.fsync(self._out.fileno())
            self._unfinished.replace(self._file)  # while it is locked still
            self._out.close()
            _make_room(self._file, limit)
        except OSError as error:
            logger.warning("converted weights are not kept: %s", error)
            self.discard()

    def discard(self) -> None:
        with suppress(OSError):
            self._out.close()
        with suppress(OSError):
            self._unfinished.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files that nobody writes any more."""
    for file in folder.glob("*.unfinished"):
        with suppress(OSError), file.open("rb") as opened:  # BlockingIOError: somebody writes it
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


def _make_room(newest: Path, limit: int) -> None:
    """Remove the least recently used files but the newest until all fit."""
    stats = {}
    for file in newest.parent.glob("*.matrices"):
        with suppress(OSError):
            stats[file] = file.stat()
    total = sum(stat.st_size for stat in stats.values())
    for file in sorted(stats, key=lambda file: stats[file].st_mtime_ns):
        if total <= limit:
            return
        if file != newest:
            with suppress(OSError):
                file.unlink()
            total -= stats[file].st_size
