"""From the bytes of a request to a checked body: limits while reading, strict JSON, then the schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.api.errors import ApiError, bad_request
from octavo.api.schemas import Body

_B = TypeVar("_B", bound=Body)
PATIENCE = 60.0
"""Seconds to wait for the next part of a body."""
_LARGE = 256 * 1024
"""Bodies over this many bytes are parsed beside the event loop."""
MAX_DEPTH = 128
"""Levels of objects and lists in a body: what walks through it later may do so by calling itself."""


async def parse(request: Request, schema: type[_B], limit: int, any_type: bool = False) -> _B:
    """The body of `request` as `schema`. `any_type`: it may be announced as something other than JSON.

    Raises:
        ApiError: 413 over `limit` bytes (found while reading), 408 where the rest does not come, 400 for anything else
            that is wrong.
        pydantic.ValidationError: the JSON does not fit the schema.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json") and not any_type:
        raise bad_request(f"The body must be JSON: send `Content-Type: application/json` (got {kind[:100]!r}).")
    raw = await _read(request, limit)
    data = await asyncio.to_thread(decode, raw) if len(raw) > _LARGE else decode(raw)
    return schema.model_validate(data)


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        413,
        f"The request body is larger than {limit} bytes, the most this server takes; send less "
        "or start it with a larger --max-request-bytes.",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while True:
            chunk = await asyncio.wait_for(anext(stream), PATIENCE)
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
    except StopAsyncIteration:
        return b"".join(chunks)
    except ClientDisconnect:
        raise bad_request("The connection closed before the whole body had come.") from None
    except asyncio.TimeoutError:  # noqa: UP041  (another class before Python 3.11)
        raise ApiError(
            408,
            f"The body stopped coming after {size} bytes; send it in one go.",
            headers={"Connection": "close"},
        ) from None


def decode(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises:
        ApiError: 400 where it is none, is nested too deeply, or holds half of a surrogate pair.
    """
    if not raw.strip():
        raise bad_request("The body is empty; send a JSON object.")
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        data = _decode_slowly(raw)
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _deeper(data, MAX_DEPTH):
        raise bad_request(f"The body is nested too deeply: at most {MAX_DEPTH} levels.")
    if not isinstance(data, dict):
        raise bad_request(f"The body must be a JSON object, not {type(data).__name__}.")
    return data


def _decode_slowly(raw: bytes) -> Any:
    """What Python's own reader makes of a text that the quick one refuses: it says where the mistake is, takes numbers
    that the schema is to refuse by name, and lone surrogates, which are looked for here."""
    try:
        text = raw.decode("utf-8")
        data = json.loads(text)
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    if isinstance(data, dict) and not _deeper(data, MAX_DEPTH):
        _refuse_lone_surrogates(data)
    return data


def _deeper(data: Any, most: int) -> bool:
    """Whether `data` has more than `most` levels of objects and lists."""
    level = [data]
    for _ in range(most):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _refuse_lone_surrogates(data: dict[str, Any]) -> None:
    for name, value in data.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            param = name.encode("utf-8", "replace").decode("utf-8")
            raise bad_request(f"{param} holds half of a surrogate pair, which is not text.", param) from None
