"""The ASGI application: a list of routes and a list of what wraps them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from octavo.api import answers, chat, completions, models, openapi, schemas, system, tokenize
from octavo.api.dialect import OPENAI, Dialect, refusal, speaking
from octavo.api.doors import ABSENT, DOORS
from octavo.api.errors import ApiError
from octavo.api.frontend import Service
from octavo.api.http_metrics import Measured
from octavo.api.middleware import ApiKeys, Faults, RequestId, RootPath, route_path
from octavo.api.openapi import Operation
from octavo.config import EngineConfig

_GENERATING = (400, 404, 408, 413, 500, 503)

ROUTES: tuple[Operation, ...] = (
    Operation("GET", "/health", system.health, "Whether requests are answered.", answers.Health, errors=(503,)),
    Operation("GET", "/ping", system.health, "As /health.", answers.Health, errors=(503,)),
    Operation("POST", "/ping", system.health, "As /health.", answers.Health, errors=(503,)),
    Operation("GET", "/load", system.load, "How much is going on.", answers.Load),
    Operation("GET", "/version", system.version, "Octavo's version.", answers.Version),
    Operation("GET", "/metrics", system.metrics, "Numbers for Prometheus.", "text/plain"),
    Operation("GET", "/v1/models", models.list_models, "The models served.", answers.ModelList, errors=(503,)),
    Operation("GET", "/v1/models/{name:path}", models.get_model, "One of them.", answers.ModelCard, errors=(404, 503)),
    Operation(
        "POST",
        "/v1/completions",
        completions.create,
        "Go on with a text.",
        answers.Completion,
        schemas.CompletionBody,
        answers.Completion,
        _GENERATING,
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        chat.create,
        "Answer in a conversation.",
        answers.ChatCompletion,
        schemas.ChatBody,
        answers.ChatCompletionChunk,
        _GENERATING,
    ),
    Operation(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        "Token ids of a text or a conversation.",
        answers.Tokens,
        schemas.TokenizeBody,
        errors=(400, 404, 413, 503),
    ),
    Operation(
        "POST",
        "/detokenize",
        tokenize.detokenize,
        "The text of token ids.",
        answers.Text,
        schemas.DetokenizeBody,
        errors=(400, 404, 413, 503),
    ),
    *DOORS,
)
_DESCRIPTIONS = (("/openapi.json", openapi.openapi), ("/docs", openapi.docs))


def create_app(service: Service) -> Starlette:
    """The application that answers for `service`; usable (503) before the model is ready."""
    config = service.config
    operations = operations_of(config)
    app = Starlette(
        routes=_routes(operations, not config.disable_fastapi_docs),
        middleware=_middleware(config),
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    app.state.operations = operations
    return app


def operations_of(config: EngineConfig) -> list[Operation]:
    """The routes of a server; those that generate may answer 429 where API keys have limits."""
    limited = config.max_num_reqs_per_key is not None
    return [
        operation._replace(errors=(*operation.errors, 429)) if limited and operation.event else operation
        for operation in ROUTES
    ]


def _routes(operations: Sequence[Operation], described: bool) -> list[BaseRoute]:
    paths: dict[str, list[Operation]] = {}
    for operation in operations:
        paths.setdefault(operation.path, []).append(operation)
    routes: list[BaseRoute] = [
        Route(
            path,
            endpoint=_endpoint(found),
            methods=[operation.method for operation in found],
        )
        for path, found in paths.items()
    ]
    if described:
        routes += [Route(path, endpoint=endpoint, methods=["GET"]) for path, endpoint in _DESCRIPTIONS]
    return routes


def _endpoint(operations: Sequence[Operation]) -> Callable[[Request], Awaitable[Any]]:
    """What answers at a path, by method."""
    endpoints = {operation.method: speaking(operation.dialect, operation.endpoint) for operation in operations}

    async def answer(request: Request) -> Any:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return answer


def _middleware(config: EngineConfig) -> list[Middleware]:
    """Outermost first. What browsers may do is settled before keys are asked for: they send none to find out."""
    layers = [Middleware(RequestId)]
    if root := "/".join(filter(None, (config.root_path or "").split("/"))):
        layers.append(Middleware(RootPath, root=f"/{root}"))
    layers.append(Middleware(Measured))
    if config.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=list(config.allowed_methods),
                allow_headers=list(config.allowed_headers),
                allow_credentials=config.allow_credentials,
                expose_headers=["X-Request-Id", "X-Octavo-Warnings", "Retry-After"],
            )
        )
    if config.api_key:
        layers.append(Middleware(ApiKeys, keys=config.api_key, refuse=_refusal))
    layers.append(Middleware(Faults))
    return layers


def _refusal(scope: Scope, error: ApiError) -> Response:
    """The answer to what no route answers, in the dialect of its path."""
    return refusal(error, _dialect_at(scope["method"], route_path(scope)))


def _dialect_at(method: str, path: str) -> Dialect:
    here = {operation.method: operation.dialect for operation in ROUTES if operation.path == path}
    if here:
        return here.get(method, next(iter(here.values())))
    return next((dialect for start, dialect, _ in ABSENT if path.startswith(start)), OPENAI)


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, as errors are written."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if "Allow" in headers:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    path = route_path(request.scope)
    known = ", ".join(sorted({operation.path for operation in ROUTES}))
    why = next((f" {why}" for start, _, why in ABSENT if path.startswith(start)), "")
    texts = {
        404: f"There is nothing at {request.url.path[:200]}. Paths here: {known}.{why}",
        405: f"{request.method[:20]} is not allowed at {request.url.path[:200]}: use {headers.get('Allow')}.",
    }
    problem = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)), headers=headers)
    return _refusal(request.scope, problem)
