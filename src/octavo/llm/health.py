"""Health: how an engine is, at a glance and without asking its thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How an engine is.

    Args:
        is_alive: Its thread runs and has not given up.
        is_stalled: Work is pending and no step has ended for longer than `stall_s`.
        is_draining: It ends what it has and takes nothing new.
        num_running: Answers being computed.
        num_waiting: Answers accepted and not being computed.
        last_step_age_s: Seconds since the last step ended, or since there has been work; 0 when idle.
        failure: What it died of.
    """

    is_alive: bool
    is_stalled: bool
    is_draining: bool
    num_running: int
    num_waiting: int
    last_step_age_s: float
    failure: str | None = None
