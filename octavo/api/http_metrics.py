"""HTTP requests on /metrics, under the names of prometheus-fastapi-instrumentator, which vLLM uses.

No label can take a value of the client's making: a path without a route is "none", a method nobody knows is "other".
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.middleware import route_path

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
_COARSE = (0.1, 0.5, 1)


class HttpNumbers:
    """What there is to tell of the requests that were answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "HTTP requests by route, method and class of status (2xx, 4xx, 5xx).",
            ["handler", "method", "status"],
            registry=registry,
        )
        self._responses = Counter("octavo:http_responses", "HTTP answers by status code.", ["code"], registry=registry)
        self._bytes_in = Summary(
            "http_request_size_bytes", "Bytes of request bodies, as announced.", ["handler"], registry=registry
        )
        self._bytes_out = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", ["handler"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the last byte of its answer, by route and method.",
            ["handler", "method"],
            buckets=_COARSE,
            registry=registry,
        )
        self._fine_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "From a request's headers to the last byte of its answer, in finer steps.",
            buckets=_FINE,
            registry=registry,
        )

    def answered(self, handler: str, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        """A request was answered, or ended by its client (status 499). Sizes are in bytes."""
        method = method if method in _METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._responses.labels(str(status)).inc()
        self._bytes_in.labels(handler).observe(received)
        self._bytes_out.labels(handler).observe(sent)
        self._seconds.labels(handler, method).observe(seconds)
        self._fine_seconds.observe(seconds)


class Measured:
    """ASGI middleware that tells the metrics of the service behind it of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._plain: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status, sent = 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            announced = Headers(scope=scope).get("content-length", "")
            scope["app"].state.service.metrics.http.answered(
                self._handler(scope),
                scope["method"],
                status or 499,
                time.monotonic() - began,
                int(announced) if announced.isascii() and announced.isdigit() and len(announced) < 16 else 0,
                sent,
            )

    def _handler(self, scope: Scope) -> str:
        """The path of the route that answers, with its parameters unfilled."""
        routes: Iterable[BaseRoute] = scope["app"].routes
        if self._plain is None:
            self._plain = frozenset(
                route.path for route in routes if isinstance(route, Route) and not route.param_convertors
            )
        path = route_path(scope)
        if path in self._plain:
            return path
        return next(
            (
                route.path
                for route in routes
                if isinstance(route, Route) and route.param_convertors and route.matches(scope)[0] is not Match.NONE
            ),
            "none",
        )
