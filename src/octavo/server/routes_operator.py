"""Routes for operators: the pool, the cache, and why a request went as it did. `Door` keeps them closed by default."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from octavo.engine.engine import Engine
from octavo.server.errors import ApiError
from octavo.server.explanation import explain_document
from octavo.server.json_body import json_response
from octavo.server.protocol_answers import ERRORS, ErrorAnswer
from octavo.server.service import Service

_IN_USE: dict[int | str, dict[str, Any]] = {409: {"model": ErrorAnswer, "description": "Requests hold blocks"}}


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["Operator"], responses=ERRORS)

    @routes.get("/kv", response_model=dict[str, Any])
    async def pool() -> Response:
        """Show the pool, who holds what, and the last minute: `octavo.kv/1`."""
        # By the name that clients know: as it was asked for, it may be a path of this machine.
        return json_response({**await service.llm.look(), "model": service.names[0]})

    @routes.post("/kv/reset", response_model=dict[str, Any], responses=_IN_USE)
    async def reset() -> Response:
        """Forget all cached blocks; refused while requests hold any."""
        if not await service.llm.call(Engine.reset_prefix_cache):
            raise ApiError(409, "requests hold blocks of the cache (hint: try again when none runs)", code="kv-in-use")
        return json_response({"schema": "octavo.kv-reset/1", "is_reset": True})

    @routes.get("/requests/{request_id:path}", response_model=dict[str, Any])
    async def explain(request_id: str) -> Response:
        """Say why a request took what it did: `octavo.explain/1`. By its id, or by the X-Request-Id it came with."""
        found = service.llm.explain(request_id) or service.llm.explain(service.ids.find(request_id))
        if found is None:
            raise ApiError(404, "there is no such request, or it is long over", code="not-found", param="request_id")
        document = explain_document(found, service.llm.tokenizer, shows_prompts=service.settings.show_prompts)
        return json_response(document)

    return routes
