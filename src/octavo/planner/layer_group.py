"""LayerGroup: layers of one kind that share block tables, and the blocks that a request holds in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.planner.block_counts import chunked_blocks, full_blocks, sliding_blocks

GroupKind = Literal["full", "sliding", "chunked", "latent", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose blocks are handed out together; all groups of a model draw equal-sized blocks from one pool.

    Args:
        num_layers: Real layers; a group may have fewer than its block has room for, and the rest is padding.
        block_size: Tokens in a block; layers that keep less of a token have more tokens in a block of equal bytes.
        token_bytes: What one token leaves in these layers, on one device.
        window: Tokens a query sees (sliding) or of a chunk (chunked).
        state_blocks: Blocks that a request holds whatever its length (state).
        state_bytes: What of them is really used.
        is_capped: A window's blocks are never more than the request has tokens for.
    """

    kind: GroupKind
    num_layers: int
    block_size: int
    token_bytes: int = 0
    window: int | None = None
    state_blocks: int = 0
    state_bytes: int = 0
    is_capped: bool = False

    def blocks_for(self, num_tokens: int, *, max_num_batched_tokens: int) -> int:
        """Return the most blocks that one request of `num_tokens` holds."""
        if self.kind == "state":
            return self.state_blocks
        whole = full_blocks(num_tokens, block_size=self.block_size)
        if self.window is None:
            return whole
        if self.kind == "chunked":
            return chunked_blocks(
                num_tokens,
                chunk=self.window,
                block_size=self.block_size,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        blocks = sliding_blocks(
            num_tokens,
            window=self.window,
            block_size=self.block_size,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return min(whole, blocks) if self.is_capped else blocks
