"""Advice: what the last minute says about the pool's size and the options that fit it.

Each line has figures from the window, and options with values that follow from them: a number of seats that no request
of the size seen can overfill, a pool that holds as many as there are seats. Blocks that several requests hold count
once, as far as requests have shared them in the window; where they come to share less, more is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.engine.timeline import Second

MIN_WINDOW_S = 5
"""Less says nothing."""
ROOMY_RATIO = 0.7
"""A pool less full than this has room for more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What advice needs to know of an engine.

    Args:
        num_blocks: Usable blocks.
        block_size: Tokens per block.
        max_num_seqs: Seats.
        is_reserved: Whether each request gets a whole run of blocks.
        narrower: The next narrower way to hold keys and values, and the blocks that the pool's bytes would be then;
            `None` where there is none to recommend, or the pool was sized in blocks.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    is_reserved: bool = False
    narrower: tuple[str, int] | None = None


def advise(facts: PoolFacts, seconds: Sequence[Second]) -> Iterator[str]:
    """Yield what is worth saying about the last seconds, most important first."""
    if len(seconds) < MIN_WINDOW_S:
        return
    max_request_blocks = max(second.max_request_blocks for second in seconds)
    num_preemptions = sum(second.num_preemptions for second in seconds)
    if num_preemptions and max_request_blocks:
        yield _end_preemptions(facts, seconds, num_preemptions, max_request_blocks)
    elif max_request_blocks:
        yield from _use_free_blocks(facts, seconds, max_request_blocks)


def _shared_blocks(seconds: Sequence[Second], max_request_blocks: int) -> int:
    """Return how many of its blocks a request beyond the first has found held by others, on average."""
    num_further_runs = sum(second.num_further_runs for second in seconds)
    if not num_further_runs:
        return 0
    num_shared = sum(second.num_shared_holds for second in seconds) // num_further_runs
    return min(num_shared, max_request_blocks - 1)


def _end_preemptions(facts: PoolFacts, seconds: Sequence[Second], num_preemptions: int, max_request_blocks: int) -> str:
    num_shared = _shared_blocks(seconds, max_request_blocks)
    num_own = max_request_blocks - num_shared
    num_wanted = num_shared + num_own * min(facts.max_num_seqs, max(second.max_wanting for second in seconds))
    num_short = max(1, num_wanted - facts.num_blocks)
    num_seats = max(1, (facts.num_blocks - num_shared) // num_own)
    options = [f"`--num-blocks {facts.num_blocks + num_short}`"]
    if num_seats < facts.max_num_seqs:
        options.append(f"`--max-num-seqs {num_seats}`")
    if facts.narrower is not None and num_wanted <= facts.narrower[1]:
        options.append(f"`--kv-cache-dtype {facts.narrower[0]}`")
    per_minute = max(1, round(60 * num_preemptions / len(seconds)))
    listed = options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
    sharing = f", {num_shared:,} of them shared" if num_shared else ""
    return (
        f"{_count(per_minute, 'preemption')} a minute: the pool is short by up to {num_short:,} blocks for requests "
        f"of up to {max_request_blocks:,}{sharing}; {listed} ends it"
    )


def _use_free_blocks(facts: PoolFacts, seconds: Sequence[Second], max_request_blocks: int) -> Iterator[str]:
    num_waiting = min(second.num_waiting for second in seconds[-MIN_WINDOW_S:])
    usage_ratio = max(second.num_used_blocks for second in seconds) / facts.num_blocks
    num_shared = _shared_blocks(seconds, max_request_blocks)
    num_seats = (facts.num_blocks - num_shared) // (max_request_blocks - num_shared)
    is_full = min(second.num_running for second in seconds[-MIN_WINDOW_S:]) >= facts.max_num_seqs
    if num_waiting and is_full and usage_ratio < ROOMY_RATIO and num_seats > facts.max_num_seqs:
        yield (
            f"{_count(num_waiting, 'request')} or more wait for a seat while {1 - usage_ratio:.0%} of the pool is "
            f"unused: it has room for `--max-num-seqs {num_seats}`"
        )
    if num_waiting and facts.is_reserved and not is_full:
        yield (
            f"{_count(num_waiting, 'request')} or more wait for a run of blocks set aside for the longest request: "
            "`--kv-allocator paged` gives them blocks as they need them"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
