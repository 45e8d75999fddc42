"""Sizes and counts: arithmetic, parsing, printing, and the id types.

Memory is binary (KiB, MiB, GiB), bandwidth decimal (GB/s); a unit is always printed. Standard library only.
"""

from __future__ import annotations

import re
from typing import NewType

from octavo.errors import InvalidParameterError

TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
RequestId = NewType("RequestId", str)

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_BYTE_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_COUNT_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def cdiv(numerator: int, denominator: int) -> int:
    """Divide and round up: `cdiv(17, 16) == 2`."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return cdiv(value, multiple) * multiple


def format_bytes(num_bytes: float) -> str:
    """Print a number of bytes with a binary unit: `format_bytes(98_362_432) == "93.8 MiB"`."""
    magnitude = abs(num_bytes)
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= size:
            return f"{num_bytes / size:.1f} {unit}" if magnitude < 100 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def parse_bytes(text: str, *, param: str = "size") -> int:
    """Read `24GiB`, `1.5 GB` or `4096B` as bytes.

    A bare number is refused: 24 could be bytes or GiB, and a guess would be off by nine digits.

    Raises:
        InvalidParameterError: no number, no unit, or an unknown unit.
    """
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise InvalidParameterError(
            f"{text!r} is not a size",
            param=param,
            because="a size is a number with a unit: B, KiB, MiB, GiB, TiB (1024) or kB, MB, GB, TB (1000)",
            hints=(f"write for example `--{param.replace('_', '-')} 24GiB`",),
        )
    return int(float(match.group(1)) * _BYTE_UNITS[unit])


def parse_count(text: str, *, param: str = "count") -> int:
    """Read `32768` or `32k` (k = 1024, as context lengths are written) as a whole number.

    Raises:
        InvalidParameterError: not a whole number of at least 1.
    """
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else "?"
    value = float(match.group(1)) * _COUNT_UNITS[unit] if match and unit in _COUNT_UNITS else 0.0
    if value < 1 or value != int(value):
        raise InvalidParameterError(
            f"{text!r} is not a count",
            param=param,
            because="a count is a whole number of at least 1; k means 1024",
            hints=(f"write for example `--{param.lstrip('-').replace('_', '-')} 4096` or `4k`",),
        )
    return int(value)
