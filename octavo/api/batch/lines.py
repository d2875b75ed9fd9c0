"""The input of a batch: one request a line. What is wrong with one is said of it, and the next one is read."""

from __future__ import annotations

import difflib
import hashlib
from array import array
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec
import numpy as np

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Ask(NamedTuple):
    """A request that a line asks for."""

    number: int
    """Of its line, from 1."""
    custom_id: str
    path: str
    body: bytes
    """JSON as it stands in the line."""


class Refused(NamedTuple):
    """A line that asks for nothing that could be done."""

    number: int
    custom_id: str | None
    code: str
    message: str


class Survey(NamedTuple):
    """What must be known of an input before its first line is answered."""

    lines: int
    """Those that are not blank."""
    digest: str
    """SHA-256 of all of it."""
    repeated: frozenset[int]
    """Hashes (of this process) that several custom_ids have; nearly always because the ids are the same."""


class _Readable(Protocol):
    def readline(self, limit: int, /) -> bytes: ...


class _Fields(msgspec.Struct):
    """A line. Whether the fields are what they should be is checked one by one, to say which one is not."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Streamed(msgspec.Struct):
    stream: Any = msgspec.UNSET


_read_fields = msgspec.json.Decoder(_Fields).decode
_read_name = msgspec.json.Decoder(_Named).decode
_read_stream = msgspec.json.Decoder(_Streamed).decode


class _Digested:
    """A file of which all that is read goes into a digest, too."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def readline(self, limit: int, /) -> bytes:
        data = self._file.readline(limit)
        self.digest.update(data)
        return data


def _lines(file: _Readable, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(number, text) of the lines that are not blank; None for the text of one with more than `limit` bytes, of which
    never more than that is in memory."""
    number = 0
    while text := file.readline(limit + 1):
        number += 1
        if len(text) > limit and not text.endswith(b"\n"):
            while (rest := file.readline(limit + 1)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        text = (text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text).strip()
        if text:
            yield number, text


def survey(file: BinaryIO, limit: int) -> Survey:
    """Read through all of `file`. Takes 8 bytes of memory per line."""
    digested = _Digested(file)
    count, hashes = 0, array("q")
    for _, text in _lines(digested, limit):
        count += 1
        if (name := _name(text)) is not None:
            hashes.append(hash(name))
    found = np.sort(np.frombuffer(hashes, np.int64)) if hashes else np.empty(0, np.int64)
    return Survey(count, digested.digest.hexdigest(), frozenset(found[1:][found[1:] == found[:-1]].tolist()))


def _name(text: bytes | None) -> str | None:
    """The custom_id of a line, if there is one."""
    try:
        name = None if text is None else _read_name(text).custom_id
    except msgspec.DecodeError:
        return None
    return name if isinstance(name, str) else None


def requests(file: BinaryIO, limit: int, repeated: frozenset[int], paths: Collection[str]) -> Iterator[Ask | Refused]:
    """What the lines of `file` ask for, from where it stands.

    Args:
        limit: bytes of the longest line.
        repeated: from the `Survey` of the same file.
        paths: those that can be asked.
    """
    seen: set[str] = set()
    for number, text in _lines(file, limit):
        if text is None:
            message = f"The line is longer than {limit} bytes: send less, or raise --max-request-bytes."
            yield Refused(number, None, "line_too_long", message)
            continue
        try:
            fields = _read_fields(text)
        except msgspec.DecodeError as error:
            yield Refused(number, None, "invalid_json_line", f"Line {number} is not a JSON object: {error}.")
            continue
        name = fields.custom_id if isinstance(fields.custom_id, str) else None
        problem = _problem(fields, paths)
        if name is not None and hash(name) in repeated:
            if name in seen:
                problem = "duplicate_custom_id", "An earlier line has the same custom_id; each line needs its own."
            seen.add(name)
        if name is None or problem is not None:
            yield Refused(number, name, *(problem or _NAMELESS))
        else:
            yield Ask(number, name, fields.url, bytes(fields.body))


_NAMELESS = "invalid_custom_id", "custom_id must be a text by which the answer will be found."


def _problem(fields: _Fields, paths: Collection[str]) -> tuple[str, str] | None:
    """(code, message) of what is wrong with a line, apart from what its route will say of the body."""
    if not isinstance(fields.custom_id, str):
        return _NAMELESS
    if fields.method != "POST":
        return "invalid_method", f"method must be POST, got {_shown(fields.method)}."
    if not isinstance(fields.url, str) or fields.url not in paths:
        near = difflib.get_close_matches(str(fields.url), paths, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(paths))}."
        return "invalid_url", f"url {_shown(fields.url)} cannot be asked in a batch; {hint}"
    if not fields.body:
        return "missing_required_parameter", "body is missing: the JSON object that would be sent to url."
    try:
        stream = _read_stream(fields.body).stream
    except msgspec.DecodeError:  # no object: the route will say so
        return None
    if stream is True:
        return "stream_not_supported", "stream must be false: the answer of a line is one object."
    return None


def _shown(value: Any) -> str:
    """A value of a line for a message, cut where it is long."""
    text = "nothing" if value is None else msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else f"{text[:200]}…"


def whole(body: bytes) -> bytes:
    """`body` with `"stream": false`, where it says nothing of streams and the route's own default may be to stream."""
    try:
        if _read_stream(body).stream is not msgspec.UNSET:
            return body
    except msgspec.DecodeError:
        return body
    inside = body.strip()[1:].lstrip()
    return b'{"stream":false' + (b"" if inside == b"}" else b",") + inside
