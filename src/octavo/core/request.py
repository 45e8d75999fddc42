"""Request: one prompt with its parameters, and how far its generation has come.

    tokens    p p p p p p p p o o o o ?        p prompt, o output, ? the token the next step chooses
              |<-- computed -->|  |            computed: K/V is in the cache
              |<----- known ----->|            known: prompt + output

A step computes some of the known-but-not-computed tokens. When computed catches up with known, the last row's logits
give the next token. There are no phases: a long prompt, a prefix hit, a resumed request and a decode differ only in how
far computed lags behind known.

    waiting --admit--> running --finish--> finished
       ^                  |
       +----preempt-------+          forking: an answer of `n > 1` that waits for the first answer's prompt

Only the scheduler calls what changes a request, and each change checks that the transition is legal.
"""

from __future__ import annotations

from array import array
from enum import Enum

from octavo.core.block import BlockKey
from octavo.core.content import Content
from octavo.core.events import FinishReason, WaitReason
from octavo.core.sampling import SamplingParams
from octavo.units import RequestId, TokenId


class RequestStatus(Enum):
    """Where a request stands; `_LEGAL` says what may follow what."""

    FORKING = "forking"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    RequestStatus.FORKING: {RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class Request:
    """State of one request.

    Args:
        request_id: Unique among unfinished requests.
        content: The prompt; output tokens are appended to it.
        params: What the caller asked for.
        seed: Seed of its draws (drawn by the caller of the core when `params.seed` is `None`).
        eos_token_ids: Ids that end the text unless `params.ignore_eos`.
        root: Key above its first block; requests with different roots share nothing.
        priority: Lower runs first under the priority policy.
    """

    __slots__ = (
        "allowed_tokens",
        "arrival",
        "content",
        "eos_token_ids",
        "finish_reason",
        "forks",
        "keys",
        "max_total_tokens",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored_tokens",
        "params",
        "priority",
        "request_id",
        "root",
        "seed",
        "status",
        "wait_reason",
    )

    def __init__(
        self,
        request_id: RequestId,
        content: Content,
        params: SamplingParams,
        *,
        root: BlockKey,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.content = content
        self.params = params
        self.root = root
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.priority = priority
        self.num_prompt_tokens = len(content)
        self.arrival = 0
        self.max_total_tokens = 0
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_scored_tokens = 0
        self.num_hit_tokens: int | None = None
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.wait_reason: WaitReason | None = None
        self.forks: tuple[Request, ...] = ()
        self.keys: list[BlockKey] = []
        # Of the next draw; set by whoever knows the grammar of the answer, after each token.
        self.allowed_tokens: bytes | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens} of {self.num_known_tokens} tokens computed)"
        )

    @property
    def num_known_tokens(self) -> int:
        return len(self.content)

    @property
    def num_output_tokens(self) -> int:
        return len(self.content) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.content) - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """A request that scores its prompt needs every prompt row computed, so it takes no hits."""
        return self.params.prompt_logprobs is None

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Ids the next draw must avoid: whatever would end the request before `min_tokens`."""
        if self.num_output_tokens >= self.params.min_tokens:
            return ()
        return tuple(dict.fromkeys((*self.eos_token_ids, *self.params.stop_token_ids)))

    def set_status(self, status: RequestStatus) -> None:
        assert status in _LEGAL[self.status], f"{self} cannot become {status.value}"
        self.status = status

    def append(self, token_id: TokenId) -> FinishReason | None:
        """Add an output token and say whether it ends the request."""
        self.content.append(token_id)
        params = self.params
        if self.num_output_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self.eos_token_ids)
        ):
            return "stop"
        return "length" if self.num_known_tokens >= self.max_total_tokens else None

    def prompt_token_ids(self) -> array[int]:
        return self.content.token_ids(0, self.num_prompt_tokens)

    def output_token_ids(self) -> array[int]:
        return self.content.token_ids(self.num_prompt_tokens, len(self.content))
