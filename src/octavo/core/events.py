"""Events: what happened in the core, as frozen values in order.

The core counts nothing. Metrics, the live view, recordings and explanations are folds over this stream; the scheduler
never reads it back. Events carry ids and numbers, never text; token ids, from which one could tell a text, are private
and never recorded. `StepScheduled` opens a step; what follows it, up to the next one, belongs to that step or came
between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from octavo.units import BlockId, RequestId, TokenId

WaitReason = Literal["seats", "tokens", "blocks", "prefix"]
"""Why a request is not admitted: no seat, no token budget, too few blocks, or a running request is computing its
prefix right now."""
PreemptReason = Literal["blocks", "priority"]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """A request was accepted and waits."""

    request_id: RequestId
    num_prompt_tokens: int
    max_total_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRejected:
    """A request was refused: it could never fit."""

    request_id: RequestId
    num_prompt_tokens: int
    longest_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelayed:
    """A request could not be admitted; told once per reason, not once per step."""

    request_id: RequestId
    reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdmitted:
    """A request moved to running. Hit tokens are `num_block_hit_tokens` in whole blocks + `num_copied_hit_tokens`.

    `hit_block_ids` are the blocks hit, per group, from the first token on: the beginnings of its tables, with the null
    block (0) where a window group needs none. What it copies is named by `BlockCopied`.
    `is_resumed` says that its hits were counted before: it ran already, or it is a further answer that found no seat
    when its prompt had been computed.
    """

    request_id: RequestId
    num_known_tokens: int
    hit_block_ids: tuple[tuple[BlockId, ...], ...]
    num_block_hit_tokens: int
    num_copied_hit_tokens: int
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixDiverged:
    """The prefix cache held a continuation of this request's prefix, but with another token at `position`.

    The two tokens are for those who may see the prompt; they are left out of recordings.
    """

    request_id: RequestId
    position: int
    block_id: BlockId
    token_id: TokenId = field(metadata={"is_private": True})
    cached_token_id: TokenId = field(metadata={"is_private": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAllocated:
    """Blocks were added to a request's table."""

    request_id: RequestId
    group: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopied:
    """Copy-on-write, or the copy behind a hit that ends inside a block."""

    request_id: RequestId
    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCached:
    """A computed block can be found from now on; a block's parent is always announced before it."""

    block_id: BlockId
    group: int
    num_tokens: int
    hash: str
    parent_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvicted:
    """A cached block lost its name because its memory is needed; it had been unreferenced for `idle_steps`."""

    block_id: BlockId
    group: int
    hash: str
    idle_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReleased:
    """A request dropped its reference on these blocks."""

    request_id: RequestId
    group: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForked:
    """A request now shares all blocks of `parent_id`."""

    request_id: RequestId
    parent_id: RequestId
    num_shared_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted:
    """A running request gave its blocks back. `num_computed_tokens` is the most it may have to compute again."""

    request_id: RequestId
    reason: PreemptReason
    for_request_id: RequestId
    num_computed_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScheduled:
    """A step was decided."""

    step: int
    num_tokens: int
    num_scheduled: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_usable_blocks: int
    num_filled_places: int
    """Token places of the blocks in use that hold K/V once the step is done; shared places count once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request ended; every arrival ends exactly once."""

    request_id: RequestId
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset:
    """All cached blocks were forgotten."""

    num_blocks: int


Event = (
    RequestArrived
    | RequestRejected
    | RequestDelayed
    | RequestAdmitted
    | PrefixDiverged
    | BlocksAllocated
    | BlockCopied
    | BlockCached
    | BlockEvicted
    | BlocksReleased
    | RequestForked
    | RequestPreempted
    | StepScheduled
    | RequestFinished
    | PrefixCacheReset
)


class EventLog:
    """Collects events until someone drains them."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def drain(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


def event_to_dict(event: Event) -> dict[str, object]:
    """Return an event as JSON-ready values with its kind in `event`; private fields are left out."""
    return {"event": type(event).__name__, **{name: getattr(event, name) for name in _RECORDED[type(event)]}}


_RECORDED = {
    kind: tuple(each.name for each in fields(kind) if not each.metadata.get("is_private")) for kind in get_args(Event)
}
