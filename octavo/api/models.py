"""GET /v1/models and /v1/models/{id}: what is served."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.errors import model_not_found
from octavo.api.frontend import Frontend, service_of


def json_response(data: Any, headers: dict[str, str] | None = None) -> Response:
    """200 with `data` as JSON."""
    return Response(msgspec.json.encode(data), headers=headers, media_type="application/json")


def _card(front: Frontend, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.info.created,
        "owned_by": "octavo",
        "root": front.info.model,
        "parent": None,
        "max_model_len": front.info.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": front.info.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


async def list_models(request: Request) -> Response:
    front = service_of(request).ready()
    return json_response({"object": "list", "data": [_card(front, name) for name in front.served]})


async def get_model(request: Request) -> Response:
    front = service_of(request).ready()
    name = request.path_params["name"]
    if name not in front.served:
        raise model_not_found(name, front.served)
    return json_response(_card(front, name))
