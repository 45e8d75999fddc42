"""RequestUpdate: what a committed step brought one request."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.events import FinishReason
from octavo.core.step import TokenLogprobs
from octavo.units import RequestId, TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """What a step brought one request: at most one new token, scored prompt tokens, or its end."""

    request_id: RequestId
    token_id: TokenId | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
