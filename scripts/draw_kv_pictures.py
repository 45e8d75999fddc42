"""Writes the pictures in docs/kv-cache.md: the real scheduler under small scripted workloads, drawn by the real view.

No model is needed: a fake runner stands in for it and checks every block table it is given, so a picture here cannot
show a state that the allocator never had. A test fails when a picture in the document is behind. Run it with

    python scripts/draw_kv_pictures.py
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from octavo.cli.kv_view import draw, measure_pool
from octavo.core.events import BlockCopied, Event, RequestAdmitted, RequestDelayed, RequestForked, RequestPreempted
from octavo.core.kv_cache import GroupSpec
from octavo.core.request import Request
from octavo.core.snapshot import RequestView, Snapshot
from octavo.engine.metrics import Metrics
from octavo.testing.factories import CoreSetup, Rig

DOCS = Path(__file__).parent.parent / "docs" / "kv-cache.md"
WIDTH = 84
BLOCK_SIZE = 16


class Stage:
    """A scheduler and a fake runner, and the events since the last look."""

    def __init__(self, **setup: object) -> None:
        self.rig = Rig(CoreSetup(**{"block_size": BLOCK_SIZE, "max_num_batched_tokens": 512, **setup}))
        self.metrics = Metrics(block_size=BLOCK_SIZE)
        self.fullest: Snapshot | None = None

    def step(self, num_steps: int = 1) -> list[Event]:
        """Do steps; return what happened in them."""
        happened: list[Event] = []
        for _ in range(num_steps):
            self.rig.step()
            events = self.rig.log.drain()
            self.metrics.take(events, now_s=0.0)
            happened += events
            snapshot = self.snapshot()
            if self.fullest is None or _fullness(snapshot) > _fullness(self.fullest):
                self.fullest = snapshot
        return happened

    def run_to_end(self) -> list[Event]:
        happened: list[Event] = []
        while self.rig.scheduler.has_unfinished:
            happened += self.step()
        return happened

    def snapshot(self) -> Snapshot:
        return self.rig.scheduler.snapshot()

    def view(self, request: Request) -> RequestView:
        return next(view for view in self.snapshot().requests if view.request_id == request.request_id)

    def bars(self, snapshot: Snapshot | None = None) -> str:
        """Draw what `octavo generate --show-kv` would draw."""
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
        with console.capture() as capture:
            console.print(draw(snapshot or self.snapshot(), allocator=self.rig.setup.allocator, width=WIDTH))
        return capture.get()


def block_table() -> str:
    """One request, before and after it needs another block."""
    stage = Stage(num_blocks=24)
    request = stage.rig.add(_tokens("prompt", 40), "r0", max_tokens=20)
    stage.step()
    first = f"40 prompt tokens are computed:\n{_table(stage.view(request))}"
    stage.step(8)
    second = f"8 tokens later, 48 places are full and the next token needs a block:\n{_table(stage.view(request))}"
    stage.step()
    third = f"One step later:\n{_table(stage.view(request))}"
    return f"{first}\n\n{second}\n\n{third}\n\n{stage.bars()}"


def prefix_hits() -> str:
    """A second request that begins like the first: two whole blocks shared, then a copy of part of the third."""
    stage = Stage(num_blocks=24)
    system = _tokens("system", 37)
    first = stage.rig.add(system + _tokens("question A", 9), "r0", max_tokens=30)
    stage.step(3)
    second = stage.rig.add(system + _tokens("question B", 14), "r1", max_tokens=30)
    events = stage.step()
    tables = f"{_table(stage.view(first))}\n{_table(stage.view(second))}"
    return "\n\n".join((_tell(events), tables, stage.bars()))


def copy_on_write() -> str:
    """Three answers to one prompt: all blocks shared, then a copy of the last one for all but one."""
    stage = Stage(num_blocks=24)
    stage.rig.add_answers(_tokens("prompt", 40), 3, "r0", max_tokens=20)
    forked = stage.step()
    before = f"{_tell(forked)}\n\n{stage.bars()}"
    copied = stage.step()
    after = f"{_tell(copied)}\n\n{stage.bars()}"
    return f"The prompt has been computed once:\n\n{before}\nEach answer writes its first token:\n\n{after}"


def preemption() -> str:
    """Two requests outgrow a pool of eight blocks; the later one gives way, and comes back to most of its work."""
    stage = Stage(num_blocks=8)
    stage.rig.add(_tokens("first", 60), "r0", max_tokens=24)
    stage.rig.add(_tokens("second", 54), "r1", max_tokens=24)
    events: list[Event] = []
    while not any(isinstance(event, RequestPreempted) for event in events):
        before = stage.bars()
        events = stage.step()
    taken = f"{_tell(events)}\n\n{stage.bars()}"
    while not any(isinstance(event, RequestAdmitted) for event in events):
        events = stage.step()
    resumed = f"{_tell(events)}\n\n{stage.bars()}"
    return f"Every block is held:\n\n{before}\nr0 needs a fifth block:\n\n{taken}\nr0 has ended:\n\n{resumed}"


def reserved_and_paged() -> str:
    """The same twelve requests in the same memory, one run reserved per request, then blocks on demand."""
    drawn = []
    for allocator in ("reserved", "paged"):
        stage = Stage(num_blocks=64, max_model_len=256, max_num_seqs=16, allocator=allocator)
        for index in range(12):
            stage.rig.add(_tokens(f"prompt {index}", 20 + 5 * index), f"r{index}", max_tokens=30)
        stage.run_to_end()
        metrics = stage.metrics
        total = (
            f"The whole run: {metrics.num_steps} steps, {metrics.mean_running:.1f} requests at once on average,"
            f" {metrics.kv_token_utilization_ratio:.0%} of held places filled"
        )
        drawn.append(f"{stage.bars(stage.fullest)}{total}")
    return "\n\n".join(drawn)


def windows() -> str:
    """Two groups of layers: one sees everything, one the last 48 tokens, and gives back what it no longer sees."""
    stage = Stage(num_blocks=24, groups=(GroupSpec(), GroupSpec(window=48)), max_num_batched_tokens=32)
    request = stage.rig.add(_tokens("prompt", 100), "r0", max_tokens=40)
    stage.step(30)
    view = stage.view(request)
    names = ("sees all tokens", "sees the last 48")
    tables = [f"group {group}, {name}:\n{_table(view, group)}" for group, name in enumerate(names)]
    return "\n\n".join(tables)


PICTURES: dict[str, Callable[[], str]] = {
    "block-table": block_table,
    "prefix-hits": prefix_hits,
    "copy-on-write": copy_on_write,
    "preemption": preemption,
    "reserved-and-paged": reserved_and_paged,
    "windows": windows,
}


def insert(text: str) -> str:
    """Return a document with every picture between its markers redrawn."""
    for name, make in PICTURES.items():
        begin, end = f"<!-- picture: {name} -->", f"<!-- end: {name} -->"
        assert text.count(begin) == text.count(end) == 1, f"the document needs one place for the picture {name}"
        lines = "\n".join(line.rstrip() for line in make().strip("\n").splitlines())
        picture = f"{begin}\n\n```text\n{lines}\n```\n\n{end}"
        text = re.sub(re.escape(begin) + ".*" + re.escape(end), lambda _, new=picture: new, text, flags=re.DOTALL)
    return text


def _table(view: RequestView, group: int = 0) -> str:
    """Draw a block table: which block holds which token positions, and how full it is."""
    table = view.tables[group]
    rows: list[list[str]] = [[f"{view.request_id} tokens"], ["block"], ["filled"]]
    for index, block_id in enumerate(table):
        first = index * BLOCK_SIZE
        num_filled = min(BLOCK_SIZE, max(0, view.num_computed_tokens - first))
        rows[0].append(f"{first}..{first + BLOCK_SIZE - 1}")
        rows[1].append(str(block_id) if block_id else "null")
        rows[2].append(f"{num_filled}/{BLOCK_SIZE}" if block_id else "gone")
    return "\n".join(f"{row[0]:<11}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)


def _tell(events: Sequence[Event]) -> str:
    """Say in words what the core reported."""
    lines = []
    # The copies behind a hit are made while a request starts, and announced just before it has.
    for event in sorted(events, key=lambda event: isinstance(event, BlockCopied)):
        match event:
            case RequestAdmitted():
                how = "comes back" if event.is_resumed else "starts"
                lines.append(
                    f"{event.request_id} {how}: of its {event.num_known_tokens} tokens {event.num_block_hit_tokens}"
                    f" lie in whole blocks of the cache, {event.num_copied_hit_tokens} more are copied"
                )
            case BlockCopied():
                lines.append(f"{event.request_id}: block {event.source} is copied to block {event.destination}")
            case RequestForked():
                lines.append(f"{event.request_id} shares all {event.num_shared_tokens} tokens of {event.parent_id}")
            case RequestPreempted():
                lines.append(
                    f"{event.request_id} gives back its {event.num_blocks} blocks ({event.num_computed_tokens} tokens)"
                    f" so that {event.for_request_id} can go on"
                )
            case RequestDelayed():
                lines.append(f"{event.request_id} waits: {event.reason}")
            case _:
                pass
    return "\n".join(lines)


def _tokens(name: str, count: int) -> list[int]:
    """Return token ids that no other name has."""
    first = sum(name.encode()) * 1000
    return list(range(first, first + count))


def _fullness(snapshot: Snapshot) -> tuple[int, int]:
    use = measure_pool(snapshot)
    return use.num_blocks, use.num_filled_places


if __name__ == "__main__":
    DOCS.write_text(insert(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
