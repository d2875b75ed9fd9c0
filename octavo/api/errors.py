"""Every error the server can answer with, and the one place that turns an exception into it.

The body is OpenAI's, `{"error": {message, type, param, code}}`. `type` carries the names vLLM uses; `code` is OpenAI's
word where there is one (`model_not_found`, `context_length_exceeded`, …) and the HTTP status otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
import pydantic
from starlette.responses import Response

from octavo.client import EngineUnavailable
from octavo.text.request import ContextLengthError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


MAX_MESSAGE = 2000
"""Characters of a message, and of the name of a field: either may repeat what the caller sent."""


class ApiError(Exception):
    """An answer that is an error: HTTP `status`, what is wrong and what to do, and which field is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message)
        self.param = None if param is None else _shortened(param)
        self.code = status if code is None else code
        self.headers = dict(headers or {})

    def payload(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, HTTPStatus(self.status).phrase)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP answer."""
        body = msgspec.json.encode(self.payload())
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def _shortened(text: str) -> str:
    """`text`, without its middle where it is too long: the end says what to do."""
    half = MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} […] {text[-half:]}"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def not_built(field: str, what: str) -> ApiError:
    """400 for a field that would change the answer and cannot be honoured: refusing beats ignoring."""
    return ApiError(
        400,
        f"{what} is not built yet in this server, so `{field}` cannot be honoured; leave it out.",
        param=field,
        code="unsupported_parameter",
    )


def unavailable(message: str, retry_after: int = 5, code: str = "service_unavailable") -> ApiError:
    """503: right request, wrong moment."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


OVERLOADED = "overloaded"
"""The code of a 503 of a server that works and has too much to do."""


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    """404 that lists what is served."""
    return ApiError(
        404,
        f"The model `{name}` does not exist. Served here: {', '.join(f'`{s}`' for s in served)}.",
        param="model",
        code="model_not_found",
    )


def from_validation(error: pydantic.ValidationError) -> ApiError:
    """400 naming the first field that failed, with the others counted."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    param = str(first["loc"][0]) if first["loc"] else None
    message = first["msg"].removeprefix("Value error, ")
    text = f"{param}: {message}" if param else message
    if len(problems) > 1:
        names = sorted({str(p["loc"][0]) for p in problems[1:] if p["loc"]} - {param})
        text += f" (and {len(problems) - 1} more: {', '.join(names)})" if names else ""
    return ApiError(400, text, param=param)


def from_exception(error: Exception) -> ApiError | None:
    """What to answer for `error`; None when it is a fault of ours, to be logged and answered with `internal`.

    A `ValueError` (sampling parameters, request building, a request the engine rejects) is the caller's; its
    `parameter` says which field is to blame.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, pydantic.ValidationError):
        return from_validation(error)
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error))
    if isinstance(error, ValueError):
        param = getattr(error, "parameter", None)
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), param=param if isinstance(param, str) else None, code=code)
    return None


@contextmanager
def given_as(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name fields as the caller wrote them; `names` has the caller's by the name in our translation."""
    try:
        yield
    except Exception as error:
        problem = from_exception(error)
        field = re.split(r"[.\[]", (problem.param if problem else None) or "", maxsplit=1)[0]
        if problem is None or field not in names:
            raise
        if "_" in field or problem.message.startswith(f"{field} "):  # it is not just a word of the sentence
            problem.message = re.sub(rf"\b{field}\b", names[field], problem.message)
        problem.param = names[field]
        raise problem from None


def internal() -> ApiError:
    """500 without details: paths and addresses stay in the log."""
    return ApiError(500, "Internal error; the server's log has the details.", code="internal_error")
