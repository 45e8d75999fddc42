"""Shows the picture of the KV cache while requests run: redrawn on a terminal, one frame where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from octavo.cli.kv_view import draw, measure_pool
from octavo.cli.render import stderr_console
from octavo.core.events import Event
from octavo.core.snapshot import Snapshot
from octavo.engine.engine import Engine

_FRAMES_PER_S = 10


@contextmanager
def show_kv_while_running(engine: Engine, *, allocator: str) -> Iterator[None]:
    """Draw what the allocator holds after each step; at the end, the fullest step and what the whole run came to."""
    console = stderr_console()
    screen = _Screen(engine, allocator, console)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=_FRAMES_PER_S, transient=True) as live:
            screen.live = live
            yield
    else:
        yield
    screen.finish()


class _Screen:
    """Looks at the engine whenever it publishes events: after each step, when requests that ended are gone."""

    def __init__(self, engine: Engine, allocator: str, console: Console) -> None:
        self.live: Live | None = None
        self._engine = engine
        self._allocator = allocator
        self._console = console
        self._fullest: Snapshot | None = None
        engine.subscribe(self._look)

    def finish(self) -> None:
        if self._fullest is not None:
            self._console.print("The fullest step:")
            self._console.print(draw(self._fullest, allocator=self._allocator, width=self._console.width))
        metrics = self._engine.metrics
        self._console.print(
            f"Over {metrics.num_steps:,} steps: {metrics.mean_running:.1f} requests at once on average"
            f" (at most {metrics.max_running}), {metrics.kv_token_utilization_ratio:.0%} of held places filled;"
            f" {metrics.num_hit_tokens:,} tokens from the prefix cache, {metrics.num_copies:,} blocks copied,"
            f" {metrics.num_preemptions:,} preemptions"
        )

    def _look(self, _events: Sequence[Event]) -> None:
        snapshot = self._engine.snapshot()
        if self._fullest is None or _fullness(snapshot) > _fullness(self._fullest):
            self._fullest = snapshot
        if self.live is not None:
            self.live.update(draw(snapshot, allocator=self._allocator, width=self._console.width))


def _fullness(snapshot: Snapshot) -> tuple[int, int]:
    use = measure_pool(snapshot)
    return use.num_blocks, use.num_filled_places
