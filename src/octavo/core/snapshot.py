"""Snapshot: who holds which block at one moment, for people to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from octavo.core.events import WaitReason
from octavo.core.kv_cache import KVCache
from octavo.core.request import Request, RequestStatus
from octavo.core.step import NULL_BLOCK
from octavo.units import BlockId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One unfinished request. `tables` holds its block ids per KV group, empty unless it runs.

    `wait_reason` is why it was not admitted when it was last looked at; `None` unless it waits and has been.
    """

    request_id: RequestId
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    max_total_tokens: int
    wait_reason: WaitReason | None = None
    tables: tuple[Sequence[BlockId], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The pool and its holders.

    Args:
        num_free_blocks: Blocks that can be handed out, cached ones included.
        block_map: A byte per usable block, as `BlockPool.block_map`.
    """

    block_size: int
    num_usable_blocks: int
    num_free_blocks: int
    requests: tuple[RequestView, ...]
    block_map: bytes

    @property
    def num_used_blocks(self) -> int:
        return self.num_usable_blocks - self.num_free_blocks

    @cached_property
    def holders(self) -> Mapping[BlockId, int]:
        """Block id to the number of tables that hold it; absent if none does. Counted when it is first asked for."""
        return Counter(
            block for view in self.requests for table in view.tables for block in table if block != NULL_BLOCK
        )


def take_snapshot(kv_cache: KVCache, requests: Iterable[Request]) -> Snapshot:
    """Copy the state of all requests and their tables. Mutates: nothing. Cost: a copy of the tables and the map."""
    return Snapshot(
        block_size=kv_cache.block_size,
        num_usable_blocks=kv_cache.num_usable_blocks,
        num_free_blocks=kv_cache.num_free_blocks,
        requests=tuple(_view(kv_cache, request) for request in requests),
        block_map=kv_cache.block_map(),
    )


def _view(kv_cache: KVCache, request: Request) -> RequestView:
    tables: tuple[Sequence[BlockId], ...] = ()
    if request.status is RequestStatus.RUNNING:
        # Copies of the arrays: an object per block would cost more than all the rest.
        tables = cast("tuple[Sequence[BlockId], ...]", tuple(table[:] for table in kv_cache.tables(request)))
    return RequestView(
        request_id=request.request_id,
        status=request.status.value,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_hit_tokens=request.num_hit_tokens or 0,
        num_preemptions=request.num_preemptions,
        max_total_tokens=request.max_total_tokens,
        wait_reason=request.wait_reason,
        tables=tables,
    )
