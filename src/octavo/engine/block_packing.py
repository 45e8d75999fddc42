"""How block ids and states are written small: two codes per byte, and tables as runs. Fast for 100,000 blocks."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache


def pack_codes(codes: bytes | bytearray) -> str:
    """Pack codes below 16, two per byte, the low half first. As two long numbers, so that no loop is in Python."""
    even = codes if len(codes) % 2 == 0 else codes + b"\0"
    low, high = int.from_bytes(even[0::2], "little"), int.from_bytes(even[1::2], "little")
    return b64encode((low | high << 4).to_bytes(len(even) // 2, "little")).decode("ascii")


def pack_runs(table: Sequence[int], *, num_blocks: int, max_runs: int) -> list[int] | None:
    """Return block ids as runs: first id and length, negative where ids fall; id 0 repeats. `None` if too many."""
    ids = array("i", table)
    ramp = _ramp(num_blocks)
    runs: list[int] = []
    start = 0
    while start < len(ids):
        if len(runs) == 2 * max_runs:
            return None
        length, step = _run_at(ids, start, ramp)
        runs += (ids[start], -length if step < 0 else length)
        start += length
    return runs


def _run_at(ids: array[int], start: int, ramp: array[int]) -> tuple[int, int]:
    """Return length and step of the run that begins at `start`; compares stretches, not ids, so that it is fast."""
    first = ids[start]
    step = ids[start + 1] - first if start + 1 < len(ids) else 2
    if abs(step) != (first != 0):
        return 1, 0
    length = width = 2
    while start + length < len(ids):
        width = min(width, len(ids) - start - length)
        if ids[start + length : start + length + width] == _stretch(first + step * length, step, width, ramp):
            length += width
            width *= 2
        elif width == 1:
            break
        else:
            width //= 2
    return length, step


def _stretch(first: int, step: int, length: int, ramp: array[int]) -> array[int]:
    """Return ids from `first` on, cut from the ramp; fewer where there are no more."""
    if step == 0:
        return array("i", [0]) * length
    if step > 0:
        return ramp[first : first + length]
    return ramp[max(0, first + 1 - length) : first + 1][::-1]


@lru_cache(maxsize=2)
def _ramp(num_blocks: int) -> array[int]:
    """Return all block ids, ascending."""
    return array("i", range(num_blocks + 1))
