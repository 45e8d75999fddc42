"""StepBudget: what one step may still hand out."""

from __future__ import annotations


class StepBudget:
    """Tokens left in a step; made and dropped inside `schedule`.

    Seats and blocks are limits too, but each has its owner already (the running list, the block pool); tokens exist
    only within the step.
    """

    __slots__ = ("num_tokens_left",)

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens_left = max_tokens

    def spend(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.num_tokens_left, f"{num_tokens} of {self.num_tokens_left} tokens"
        self.num_tokens_left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        """Give back what a victim was handed earlier in the same step."""
        self.num_tokens_left += num_tokens
