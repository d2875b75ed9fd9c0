"""Routes about the server itself: /health, /ping, /load, /version, /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.api.errors import unavailable
from octavo.api.frontend import service_of
from octavo.api.metrics import CONTENT_TYPE
from octavo.api.models import json_response


async def health(request: Request) -> Response:
    """200 when requests are answered; 503 with the reason while loading, draining, or without an engine."""
    front = service_of(request).ready()
    state, reason = front.engine.status
    if state != "ready":
        raise unavailable(f"The engine is {state}: {reason}")
    return json_response({"status": "ok"})


async def load(request: Request) -> Response:
    return json_response({"server_load": service_of(request).active})


async def version(request: Request) -> Response:
    return json_response({"version": octavo.__version__})


async def metrics(request: Request) -> Response:
    return Response(await service_of(request).metrics.page(), headers={"Content-Type": CONTENT_TYPE})
