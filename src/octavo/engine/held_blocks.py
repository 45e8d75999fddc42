"""HeldBlocks: how many blocks each request holds and has held at most, as a fold over events."""

from __future__ import annotations

from octavo.core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksReleased,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
)
from octavo.core.step import NULL_BLOCK
from octavo.units import RequestId


class HeldBlocks:
    """Blocks in the tables of every unfinished request, shared ones included."""

    def __init__(self) -> None:
        self._held: dict[RequestId, int] = {}
        self._peaks: dict[RequestId, int] = {}
        self._running: set[RequestId] = set()
        self.num_held = 0
        """Entries of all tables together: a shared block counts once for each of its holders."""

    def take(self, event: Event) -> None:
        """Fold one event. A request that ends is forgotten: ask for its peak before."""
        match event:
            case RequestAdmitted():
                self._running.add(event.request_id)
                self._add(event.request_id, sum(b != NULL_BLOCK for hits in event.hit_block_ids for b in hits))
            case BlocksAllocated():
                self._add(event.request_id, len(event.block_ids))
            case BlockCopied() if event.request_id not in self._running:
                # The copy behind a hit, announced before the admission. A later copy takes the place of its source.
                self._add(event.request_id, 1)
            case RequestForked():
                self._running.add(event.request_id)
                self._add(event.request_id, self._held.get(event.parent_id, 0))
            case BlocksReleased():
                self._add(event.request_id, -len(event.block_ids))
            case RequestPreempted():
                self._running.discard(event.request_id)
            case RequestFinished():
                self._running.discard(event.request_id)
                self.num_held -= self._held.pop(event.request_id, 0)
                self._peaks.pop(event.request_id, None)
            case _:
                pass

    def peak(self, request_id: RequestId) -> int:
        """Return the most blocks that an unfinished request has held at a time."""
        return self._peaks.get(request_id, 0)

    def _add(self, request_id: RequestId, num_blocks: int) -> None:
        held = self._held[request_id] = self._held.get(request_id, 0) + num_blocks
        self.num_held += num_blocks
        assert held >= 0, f"{request_id} gave back more blocks than it held"
        if held > self._peaks.get(request_id, 0):
            self._peaks[request_id] = held
