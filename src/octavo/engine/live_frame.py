"""LiveFrame: the pool and its requests at one moment, and the minute before, as one JSON document.

What a browser, a terminal and `GET /kv` show. Schema `octavo.kv/1`:

    schema, time_s              seconds of the engine's clock
    model, block_size_tokens, block_bytes, num_blocks, max_num_seqs
    blocks      first_id        id of the first block (1: the null block is left out)
                states          base64; two blocks per byte, the low half first:
                                0 empty (never used, or forgotten)     1 cached, held by nobody
                                2 held by one      3 shared      4 source of a copy in the last step
                num_holders     base64, packed alike: for each block in state 3, in order, its holders less 2;
                                15 means 17 or more
    requests[]  id, status (running, waiting, forking), wait_reason (seats, tokens, blocks, prefix; null if it runs or
                has not been looked at), num_prompt_tokens, num_output_tokens, num_computed_tokens, num_hit_tokens,
                num_preemptions, age_s,
                tables          per group a flat list of runs, each two numbers: first block id, length. A length of
                                +n counts up (7, 8, 9 is 7, 3), one of -n counts down (9, 8, 7 is 9, -3); id 0 stands
                                for n blocks out of a window. null if it was left out for the frame's size
                Running ones first, then those that waited longest; at most 256
    num_requests_left_out       how many more there are
    totals      num_running, num_waiting,
                referenced_blocks, cached_blocks, never_used_blocks (= num_blocks together), and the same three as
                _tokens (places) and _bytes; usage_ratio (referenced / all), fragmentation_ratio (empty places of
                referenced blocks / their places)
    rates       one value per second, oldest first, at most 60: time_s, output_tokens_per_s, prompt_tokens_per_s,
                hit_ratio (null in a second without lookups), preemptions_per_min, running, waiting, usage_ratio
    means       window_s, and over it: output_tokens_per_s, prompt_tokens_per_s, hit_ratio, preemptions_per_min
    latency     ttft_s, itl_s, e2e_s, queue_s: each p50, p90, p99 over the last minute; null without values
    advice[]    texts; empty when there is nothing to say

Everything in a frame is a copy, so it can be packed on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.block_pool import CACHED, EMPTY
from octavo.core.snapshot import RequestView, Snapshot
from octavo.engine.advice import PoolFacts, advise
from octavo.engine.block_packing import pack_codes, pack_runs
from octavo.engine.timeline import Second
from octavo.units import RequestId

SCHEMA = "octavo.kv/1"
MAX_REQUESTS = 256
MAX_TABLE_RUNS = 5000
"""Runs of block ids in one frame, about 60 kB; tables beyond are left out."""
PERCENTS = (50, 90, 99)

_IN_USE, _SHARED, _COPIED = 2, 3, 4
_STATES = bytes([0, 1, _IN_USE, *[_SHARED] * 253])
_HOLDERS = bytes([0, 0, 0, *[min(count - 1 - 2, 15) for count in range(3, 256)]])
_UNSHARED = bytes([0, 1, 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFrame:
    """One moment, not packed yet. Everything in it is a copy."""

    model: str
    block_bytes: int
    facts: PoolFacts
    now_s: float
    snapshot: Snapshot
    copied: frozenset[int]
    arrivals_s: Mapping[RequestId, float]
    empty_ratio: float
    seconds: Sequence[Second]
    latency: Mapping[str, tuple[float | None, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return the document described above, JSON-ready."""
        snapshot = self.snapshot
        shown = _pick(snapshot.requests)
        return {
            "schema": SCHEMA,
            "time_s": round(self.now_s, 3),
            "model": self.model,
            "block_size_tokens": snapshot.block_size,
            "block_bytes": self.block_bytes,
            "num_blocks": snapshot.num_usable_blocks,
            "max_num_seqs": self.facts.max_num_seqs,
            "blocks": self._blocks(),
            "requests": self._requests(shown),
            "num_requests_left_out": len(snapshot.requests) - len(shown),
            "totals": self._totals(),
            "rates": self._rates(),
            "means": self._means(),
            "latency": {
                name: {f"p{percent}": _round(value) for percent, value in zip(PERCENTS, values, strict=True)}
                for name, values in self.latency.items()
            },
            "advice": list(advise(self.facts, self.seconds)),
        }

    def _blocks(self) -> dict[str, Any]:
        block_map = self.snapshot.block_map
        states = bytearray(block_map.translate(_STATES))
        for block_id in self.copied:
            states[block_id - 1] = _COPIED
        shared = bytes(block_map) if not self.copied else self._without_copied(block_map)
        return {
            "first_id": 1,
            "states": pack_codes(states),
            "num_holders": pack_codes(shared.translate(_HOLDERS, _UNSHARED)),
        }

    def _without_copied(self, block_map: bytes) -> bytes:
        kept = bytearray(block_map)
        for block_id in self.copied:
            kept[block_id - 1] = EMPTY
        return bytes(kept)

    def _requests(self, shown: Sequence[RequestView]) -> list[dict[str, Any]]:
        num_left = MAX_TABLE_RUNS
        requests = []
        for view in shown:
            tables = [
                pack_runs(table, num_blocks=self.snapshot.num_usable_blocks, max_runs=num_left) for table in view.tables
            ]
            num_runs = sum(MAX_TABLE_RUNS + 1 if runs is None else len(runs) // 2 for runs in tables)
            is_whole = num_runs <= num_left
            num_left -= num_runs if is_whole else 0
            requests.append(
                {
                    "id": view.request_id,
                    "status": view.status,
                    "wait_reason": view.wait_reason,
                    "num_prompt_tokens": view.num_prompt_tokens,
                    "num_output_tokens": view.num_output_tokens,
                    "num_computed_tokens": view.num_computed_tokens,
                    "num_hit_tokens": view.num_hit_tokens,
                    "num_preemptions": view.num_preemptions,
                    "age_s": round(self.now_s - self.arrivals_s.get(view.request_id, self.now_s), 3),
                    "tables": tables if is_whole else None,
                }
            )
        return requests

    def _totals(self) -> dict[str, Any]:
        snapshot = self.snapshot
        num_cached, num_empty = snapshot.block_map.count(CACHED), snapshot.block_map.count(EMPTY)
        blocks = {
            "referenced": snapshot.num_usable_blocks - num_cached - num_empty,
            "cached": num_cached,
            "never_used": num_empty,
        }
        num_running = sum(bool(view.tables) for view in snapshot.requests)
        return {
            "num_running": num_running,
            "num_waiting": len(snapshot.requests) - num_running,
            **{f"{name}_blocks": count for name, count in blocks.items()},
            **{f"{name}_tokens": count * snapshot.block_size for name, count in blocks.items()},
            **{f"{name}_bytes": count * self.block_bytes for name, count in blocks.items()},
            "usage_ratio": round(blocks["referenced"] / snapshot.num_usable_blocks, 4),
            "fragmentation_ratio": round(self.empty_ratio, 4) if blocks["referenced"] else 0.0,
        }

    def _rates(self) -> dict[str, Any]:
        num_blocks = self.snapshot.num_usable_blocks
        return {
            "time_s": [second.second + 1 for second in self.seconds],
            "output_tokens_per_s": [second.num_output_tokens for second in self.seconds],
            "prompt_tokens_per_s": [second.num_prompt_tokens for second in self.seconds],
            "hit_ratio": [_ratio(second.num_hit_tokens, second.num_query_tokens) for second in self.seconds],
            "preemptions_per_min": [second.num_preemptions * 60 for second in self.seconds],
            "running": [second.num_running for second in self.seconds],
            "waiting": [second.num_waiting for second in self.seconds],
            "usage_ratio": [round(second.num_used_blocks / num_blocks, 4) for second in self.seconds],
        }

    def _means(self) -> dict[str, Any]:
        num_seconds = max(1, len(self.seconds))
        return {
            "window_s": len(self.seconds),
            "output_tokens_per_s": round(sum(each.num_output_tokens for each in self.seconds) / num_seconds, 2),
            "prompt_tokens_per_s": round(sum(each.num_prompt_tokens for each in self.seconds) / num_seconds, 2),
            "hit_ratio": _ratio(
                sum(each.num_hit_tokens for each in self.seconds), sum(each.num_query_tokens for each in self.seconds)
            ),
            "preemptions_per_min": round(60 * sum(each.num_preemptions for each in self.seconds) / num_seconds, 2),
        }


def _pick(views: Sequence[RequestView]) -> Sequence[RequestView]:
    """Return the requests that are shown: running ones, then the others in the order of their arrival."""
    return sorted(views, key=lambda view: not view.tables)[:MAX_REQUESTS]


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
