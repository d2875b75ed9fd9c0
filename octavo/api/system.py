"""Routes about the server itself: /health, /ping, /load, /version, /metrics."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.api.errors import unavailable
from octavo.api.frontend import service_of
from octavo.api.metrics import CONTENT_TYPE
from octavo.api.models import json_response

_STATS_SECONDS = 2.0
"""The engine answers between steps; while one takes longer, its last numbers are shown."""


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
    front = service_of(request).ready()
    try:
        stats = await asyncio.wait_for(front.engine.stats(), _STATS_SECONDS)
    except asyncio.TimeoutError:  # noqa: UP041  (another class before Python 3.11)
        stats = None
    page = front.metrics.page(stats)
    return Response(page, headers={"Content-Type": CONTENT_TYPE})
