"""The description of the API, made from the table of routes: /openapi.json for programs, /docs for people."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import octavo
from octavo.api.dialect import OPENAI, Dialect
from octavo.api.middleware import OPEN_PATHS
from octavo.api.models import json_response
from octavo.api.schemas import Body
from octavo.config import EngineConfig

_REFERENCE = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_WHEN = {
    400: "The request is wrong; the message says how.",
    401: "No API key, or one that is not known.",
    404: "There is no such model, or no such answer.",
    408: "The answer was not done in time.",
    413: "The body is larger than --max-request-bytes.",
    422: "The request is wrong; the message says how.",
    424: "The answer cannot be generated.",
    429: "The server, or this API key, has too many requests in progress.",
    500: "A fault of the server; its log has the details.",
    503: "The server is loading, busy, or ending.",
}
_HEADERS = {
    "X-Request-Id": {"description": "The id of the request.", "schema": {"type": "string"}, "required": True},
    "X-Octavo-Warnings": {"description": "Fields that had no effect.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}, "required": True},
}
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Operation(NamedTuple):
    """A route, and what its description needs to know."""

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Any]]
    summary: str
    answer: type[BaseModel] | str
    """Of status 200; text is the media type of something other than JSON."""
    body: type[Body] | None = None
    event: type[BaseModel] | None = None
    """What each event holds, where the answer can be streamed."""
    errors: tuple[int, ...] = ()
    """Beside 401 of a server with API keys."""
    dialect: Dialect = OPENAI
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and schemas of what may follow a question mark."""


def document(operations: Sequence[Operation], config: EngineConfig, root_path: str) -> dict[str, Any]:
    """The description of `operations` as OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, config)
    components: dict[str, Any] = {"schemas": _schemas(operations)}
    if config.api_key:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": octavo.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, config: EngineConfig) -> dict[str, Any]:
    closed = bool(config.api_key) and operation.path not in OPEN_PATHS
    found: dict[str, Any] = {
        "operationId": operation.method.lower() + _PARAMETER.sub("one", operation.path).rstrip("/").replace("/", "_"),
        "summary": operation.summary,
        "responses": {"200": _success(operation)},
    }
    for status in sorted({*operation.errors, *([401] if closed else [])}):
        found["responses"][str(status)] = _failure(status, operation.dialect)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(operation.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query]
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": _reference(operation.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if closed:
        found["security"] = [{"bearer": []}, {"header": []}]
    return found


def _success(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    content: dict[str, Any] = (
        {answer: {"schema": {"type": "string"}}}
        if isinstance(answer, str)
        else {"application/json": {"schema": _reference(answer)}}
    )
    if operation.event is not None:
        # 3.1 has no words for a sequence of events: the form of what each holds is under `x-event`.
        content[operation.dialect.media_type.partition(";")[0]] = {"x-event": _reference(operation.event)}
    names = ["X-Request-Id", *(["X-Octavo-Warnings"] if operation.body is not None else [])]
    return {"description": "The answer.", "headers": {name: _HEADERS[name] for name in names}, "content": content}


def _failure(status: int, dialect: Dialect) -> dict[str, Any]:
    names = ["X-Request-Id", *(["Retry-After"] if status in (429, 503) else [])]
    return {
        "description": f"{HTTPStatus(status).phrase}. {_WHEN[status]}",
        "headers": {name: _HEADERS[name] for name in names},
        "content": {"application/json": {"schema": _reference(dialect.error)}},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    answers: list[type[BaseModel]] = [OPENAI.error, *(op.dialect.error for op in operations)]
    answers += [kind for op in operations for kind in (op.answer, op.event) if isinstance(kind, type)]
    bodies = [op.body for op in operations if op.body is not None]
    wanted: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = []
    wanted += [(model, "validation") for model in dict.fromkeys(bodies)]
    wanted += [(model, "serialization") for model in dict.fromkeys(answers)]
    _, found = models_json_schema(wanted, ref_template=_REFERENCE)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def page(description: dict[str, Any]) -> str:
    """A page that shows `description` and sends requests; it loads nothing from elsewhere."""
    template = files("octavo.api").joinpath("docs.html").read_text("utf-8")
    return template.replace("{{description}}", json.dumps(description).replace("<", "\\u003c"))


async def openapi(request: Request) -> Response:
    return json_response(_of(request))


async def docs(request: Request) -> Response:
    return HTMLResponse(page(_of(request)), headers={"Content-Security-Policy": _PAGE_POLICY})


def _of(request: Request) -> dict[str, Any]:
    state = request.app.state
    return document(state.operations, state.service.config, request.scope.get("root_path", ""))
