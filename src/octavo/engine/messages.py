"""Messages between a front end and the engine: frozen and picklable, so that the engine can become a process."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.events import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.units import TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt to answer, `params.n` times.

    Args:
        request_id: Chosen by the front end; unique among unfinished requests.
        prompt_token_ids: The prompt, special tokens included.
        priority: Lower runs first under the priority policy.
        cache_salt: Requests with different salts share no blocks; `None` is a salt of its own.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What a step added to one answer.

    Args:
        request_id, index: The request, and which of its `n` answers.
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New tokens; their text may follow later.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: Scores of prompt tokens 1, 2, ... in order, as they become known.
        finish_reason: Set once, on the last delta of the answer.
        stop_reason: The stop string or stop token id that ended it; `None` for an end-of-sequence token.
        num_cached_tokens: Prompt tokens taken from the prefix cache; known from the first delta on.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
