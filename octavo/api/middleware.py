"""What wraps every route: the path before it, request ids, API keys, faults nobody caught. Plain ASGI, so that
`receive` still tells when the client is gone."""

from __future__ import annotations

import hashlib
import hmac
import logging
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.errors import ApiError, from_exception, internal
from octavo.logs import REQUEST_ID

logger = logging.getLogger(__name__)

MAX_REQUEST_ID = 256
OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""What an orchestrator must reach without a key; every other path needs one, so that a new route is closed."""


def clean_request_id(given: str | None) -> str:
    """The caller's id, printable and at most 256 characters; a new one where none is left."""
    text = "".join(c for c in (given or "")[:MAX_REQUEST_ID] if c.isascii() and c.isprintable()).strip()
    return text or uuid.uuid4().hex


def route_path(scope: Scope) -> str:
    """The path of a request as `ROUTES` has it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RootPath:
    """Serves the same routes under a prefix, whether the proxy that publishes it there cuts it off or not."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = route_path(scope)  # what the client asked for: a server that knows the prefix puts it in front
            if path.startswith(f"{self._root}/"):
                path = path[len(self._root) :]
            scope = {**scope, "root_path": self._root, "path": self._root + path}
        await self._app(scope, receive, send)


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
    """401 unless the request carries one of `keys` as `Authorization: Bearer KEY` (or `X-Api-Key: KEY`); `refuse` makes
    the answer, as the path has it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], refuse: Callable[[Scope, ApiError], Response]) -> None:
        self._app = app
        self._refuse = refuse
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = self._find(Headers(scope=scope))
        if key is not None or route_path(scope) in OPEN_PATHS:
            scope.setdefault("state", {})["api_key"] = key
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "This server needs an API key, and got none that it knows: send `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await self._refuse(scope, refusal)(scope, receive, send)

    def _find(self, headers: Headers) -> int | None:
        """The number of the key that came; takes equally long for every key, and for none."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given.encode("latin-1"))  # as it came
        same = [hmac.compare_digest(digest, key) for key in self._keys]
        return same.index(True) if any(same) else None


def _digest(key: bytes) -> bytes:
    """Of one length for all keys, so that comparing tells nothing of theirs."""
    return hashlib.sha256(key).digest()


def key_of(scope: Scope) -> int | None:
    """The number of the API key a request came with; None where there are no keys."""
    key: int | None = scope["state"].get("api_key")
    return key


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
