"""The ASGI application: a list of routes and a list of what wraps them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo.api import chat, completions, models, system, tokenize
from octavo.api.errors import ApiError
from octavo.api.frontend import Service
from octavo.api.http_metrics import Measured
from octavo.api.middleware import ApiKeys, Faults, RequestId

ROUTES: tuple[tuple[str, str, object], ...] = (
    ("GET", "/health", system.health),
    ("GET", "/ping", system.health),
    ("POST", "/ping", system.health),
    ("GET", "/load", system.load),
    ("GET", "/version", system.version),
    ("GET", "/metrics", system.metrics),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.get_model),
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
)


def create_app(service: Service) -> Starlette:
    """The application that answers for `service`; usable (503) before the model is ready."""
    app = Starlette(routes=_routes(), middleware=_middleware(service), exception_handlers={HTTPException: _http_error})
    app.state.service = service
    return app


def _routes() -> list[BaseRoute]:
    paths: dict[str, list[tuple[str, object]]] = {}
    for method, path, endpoint in ROUTES:
        paths.setdefault(path, []).append((method, endpoint))
    return [
        Route(path, endpoint=found[0][1], methods=[method for method, _ in found])  # type: ignore[arg-type]
        for path, found in paths.items()
    ]


def _middleware(service: Service) -> list[Middleware]:
    """Outermost first."""
    config = service.config
    layers = [Middleware(RequestId)]
    layers.append(Middleware(Measured))
    if config.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "X-Octavo-Warnings"],
            )
        )
    if config.api_key:
        layers.append(Middleware(ApiKeys, keys=config.api_key))
    layers.append(Middleware(Faults))
    return layers


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the one error format."""
    assert isinstance(error, HTTPException)
    known = ", ".join(sorted({path for _, path, _ in ROUTES}))
    texts = {
        404: f"There is nothing at {request.url.path[:200]}. Paths here: {known}.",
        405: f"{request.method} is not allowed at {request.url.path[:200]}.",
    }
    return ApiError(
        error.status_code, texts.get(error.status_code, str(error.detail)), headers=dict(error.headers or {})
    ).response()
