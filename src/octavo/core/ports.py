"""Protocols at the seams of the core: what drives it and what it drives."""

from __future__ import annotations

from typing import Protocol

from octavo.core.step import StepPlan, StepResult
from octavo.core.structured import StructuredOutput


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


class TokenMatcher(Protocol):
    """Follows the text of one answer through a grammar, token by token."""

    def allowed_tokens(self) -> bytes | None:
        """Return the ids that may come next, as `SampleRow.allowed_tokens` has them.

        Where the text is complete, these are the end-of-sequence ids alone. `None` if nothing can come next: the
        vocabulary cannot spell what the grammar wants, or following it takes more than the limits of a step.
        """

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""


class Grammar(Protocol):
    """What `StructuredOutput` has become over one vocabulary. Immutable; shared by answers and threads."""

    def start(self) -> TokenMatcher:
        """Return a matcher at the beginning of a text. Quick: it is called for each answer of `n`."""


class GrammarCompiler(Protocol):
    """Turns `StructuredOutput` into grammars. Safe to call from several threads, and meant to be: it may take long."""

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return the grammar; at once if it was compiled lately.

        Raises:
            InvalidParameterError: it is no valid schema, expression or grammar, or beyond the limits.
            MachineError: what compiles grammars is not installed.
        """
