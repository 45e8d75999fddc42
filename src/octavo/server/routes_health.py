"""`/health`, `/ready`, `/version`: for those who watch the server.

health   200 while the step loop lives and moves; restart the server when it is not
ready    200 when a request would be taken: 503 while loading, draining, stalled or failed; send requests elsewhere
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from octavo.llm.async_llm import AsyncLLM
from octavo.server.json_body import json_response
from octavo.server.protocol_answers import ERRORS, HealthAnswer, VersionAnswer
from octavo.version import __version__

_UNWELL: dict[int | str, dict[str, Any]] = {503: {"model": HealthAnswer, "description": "Not so"}}


def router(llm: AsyncLLM) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["Health"])

    @routes.get("/health", response_model=HealthAnswer, responses=_UNWELL)
    async def health() -> Response:
        """Say whether the step loop lives."""
        status = status_of(llm)
        return json_response({"status": status}, 503 if status in ("stalled", "failed") else 200)

    @routes.get("/ready", response_model=HealthAnswer, responses={**ERRORS, **_UNWELL})
    async def ready() -> Response:
        """Say whether a request would be taken."""
        status = status_of(llm)
        return json_response({"status": status}, 200 if status == "ok" else 503)

    @routes.get("/version", response_model=VersionAnswer, responses=ERRORS)
    async def version() -> Response:
        """Say what runs."""
        return json_response({"version": __version__})

    return routes


def status_of(llm: AsyncLLM) -> str:
    """Return how the engine is, in one word."""
    health = llm.health
    if not health.is_alive:
        return "failed"
    if health.is_stalled:
        return "stalled"
    return "draining" if health.is_draining else "ok"
