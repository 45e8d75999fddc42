"""Policies: who waits in which order, who gives way, and when there is room for one more.

Small objects behind two seams, so that `Scheduler.schedule` has no ifs for them. Adding a policy is a class here and an
entry in the dict.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from octavo.core.request import Request
from octavo.units import RequestId


class WaitingQueue(Protocol):
    """Requests that wait, in the order in which they would be admitted.

    Every call is O(1) or O(log n) in the number waiting: 100,000 waiting requests do not slow a step.
    """

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a new arrival."""

    def pop(self) -> Request | None:
        """Take the first request; `None` if nobody waits."""

    def restore(self, requests: Sequence[Request]) -> None:
        """Put requests back at the front in their order: ones that were looked at in vain, or preempted."""

    def remove(self, request: Request) -> None:
        """Take out a request that waits."""


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def pop(self) -> Request | None:
        return self._requests.popitem(last=False)[1] if self._requests else None

    def restore(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):
            self._requests[request.request_id] = request
            self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]


class PriorityQueue:
    """Lowest `priority` first, then first come.

    A heap with lazy deletion: a removed request leaves its entry behind until it comes up; when most entries are dead
    the heap is rebuilt, so that memory stays proportional to who waits.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (request.priority, request.arrival, request))

    def pop(self) -> Request | None:
        while self._heap:
            request = heapq.heappop(self._heap)[2]
            if self._waiting.get(request.request_id) is request:
                del self._waiting[request.request_id]
                return request
        return None

    def restore(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.push(request)

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._heap)


class SchedulingPolicy(Protocol):
    """Order of waiting, choice of victim, and who may take whose seat."""

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue in this policy's order."""

    def victim(self, running: Iterable[Request]) -> Request:
        """Return the running request that gives its blocks back when one is missing."""

    def yields_seat_to(self, running: Request, waiting: Request) -> bool:
        """Say whether `waiting` may displace `running` when all seats are taken."""


class FcfsPolicy:
    """First come, first served; the last arrival gives way."""

    def make_queue(self) -> WaitingQueue:
        return FcfsQueue()

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: request.arrival)

    def yields_seat_to(self, running: Request, waiting: Request) -> bool:
        return False


class PriorityPolicy:
    """Lowest `priority` value first; the highest value gives way, of several the last arrival."""

    def make_queue(self) -> WaitingQueue:
        return PriorityQueue()

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=lambda request: (request.priority, request.arrival))

    def yields_seat_to(self, running: Request, waiting: Request) -> bool:
        return waiting.priority < running.priority


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy}


class AdmissionPolicy(Protocol):
    """Decides how many blocks must stay free when a request is admitted."""

    def num_reserved_blocks(self, num_usable_blocks: int, num_outstanding_blocks: int) -> int:
        """Return the blocks a newcomer must leave alone.

        Args:
            num_usable_blocks: Size of the pool.
            num_outstanding_blocks: Blocks that running requests still need for tokens they already know.
        """


class WatermarkAdmission:
    """Leave what running prompts still need, and a small share of the pool so that running requests can grow.

    The default of 1 % trades a little concurrency for far fewer preemptions. Counting the outstanding part is what
    keeps a newcomer from being admitted into blocks that a half-computed prompt is about to take.
    """

    def __init__(self, watermark_ratio: float = 0.01) -> None:
        assert 0.0 <= watermark_ratio < 1.0
        self._watermark_ratio = watermark_ratio

    def num_reserved_blocks(self, num_usable_blocks: int, num_outstanding_blocks: int) -> int:
        return num_outstanding_blocks + int(num_usable_blocks * self._watermark_ratio)
