"""The page at `/`: its files, the live stream behind it, and the plan form.

`Door` lets only `/` and `/static/` through without a key: the files are the same everywhere, what they show is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from octavo.llm.async_llm import AsyncLLM
from octavo.server.errors import ApiError
from octavo.server.explanation import explain_document
from octavo.server.json_body import json_response
from octavo.server.live_feed import LiveFeed
from octavo.server.plan_form import PlanForm
from octavo.server.security import Keys, read_keys
from octavo.server.service import served_name
from octavo.server.settings import ServerSettings

MAX_WAITING_PLANS = 8
_STATIC = files("octavo.server") / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def _static_files() -> Mapping[str, bytes]:
    """Return the page's files by name, read once: no path of a request ever opens a file."""
    return {each.name: each.read_bytes() for each in _STATIC.iterdir() if each.is_file()}


def router(llm: AsyncLLM, settings: ServerSettings) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(include_in_schema=False)
    name = (*settings.served_model_name, served_name(llm.model_name))[0]

    @routes.get("/")
    async def page() -> Response:
        return _file("index.html")

    @routes.get("/static/{name}")
    async def static(name: str) -> Response:
        return _file(name)

    _add_live(routes, llm, settings, name)
    _add_plan(routes, PlanForm(llm.model_name, shown_as=name))
    return routes


def _add_live(routes: APIRouter, llm: AsyncLLM, settings: ServerSettings, name: str) -> None:
    watcher = Watcher(settings)
    shown = {"model": name, "shows_prompts": settings.show_prompts}
    feed = LiveFeed(lambda: _snapshot(llm, shown), lambda: _is_over(llm))

    @routes.get("/live")
    async def live(request: Request) -> Response:
        watcher.check(request)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.open(), media_type="text/event-stream", headers=headers)

    @routes.get("/live/blocks/{block_id}")
    async def block(request: Request, block_id: int) -> Response:
        watcher.check(request)
        if not settings.show_prompts:
            raise ApiError(
                403, "texts are not shown (hint: start the server with --show-prompts)", code="prompts-hidden"
            )
        if not 0 < block_id <= llm.resolved.num_blocks:
            raise ApiError(404, f"blocks are 1 to {llm.resolved.num_blocks:,}", code="not-found", param="block_id")
        token_ids = await llm.call(lambda engine: engine.block_tokens(block_id))
        text = llm.tokenizer.decode(token_ids, skip_special_tokens=False)
        return json_response({"schema": "octavo.block/1", "num_tokens": len(token_ids), "text": text})

    @routes.get("/live/requests/{request_id:path}")
    async def why(request: Request, request_id: str) -> Response:
        watcher.check(request)
        found = llm.explain(request_id)
        if found is None:
            raise ApiError(404, "there is no such request, or it is long over", code="not-found", param="request_id")
        return json_response(explain_document(found, llm.tokenizer, shows_prompts=settings.show_prompts))


def _add_plan(routes: APIRouter, form: PlanForm) -> None:
    planning = asyncio.Lock()
    num_waiting = 0

    @routes.get("/plan/form")
    async def plan_form() -> Response:
        return json_response(form.document())

    @routes.get("/plan")
    async def plan(request: Request) -> Response:
        nonlocal num_waiting
        if num_waiting >= MAX_WAITING_PLANS:
            raise ApiError(429, "others plan already", code="too-many-plans", headers={"Retry-After": "2"})
        num_waiting += 1
        try:
            async with planning:  # a plan takes a third of a second of one core: one at a time
                return json_response(await asyncio.to_thread(form.answer, dict(request.query_params)))
        finally:
            num_waiting -= 1


class Watcher:
    """Who may look at the pool: it shows the ids and lengths of everybody's requests."""

    def __init__(self, settings: ServerSettings) -> None:
        self._operator = Keys([settings.operator_key] if settings.operator_key else [])
        self._is_closed = len(read_keys(settings)) > 1 and not settings.enable_operator

    def check(self, request: Request) -> None:
        """Return if this caller may look.

        Raises:
            ApiError: 401 or 403, it may not.
        """
        if self._operator.are_asked_for:
            self._operator.check(request.headers)
        elif self._is_closed:
            raise ApiError(
                403,
                "the live view shows the requests of all keys (hint: start the server with --operator-key KEY"
                " or --enable-operator)",
                code="operator-closed",
            )


def _file(name: str) -> Response:
    content = _static_files().get(name)
    if content is None:
        raise ApiError(404, "there is no such file", code="not-found")
    return Response(content, headers=_HEADERS, media_type=_KINDS[name[name.rindex(".") :]])


def _is_over(llm: AsyncLLM) -> bool:
    health = llm.health
    return not health.is_alive or (health.is_draining and health.num_running + health.num_waiting == 0)


async def _snapshot(llm: AsyncLLM, shown: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**await llm.look(), **shown}
