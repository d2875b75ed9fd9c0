"""The output of a batch while it is made: a file that may be cut off anywhere, at any time, and gone on with.

The id of an answer, `batch_req_` and digits, holds which batch it belongs to and which line it answers. So the file
needs nothing beside it to tell what is done, and answers to another input are noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

_PREFIX = "batch_req_"
_BATCH_DIGITS = 16
_LINE_DIGITS = 8


class BatchError(Exception):
    """The batch cannot begin or go on; the text is one line for the user."""


class Response(msgspec.Struct):
    """What a route answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """Why no route was asked."""

    code: str
    message: str


class Answer(msgspec.Struct):
    """A line of the output: exactly one of `response` and `error` is there."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Failure | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


def batch_name(*parts: str | None) -> str:
    """The digits of all ids of a batch that is made of `parts`."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:_BATCH_DIGITS]


class Done:
    """Which lines are answered: a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0
        self.failed = 0

    def __contains__(self, number: int) -> bool:
        return number // 8 < len(self._bits) and bool(self._bits[number // 8] >> number % 8 & 1)

    def add(self, number: int, failed: bool) -> None:
        if len(self._bits) <= number // 8:
            self._bits.extend(bytes(number // 8 + 1 - len(self._bits)))
        self._bits[number // 8] |= 1 << number % 8
        self.count += 1
        self.failed += failed


class Answers:
    """The file at `path`, locked, with what is there of the batch called `name`; a cut-off last line is removed."""

    def __init__(self, path: Path, name: str, file: BinaryIO) -> None:
        self.path = path
        self.done = Done()
        self._prefix = _PREFIX + name
        self._file = file
        self._recall()

    def id_of(self, number: int) -> str:
        """The id of the answer to a line."""
        return f"{self._prefix}{number:0{_LINE_DIGITS}x}"

    def _recall(self) -> None:
        """Learn what is done, and cut off what is not whole. Raises BatchError for a file that is not this batch's."""
        decode = msgspec.json.Decoder(Answer).decode
        start = b'{"id":"' + self._prefix.encode()
        end = 0
        for line in self._file:
            begun = line.rstrip(b"\0\n")  # zeros: what a machine that lost power may leave of the last line
            if begun[: len(start)] != start[: len(begun)]:
                raise self._foreign()
            try:
                answer = decode(begun)
                number = int(answer.id.removeprefix(self._prefix), 16)
            except (msgspec.DecodeError, ValueError):
                if self._file.read(1):
                    raise self._foreign() from None
                break
            if not line.endswith(b"\n"):
                break
            self.done.add(number, answer.failed)
            end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def _foreign(self) -> BatchError:
        return BatchError(
            f"{self.path} holds answers to another input, or of another model. Give the input and the model that it "
            "was begun with to go on, or delete it to begin anew."
        )

    def add(self, number: int, custom_id: str | None, result: Response | Failure) -> None:
        """Write the answer to a line; it is there even if this process is killed now.

        Raises:
            BatchError: it cannot be written.
        """
        response, error = (result, None) if isinstance(result, Response) else (None, result)
        answer = Answer(self.id_of(number), custom_id, response, error)
        try:
            self._file.write(msgspec.json.encode(answer) + b"\n")
            self._file.flush()
        except OSError as problem:
            raise BatchError(f"cannot write {self.path}: {problem.strerror or problem}.") from None
        self.done.add(number, answer.failed)

    def settle(self) -> BinaryIO:
        """All is answered: see that it is on the disk. Returns the file, at its beginning."""
        os.fsync(self._file.fileno())
        self._file.seek(0)
        return self._file


@contextlib.contextmanager
def answers_at(path: Path, name: str) -> Iterator[Answers]:
    """The answers to the batch called `name`, kept at `path`; what has been answered stays there after the block.

    Raises:
        BatchError: the file cannot be written, is in use, or belongs to another batch.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise BatchError(f"cannot write {path}: {error.strerror or error}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(
                f"another octavo run-batch writes {path}; wait for it, or choose another output."
            ) from None
        file.seek(0)
        yield Answers(path, name, file)
