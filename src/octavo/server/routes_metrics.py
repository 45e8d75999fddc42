"""`/metrics`: what the engine did since it started, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.core.block_pool import CACHED, EMPTY
from octavo.core.events import Event
from octavo.engine.engine import Engine, EventListener
from octavo.errors import EngineStoppedError, OctavoError, QueueFullError
from octavo.llm.async_llm import AsyncLLM
from octavo.server.metrics_export import MetricsExport
from octavo.server.metrics_fold import MetricsFold
from octavo.server.metrics_table import PoolUse
from octavo.server.service import served_name
from octavo.server.settings import ServerSettings

LOOK_EVERY_S = 0.25
"""How old the pool's gauges may be while something runs; when nothing does, they are exact."""


def router(llm: AsyncLLM, settings: ServerSettings) -> APIRouter:
    """Return the route; counting begins here.

    Raises:
        InvalidParameterError: `metrics_prefix` cannot begin a name.
    """
    routes = APIRouter(tags=["Health"])
    watch = EngineWatch(llm)
    name = (*settings.served_model_name, served_name(llm.model_name))[0]
    export = MetricsExport(watch.fold, lambda: watch.pool_use, model=name, prefix=settings.metrics_prefix)

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Return counts and times in Prometheus' format."""
        content, content_type = export.render(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    return routes


class EngineWatch:
    """Keeps counts and pool gauges where a scrape finds them without asking the engine, which may be stalled or gone.

    Written on the engine's thread, but for refusals, which come before it.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.fold = MetricsFold()
        self._block_size = llm.resolved.block_size
        self._block_bytes = llm.card.block_bytes
        self._looked_s = float("-inf")
        self.pool_use = self._pool_use(bytes(llm.resolved.num_blocks))
        llm.watch(self._listener)
        llm.subscribe_refusals(self._take_refusal)

    def _listener(self, engine: Engine) -> EventListener:
        def listen(events: Sequence[Event]) -> None:
            self.fold.take(events, engine.request_times, block_size=self._block_size)
            now_s = engine.now_s()
            if self.fold.num_running == 0 or now_s - self._looked_s >= LOOK_EVERY_S:
                self._looked_s = now_s
                self.pool_use = self._pool_use(engine.snapshot().block_map)

        return listen

    def _take_refusal(self, refusal: OctavoError) -> None:
        # On an event loop's thread, and its only writer there.
        if isinstance(refusal, QueueFullError):
            self.fold.reject("queue_full")
        elif isinstance(refusal, EngineStoppedError):
            self.fold.reject("stopping")

    def _pool_use(self, block_map: bytes) -> PoolUse:
        num_cached, num_free = block_map.count(CACHED), block_map.count(EMPTY)
        return PoolUse(
            num_referenced_blocks=len(block_map) - num_cached - num_free,
            num_cached_blocks=num_cached,
            num_free_blocks=num_free,
            block_size=self._block_size,
            block_bytes=self._block_bytes,
        )
