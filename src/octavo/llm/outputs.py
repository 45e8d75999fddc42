"""What `LLM` returns. Names follow vLLM's, so that code that reads its outputs reads ours."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.events import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One candidate token at one place.

    Args:
        logprob: Natural log of its probability under the model, before any sampling parameter.
        rank: 1 for the most likely token.
        decoded_token: Its text alone; U+FFFD where it is a part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt.

    Args:
        index: Which of the `n` answers.
        logprobs: Per output token, the candidates by token id, the chosen one first; `None` unless asked for.
        finish_reason: `stop` (an end-of-sequence token, stop id or stop string), `length`, `abort` or `error`; `None`
            while the answer is unfinished.
        stop_reason: The stop string or stop token id; `None` for an end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the chosen tokens; `None` unless `logprobs` was asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(candidates[token_id].logprob for token_id, candidates in pairs)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers.

    Args:
        prompt: The text, if the prompt was one (for a chat, as the template rendered it).
        prompt_logprobs: Per prompt token, its candidates by token id; the first is `None`, nothing comes before it.
        num_cached_tokens: Prompt tokens whose K/V came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
