"""create_app: the routes of a server around one engine, and what every request passes first.

AccessLog  ──▶  CORS, if asked for  ──▶  Door  ──▶  routes
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.llm.async_llm import AsyncLLM
from octavo.server import (
    routes_health,
    routes_metrics,
    routes_openai,
    routes_operator,
    routes_page,
    routes_tokens,
)
from octavo.server.access_log import AccessLog
from octavo.server.errors import to_api_error
from octavo.server.json_body import json_response
from octavo.server.security import Door, read_keys
from octavo.server.service import Service
from octavo.server.settings import ServerSettings
from octavo.version import __version__


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Return the app. The engine is started and stopped by whoever made it.

    Raises:
        OctavoError: the file of keys cannot be used.
    """
    service = Service(llm, settings)
    app = FastAPI(
        title="Octavo",
        version=__version__,
        summary="OpenAI-compatible server with a live view of its KV cache",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.openapi = lambda: _document(app)  # type: ignore[method-assign] # FastAPI's own way to change it
    app.include_router(routes_openai.router(service))
    app.include_router(routes_tokens.router(service))
    app.include_router(routes_health.router(llm))
    app.include_router(routes_operator.router(service))
    app.include_router(routes_metrics.router(llm, settings))
    app.include_router(routes_page.router(llm, settings))
    for kind in (OctavoError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    guard(app, settings)
    return app


def guard(app: FastAPI, settings: ServerSettings) -> None:
    """Put everything before the routes that a request passes first."""
    app.add_middleware(Door, settings=settings, keys=read_keys(settings))
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client for browsers sends a dozen of its own; the origin is what counts
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(AccessLog)


def _document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, without the status that FastAPI would use for bad requests and we do not."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema


async def _answer_error(_request: Request, error: Exception) -> Response:
    if isinstance(error.__cause__, ClientDisconnect):
        raise error.__cause__  # FastAPI takes a client that left for a body that cannot be read
    answered = to_api_error(error)
    return json_response(answered.body(), answered.status_code, answered.headers)
