"""Sizing: where the memory of one device goes, and what the KV pool in it holds. The same for every engine.

`octavo_sizing.py` makes one with the code that sizes Octavo's own pool, `other_sizing.py` by the rules of another
engine. What people ask of it (how many requests, how long, what if) is answered here, from blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from octavo.errors import CapacityError
from octavo.planner.estimate import Estimate
from octavo.planner.lengths import Lengths
from octavo.planner.pool import usable_blocks
from octavo.planner.question import EngineName


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """What one kind of layer costs.

    Args:
        name: The kind in words: `full attention`, `sliding window of 1,024`.
        num_layers: Layers of this kind, on one device.
        token_bytes: Bytes that one token leaves in all of them, while no window is full.
        block_bytes: Bytes of the blocks that hold `block_size` tokens of all of them, padding included.
        request_bytes: Bytes that a request keeps whatever its length.
    """

    name: str
    num_layers: int
    token_bytes: int
    block_bytes: int
    request_bytes: int = 0


class KVCosts(Protocol):
    """What keys and values cost on one device, by blocks that all kinds of layers draw from one pool."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool."""

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token costs while no window is full."""

    @property
    def groups(self) -> tuple[GroupCost, ...]:
        """The kinds of layers."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that one request of so many tokens holds."""

    def blocks_reserved(self, num_tokens: int) -> int:
        """Return the blocks of a contiguous reservation for so many tokens, windows or not."""

    def blocks_shared(self, num_tokens: int) -> int:
        """Return the blocks that requests share whose first so many tokens are the same."""

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the longest request, up to `limit`, that so many blocks hold; 0 when none fits."""

    def pool_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Return the tokens that so many blocks hold, as the engine itself states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """One device's memory, divided.

    Args:
        engine_version: Empty for Octavo's own.
        memory_bytes: What the device, or this machine, has for it.
        usable_bytes: The part that the engine will use.
        usable_source: Where the two come from.
        activation, overhead: Peak of a step; and what neither weights, step nor cache need.
        pool: The KV pool, null block included; below 0 where the rest does not fit.
        num_blocks: Usable blocks of the pool.
        length_limit: What the model takes, or what was asked if that is less.
        model_limit: What the model takes.
        longest_fitting_len: Longest request that the pool holds, up to `model_limit`; 0 when none fits.
        reasons: For values that were not simply asked for, why they are what they are.
        refusal: Why it does not fit, as the engine itself would say it.
        notes: What to beware of.
    """

    engine: EngineName
    engine_version: str
    memory_bytes: int
    usable_bytes: int
    usable_source: str
    weights: Estimate
    activation: Estimate
    overhead: Estimate
    pool: Estimate
    kv: KVCosts
    num_blocks: int
    length_limit: int
    model_limit: int
    longest_fitting_len: int
    is_length_asked: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: str
    weights_as: str
    is_caching: bool
    is_reserved: bool = False
    reasons: Mapping[str, str] = field(hash=False)
    refusal: CapacityError | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the engine starts as asked."""
        return self.refusal is None and 1 <= self.max_model_len <= self.longest_fitting_len

    @property
    def max_model_len(self) -> int:
        """The length that concurrency is counted at: as asked, or else what fits; 0 when nothing does."""
        return self.length_limit if self.is_length_asked else min(self.length_limit, self.longest_fitting_len)

    @property
    def pool_bytes(self) -> int:
        """Size of the pool; 0 where the rest does not fit."""
        return max(0, self.pool.value_bytes)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds, as the engine itself states it."""
        return self.kv.pool_tokens(self.num_blocks, max(1, self.max_model_len))

    @property
    def headroom_bytes(self) -> int:
        """What stays free; below 0 by what is missing where the rest does not fit."""
        spent = self.weights.value_bytes + self.activation.value_bytes + self.overhead.value_bytes + self.pool_bytes
        return self.memory_bytes - spent

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that the pool holds at once."""
        return float(self.reserved_concurrency) if self.is_reserved else self.concurrency_of(self.max_model_len)

    @property
    def low_blocks(self) -> int:
        """Blocks that requests can use with the pool at the low end of its interval."""
        if self.pool.is_exact:
            return self.num_blocks
        return min(self.num_blocks, usable_blocks(max(0, self.pool.low_bytes), self.kv.block_bytes))

    @property
    def max_concurrency_low(self) -> float:
        """As `max_concurrency`, with the pool at the low end of its interval."""
        return replace(self, num_blocks=self.low_blocks).max_concurrency

    @property
    def safe_length(self) -> int:
        """The longest request that fits even with the pool at the low end of its interval."""
        return min(self.longest_fitting_len, self.kv.longest(self.low_blocks, self.model_limit))

    def concurrency_of(self, num_tokens: int, *, shared_tokens: int = 0) -> float:
        """Return the requests of so many tokens that the pool holds at once, when their first tokens are the same."""
        if num_tokens < 1:
            return 0.0
        shared = self.kv.blocks_shared(min(shared_tokens, num_tokens - 1)) if self.is_caching else 0
        own = max(1, self.kv.blocks_for(num_tokens) - shared)
        return max(0, self.num_blocks - shared) / own

    def concurrency_at(self, lengths: Lengths, *, shared_tokens: int = 0) -> float:
        """Return the requests that the pool holds at once on average, when each is at a random step of its answer."""
        if self.is_reserved:
            return float(self.reserved_concurrency)
        longest = max(each.num_tokens for each in lengths.classes)
        shared = self.kv.blocks_shared(min(shared_tokens, longest - 1)) if self.is_caching else 0

        def held(num_tokens: int) -> int:
            return max(1, self.kv.blocks_for(num_tokens) - min(shared, self.kv.blocks_shared(num_tokens - 1)))

        return max(0, self.num_blocks - shared) / lengths.mean_held(held, step=self.kv.block_size)

    @property
    def reserved_concurrency(self) -> int:
        """Requests at once if each reserves a contiguous run for `max_model_len` tokens, however long it becomes."""
        return self.num_blocks // self.kv.blocks_reserved(self.max_model_len) if self.max_model_len else 0

    @property
    def tokens_like_weights(self) -> int:
        """Cached tokens at which the KV cache is as large as the weights."""
        return self.weights.value_bytes // self.kv.token_bytes if self.kv.token_bytes else 0
