"""EngineRig: an Engine over the fake runner, driven step by step, with a clock that a test moves.

rig = EngineRig(CoreSetup(num_blocks=12))
rig.add("a", [1, 2, 3], max_tokens=5)
rig.clock.time_s += 1
rig.step()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.core.events import Event, EventLog
from octavo.core.sampling import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest
from octavo.testing.factories import CoreSetup, make_runner, make_scheduler


class HandClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s


class EngineRig:
    """An engine as a server has it: finished requests are forgotten.

    Args:
        setup: Shape of the core.
    """

    def __init__(self, setup: CoreSetup | None = None) -> None:
        self.setup = setup or CoreSetup()
        self.clock = HandClock()
        log = EventLog()
        self.scheduler = make_scheduler(self.setup, log)
        self.engine = Engine(
            self.scheduler,
            make_runner(self.setup),
            events=log,
            clock=self.clock,
            vocab_size=self.setup.vocab_size,
        )
        self.engine.start_metrics(keeps_finished=False)
        self.events: list[Event] = []
        self.engine.subscribe(self.events.extend)

    def add(self, request_id: str, prompt: int | Iterable[int], *, priority: int = 0, **params: Any) -> None:
        """Queue a request; `params` go to `SamplingParams` (8 greedy tokens unless they say otherwise)."""
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tuple(range(prompt) if isinstance(prompt, int) else prompt),
                params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),
                priority=priority,
            )
        )

    def step(self, num_steps: int = 1, *, each_s: float = 0.0) -> None:
        """Do steps, the clock going on by `each_s` before each."""
        for _ in range(num_steps):
            self.clock.time_s += each_s
            self.engine.step()

    def run_to_end(self, *, each_s: float = 0.0, max_steps: int = 10_000) -> int:
        """Step until nothing is left; return the number of steps."""
        for num_steps in range(max_steps):
            if not self.engine.has_unfinished:
                return num_steps
            self.step(each_s=each_s)
        raise AssertionError(f"unfinished after {max_steps} steps")
