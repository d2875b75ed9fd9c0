"""How the APIs that the server speaks write what it has to say: the pieces of a streamed answer, and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.answers import Answer, Error
from octavo.api.errors import ApiError
from octavo.api.middleware import explain

_encode = msgspec.json.Encoder().encode


def frame(data: Mapping[str, Any]) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + _encode(data) + b"\n\n"


def named_frame(data: Mapping[str, Any]) -> bytes:
    """One server-sent event whose name is its `type`."""
    name: str = data.get("type", "error")
    return b"event: " + name.encode() + b"\n" + frame(data)


class Dialect(NamedTuple):
    """One API's way."""

    event: Callable[[Mapping[str, Any]], bytes] = frame
    """A piece of a streamed answer as it goes over the wire."""
    end: bytes = b""
    """What follows the last piece."""
    problem: Callable[[ApiError], dict[str, Any]] = ApiError.payload
    """The body of an error, which is also the last piece of a stream that breaks off."""
    error: type[Answer] = Error
    """What that body is, for the description of the API."""
    status: Callable[[ApiError], int] = attrgetter("status")
    """The HTTP status of an error."""
    media_type: str = "text/event-stream; charset=utf-8"
    """Of streams."""
    comment: bytes = b": keep-alive\n\n"
    """Says nothing, to keep a stream open; empty where the API has nothing of the kind."""
    warns: bool = False
    """Whether answers have a field `warnings` for fields that were ignored; a header names them in any case."""


OPENAI = Dialect(end=b"data: [DONE]\n\n", warns=True)


def refusal(error: ApiError, dialect: Dialect) -> Response:
    """The whole HTTP answer that `error` is."""
    return Response(_encode(dialect.problem(error)), dialect.status(error), error.headers, "application/json")


def speaking(dialect: Dialect, endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
    """`endpoint`, answering in `dialect`, which it finds as `request.state.dialect`."""

    async def answer(request: Request) -> Any:
        request.state.dialect = dialect
        try:
            return await endpoint(request)
        except Exception as error:
            return refusal(explain(error), dialect)

    return answer
