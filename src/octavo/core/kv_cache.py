"""KVCache: the scheduler's view of KV memory, and what both allocators share.

`PagedKVCache` (paged_kv_cache.py) hands out blocks as tokens arrive and shares them; `ReservedKVCache`
(reserved_kv_cache.py) gives each request one contiguous run for its longest length, as engines did before paging. The
scheduler cannot tell them apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.block import Block
from octavo.core.request import Request
from octavo.core.step import NULL_BLOCK, BlockCopy
from octavo.units import BlockId, TokenId, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """How one KV group keeps tokens: all of them, or the last `window` ones (a query's own token included).

    With a window, the first `num_sinks` tokens stay as well. A query at a position below `num_sinks + window` sees
    everything before it; further on a gap opens between sinks and window, and blocks inside of it are given back.
    """

    window: int | None = None
    num_sinks: int = 0

    def __post_init__(self) -> None:
        # A window of one token needs nothing from before: every prompt would "hit" without ever having been computed.
        assert self.window is None or self.window >= 2, f"a window of {self.window} tokens keeps nothing"
        assert self.num_sinks >= 0 and (self.window is not None or self.num_sinks == 0), "sinks stand before a window"

    def num_blocks(self, num_tokens: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return the most blocks a request of `num_tokens` cached tokens holds at once in this group.

        A window group frees what no query sees any more, but within one step it holds the window of the first query
        and the whole chunk; a run of that many tokens can touch one block more than it fills. Sinks come on top.
        """
        num_blocks = cdiv(num_tokens, block_size)
        if self.window is None:
            return num_blocks
        num_window_blocks = cdiv(self.window - 1 + max_chunk_tokens, block_size) + 1
        return min(num_blocks, self.num_sink_blocks(block_size) + num_window_blocks)

    def num_sink_blocks(self, block_size: int) -> int:
        """Return the leading blocks that are never given back."""
        return cdiv(self.num_sinks, block_size)

    def hidden_blocks(self, position: int, block_size: int) -> range:
        """Return the blocks of which the query at `position`, and every later one, sees nothing: one run, or none."""
        first = self.num_sink_blocks(block_size)
        # Before the gap opens, the window begins among the sinks.
        stop = 0 if self.window is None else max(0, position - self.window + 1) // block_size
        return range(first, max(first, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the best cached continuation left the request's tokens: it has another token than they have."""

    position: int
    block_id: BlockId
    token_id: TokenId
    cached_token_id: TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the prefix cache holds for a request: the answer to a question, nothing is taken yet.

    Args:
        blocks: Per group, the full blocks hit, from position 0; `None` where a window group needs no block.
        num_block_tokens: Tokens in them.
        sources: Per group, a block whose first `num_copied_tokens` tokens follow; to be copied, not shared. Empty if
            there is none.
        num_copied_tokens: Tokens to keep of the copy.
        is_next_block_in_flight: A running request is computing the block that comes next.
        divergence: The best near miss, for explanations.
    """

    blocks: tuple[tuple[Block | None, ...], ...]
    num_block_tokens: int = 0
    sources: tuple[Block, ...] = ()
    num_copied_tokens: int = 0
    is_next_block_in_flight: bool = False
    divergence: Divergence | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_block_tokens + self.num_copied_tokens

    @property
    def block_ids(self) -> tuple[tuple[BlockId, ...], ...]:
        """Ids of `blocks`, the null block's for `None`."""
        return tuple(tuple(NULL_BLOCK if block is None else block.id for block in hits) for hits in self.blocks)

    def without_copy(self) -> Match:
        """Return the same match with whole blocks only."""
        return Match(blocks=self.blocks, num_block_tokens=self.num_block_tokens, divergence=self.divergence)


class KVCache(Protocol):
    """What the scheduler asks of an allocator.

    Questions (`match`, `can_admit`, `num_*`) change nothing. `grow` and `fork` may lack space: they return `False` and
    have then changed nothing.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def num_usable_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def longest_tokens(self) -> int:
        """Most cached tokens that one request can have when it is alone."""

    def num_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` cached tokens holds at once, over all groups."""

    def begin_step(self, step: int) -> None:
        """Learn which step it is; evictions tell how many steps a block was idle."""

    def match(self, request: Request) -> Match:
        """Look up how much of a waiting request is cached; at least its last known token is left to compute."""

    def can_admit(
        self, request: Request, match: Match, num_reserved_blocks: int, *, leaving: Request | None = None
    ) -> bool:
        """Say whether all known tokens fit beside `num_reserved_blocks` that must stay free.

        `leaving` is a running request that would be preempted first; what nobody else holds of it counts as free.
        """

    def admit(self, request: Request, match: Match) -> None:
        """Start holding blocks for a request, beginning with its hits."""

    def grow(self, request: Request, start: int, stop: int) -> bool:
        """Make the places of positions `start..stop - 1` writable by this request alone."""

    def commit(self, request: Request) -> None:
        """Take note that the request's computed tokens have been computed: they can be found from now on."""

    def fork(self, parent: Request, child: Request) -> bool:
        """Let `child` hold everything `parent` has computed."""

    def free(self, request: Request, *, keep_cached: bool) -> None:
        """Drop all blocks of a request; `keep_cached=False` if their content is not to be trusted."""

    def reset(self) -> bool:
        """Forget everything cached; `False` if requests hold blocks."""

    def tables(self, request: Request) -> Sequence[array[int]]:
        """Return the request's block table of each group; for reading only."""

    def step_copies(self, request: Request) -> Sequence[BlockCopy]:
        """Return the copies to do before the request's tokens of this step are computed."""

    def step_new_blocks(self, request: Request) -> Sequence[BlockId]:
        """Return the blocks handed to the request in this step."""

    def num_held_blocks(self, request: Request) -> int:
        """Return how many blocks the request's tables hold, shared ones included."""

    def num_unfilled_source_places(self) -> int:
        """Return the empty places of blocks that nothing but a copy still to be made keeps in use."""

    def block_map(self) -> bytes:
        """Return a byte per usable block, as `BlockPool.block_map`. Cost: one copy."""
