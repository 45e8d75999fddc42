"""Routes for operators: the pool, the cache, and why a request went as it did. `Door` keeps them closed by default."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from octavo.engine.engine import Engine
from octavo.server.errors import ApiError
from octavo.server.json_body import json_response
from octavo.server.protocol_answers import ERRORS
from octavo.server.service import Service


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["Operator"], responses=ERRORS)

    @routes.post("/kv/reset")
    async def reset() -> Response:
        """Forget all cached blocks; refused while requests hold any."""
        if not await service.llm.call(Engine.reset_prefix_cache):
            raise ApiError(409, "requests hold blocks of the cache (hint: try again when none runs)", code="kv-in-use")
        return json_response({"schema": "octavo.kv-reset/1", "is_reset": True})

    return routes
