"""Timeline: what the engine did in each of the last sixty seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

WINDOW_S = 60


@dataclass(slots=True, kw_only=True)
class Second:
    """Counts of one second, and gauges as they were at its end.

    Args:
        second: Which one, by the engine's clock.
        num_output_tokens: Tokens chosen.
        num_prompt_tokens: Tokens computed that did not follow from the step before: prompts, and what was lost by
            preemption.
        num_query_tokens, num_hit_tokens: Looked up in the prefix cache by first admissions, and found.
        num_preemptions: Requests that gave their blocks back because blocks were missing.
        max_request_blocks: Most blocks that a request has held which ended or was preempted.
        num_shared_holds: Table entries beyond the first of each block, added up over the second's steps.
        num_further_runs: Running requests beyond the first, added up over the same steps.
        num_running, num_waiting, num_used_blocks: Gauges.
        max_wanting: Most requests, running or waiting, at a time.
    """

    second: int
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    max_request_blocks: int = 0
    num_shared_holds: int = 0
    num_further_runs: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    max_wanting: int = 0


class Timeline:
    """The seconds of the last minute; one in which nothing happened has the gauges of the one before."""

    def __init__(self, now_s: float) -> None:
        self._seconds = deque([Second(second=int(now_s))], maxlen=WINDOW_S + 1)

    def at(self, now_s: float) -> Second:
        """Return the second that is going on, to be added to."""
        second = int(now_s)
        last = self._seconds[-1]
        for passed in range(max(last.second + 1, second - WINDOW_S), second + 1):
            self._seconds.append(
                Second(
                    second=passed,
                    num_running=last.num_running,
                    num_waiting=last.num_waiting,
                    num_used_blocks=last.num_used_blocks,
                    max_wanting=last.num_running + last.num_waiting,
                )
            )
        return self._seconds[-1]

    def complete(self, now_s: float) -> list[Second]:
        """Return copies of the seconds that are over, oldest first; at most sixty."""
        self.at(now_s)
        return [replace(second) for second in list(self._seconds)[:-1]]
