"""Front: the app that the socket answers with from the first moment, before the model has been loaded.

While loading, /health says so with 200 and /ready with 503, and everything else is asked to come back. Then the real
app takes over; clients notice nothing but that it works.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.app import guard
from octavo.server.errors import ApiError
from octavo.server.json_body import json_response
from octavo.server.settings import ServerSettings

RETRY_AFTER_S = 2


class Front:
    """The app of the moment."""

    def __init__(self, settings: ServerSettings) -> None:
        self._app: ASGIApp = _loading_app(settings)

    def open(self, app: ASGIApp) -> None:
        """Hand everything over to the real app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _loading_app(settings: ServerSettings) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "loading"})

    @app.get("/ready")
    async def ready() -> Response:
        return json_response({"status": "loading"}, 503, {"Retry-After": str(RETRY_AFTER_S)})

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    async def everything_else(path: str) -> Response:  # noqa: ARG001 - FastAPI passes it by name
        error = ApiError(503, "the model is being loaded", code="loading", headers={"Retry-After": str(RETRY_AFTER_S)})
        return json_response(error.body(), 503, error.headers)

    guard(app, settings)
    return app
