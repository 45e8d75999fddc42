"""Policies: who waits in which order, who gives way, and when there is room for one more.

Small objects behind two seams, so that `Scheduler.schedule` has no ifs for them. Adding a policy is a class here and an
entry in the dict.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from octavo.core.request import Request
from octavo.units import RequestId


class WaitingQueue(Protocol):
    """Requests that wait, in the order in which they would be admitted.

    Every call is O(log n) in the number waiting: 100,000 waiting requests do not slow a step.
    """

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request: a new arrival, one that was looked at in vain, or one that was preempted."""

    def pop(self) -> Request | None:
        """Take the first request; `None` if nobody waits."""

    def remove(self, request: Request) -> None:
        """Take out a request that waits."""


class WaitingHeap:
    """Lowest rank first; a request keeps its rank, so one that was preempted comes back to where it belongs.

    A heap with lazy deletion: a removed request leaves its entry behind until it comes up; when most entries are dead
    the heap is rebuilt, so that memory stays proportional to who waits.

    Args:
        rank: Sort key; different for any two requests.
    """

    def __init__(self, rank: Callable[[Request], tuple[int, ...]]) -> None:
        self._rank = rank
        self._heap: list[tuple[tuple[int, ...], Request]] = []
        self._waiting: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self._rank(request), request))

    def pop(self) -> Request | None:
        while self._heap:
            request = heapq.heappop(self._heap)[1]
            if self._waiting.get(request.request_id) is request:
                del self._waiting[request.request_id]
                return request
        return None

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[1].request_id) is entry[1]]
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
        return WaitingHeap(_arrival)

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=_arrival)

    def yields_seat_to(self, running: Request, waiting: Request) -> bool:
        return False


class PriorityPolicy:
    """Lowest `priority` value first; the highest value gives way, of several the last arrival."""

    def make_queue(self) -> WaitingQueue:
        return WaitingHeap(_priority_then_arrival)

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=_priority_then_arrival)

    def yields_seat_to(self, running: Request, waiting: Request) -> bool:
        return waiting.priority < running.priority


def _arrival(request: Request) -> tuple[int, ...]:
    return (request.arrival,)


def _priority_then_arrival(request: Request) -> tuple[int, ...]:
    return request.priority, request.arrival


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
