"""How many blocks one request holds of one group of layers, and the longest request that a number of blocks holds.

The same arithmetic for every engine, Octavo's own pool included: what differs between engines is how layers form
groups, not what a group of one kind keeps.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.units import cdiv


def full_blocks(num_tokens: int, *, block_size: int) -> int:
    """Return the blocks of a group whose layers see all tokens."""
    return cdiv(num_tokens, block_size)


def sliding_blocks(num_tokens: int, *, window: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Return the most blocks that a group with a window sets aside for one request.

    It keeps the last `window - 1` tokens beside those of the step in hand, and that run may begin in the middle of a
    block, hence one block more. Octavo, which frees blocks as they leave the window, never holds more than the
    request has (`min` with `full_blocks`); vLLM sets the block more aside even then.
    """
    return cdiv(min(window - 1 + max_num_batched_tokens, num_tokens), block_size) + 1


def chunked_blocks(num_tokens: int, *, chunk: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Return the most blocks of a group that looks no further back than its chunk; chunks begin at whole blocks."""
    return cdiv(min(chunk + max_num_batched_tokens, num_tokens), block_size)


def longest_fitting(blocks_for: Callable[[int], int], num_blocks: int, *, step: int, limit: int) -> int:
    """Return the longest request, up to `limit` tokens, that so many blocks hold; 0 when none fits.

    Args:
        blocks_for: Blocks of a request by its tokens; never fewer for more tokens.
        step: Tokens by which a request grows without a block more; a block's size.
    """
    fits, too_long = 0, cdiv(limit, step) + 1  # in steps
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if blocks_for(middle * step) <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return min(limit, fits * step)
