"""Protocols at the seams of the core: what drives it and what it drives."""

from __future__ import annotations

from typing import Protocol

from octavo.core.step import StepPlan, StepResult


class Runner(Protocol):
    """Executes step plans; the seam behind which a CPU kernel, a GPU, another process or a simulation stands.

    At most one step is in flight. `execute` is `submit` then `collect`.
    """

    def submit(self, plan: StepPlan) -> None:
        """Start a step; returns before it is done where the runner can."""

    def collect(self) -> StepResult:
        """Wait for the step in flight and return its result."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do one step."""


class Clock(Protocol):
    """Seconds from an arbitrary start, never going back; real time in the engine, virtual in the simulator."""

    def now_s(self) -> float:
        """Return the current time in seconds."""
