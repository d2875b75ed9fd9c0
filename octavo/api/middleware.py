"""What wraps every route: request ids, API keys, faults nobody caught. Plain ASGI, so that `receive` still tells when
the client is gone."""

from __future__ import annotations

import hmac
import logging
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.errors import ApiError, from_exception, internal
from octavo.logs import REQUEST_ID

logger = logging.getLogger(__name__)

MAX_REQUEST_ID = 256
_OPEN_PATHS = frozenset({"/health", "/ping"})
"""What an orchestrator must reach without a key; every other path needs one, so that a new route is closed."""


def clean_request_id(given: str | None) -> str:
    """The caller's id, printable and at most 256 characters; a new one where none is left."""
    text = "".join(c for c in (given or "")[:MAX_REQUEST_ID] if c.isascii() and c.isprintable()).strip()
    return text or uuid.uuid4().hex


class RequestId:
    """Takes X-Request-Id, or makes one, and sends it back; routes find it as `scope["state"]["request_id"]`, log
    lines as `REQUEST_ID`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """401 unless the request carries one of `keys` as `Authorization: Bearer KEY` (or `X-Api-Key: KEY`)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "This server needs an API key: send `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        value = given.encode("latin-1")  # as it came
        return any([hmac.compare_digest(value, key) for key in self._keys])


class Faults:
    """Every exception becomes an error body: the caller's mistakes say what is wrong, ours are logged and say 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            await explain(error).response()(scope, receive, send)


def explain(error: Exception) -> ApiError:
    """The answer to `error`; one of our own faults goes to the log with its trace."""
    problem = from_exception(error)
    if problem is None:
        logger.error("a request failed", exc_info=error)
        return internal()
    return problem
