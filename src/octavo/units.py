"""Sizes and counts: arithmetic, parsing, printing, and the id types.

Memory is binary (KiB, MiB, GiB), bandwidth decimal (GB/s); a unit is always printed. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import floor
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
_MICROSECONDS = {"us": 1, "ms": 1000, "s": 10**6, "min": 60 * 10**6}
_COUNT_UNITS = {"": 1, "k": 1024, "m": 1024**2}
# The digits are bounded because nothing has 30 of them, and longer ones overflow whatever they are given to.
_QUANTITY = re.compile(r"\s*(\d{1,30})(?:\.(\d{1,30}))?\s*([A-Za-z]*)\s*")

MAX_BYTES = 2**63 - 1
"""The largest size that a machine's own interfaces can say."""


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


def format_concurrency(requests: float) -> str:
    """Write how many requests run at once; rounded down, so that no figure promises more than fits."""
    return f"{floor(requests * 100 + 1e-6) / 100:,.2f}"


def quote(value: object) -> str:
    """Print a value for an error: as Python writes it, cut in the middle when it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"  # Python itself refuses to print a very long one
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:50]}...{text[-10:]} ({len(text):,} characters)"


def spell(param: str, value: str) -> str:
    """Write an option with a value the way `param` spells it: `--memory 24GiB`, `OCTAVO_MEMORY=24GiB`."""
    if param.isupper():
        return f"{param}={value}"
    return f"--{param.lstrip('-').replace('_', '-')} {value}"


def parse_bytes(text: str, *, param: str = "size") -> int:
    """Read `24GiB`, `1.5 GB` or `4096B` as bytes.

    A bare number is refused: 24 could be bytes or GiB, and a guess would be off by nine digits.

    Raises:
        InvalidParameterError: no number, no unit, an unknown unit, or more than `MAX_BYTES`.
    """
    numerator, denominator = _quantity(text, _BYTE_UNITS)
    num_bytes = numerator // denominator if denominator else MAX_BYTES + 1
    if num_bytes > MAX_BYTES:
        raise InvalidParameterError(
            f"{quote(text)} is not a size",
            param=param,
            because="a size is a number with a unit: B, KiB, MiB, GiB, TiB (1024) or kB, MB, GB, TB (1000),"
            " and less than 8,388,608 TiB",
            hints=(f"write for example `{spell(param, '24GiB')}`",),
        )
    return num_bytes


def parse_count(text: str, *, param: str = "count", example: int = 4096) -> int:
    """Read `32768` or `32k` (k = 1024, as context lengths are written) as a whole number.

    Args:
        example: A value that the option takes, for the hint.

    Raises:
        InvalidParameterError: not a whole number of at least 1.
    """
    numerator, denominator = _quantity(text, _COUNT_UNITS)
    if denominator == 0 or numerator % denominator != 0 or numerator < 1:
        raise InvalidParameterError(
            f"{quote(text)} is not a count",
            param=param,
            because="a count is a whole number of at least 1, in 30 digits at most; k means 1024",
            hints=(f"write for example `{spell(param, str(example))}`",),
        )
    return numerator // denominator


def parse_duration_s(text: str, *, param: str = "duration") -> float:
    """Read `200ms`, `0.5s` or `2min` as seconds; a bare number is refused, for it could be either.

    Raises:
        InvalidParameterError: no number, no unit, an unknown unit, or no time at all.
    """
    numerator, denominator = _quantity(text, _MICROSECONDS)
    if denominator == 0 or numerator == 0:
        raise InvalidParameterError(
            f"{quote(text)} is not a duration",
            param=param,
            because="a duration is a number above 0 with a unit: us, ms, s or min",
            hints=(f"write for example `{spell(param, '200ms')}`",),
        )
    return numerator / denominator / 1e6


def _quantity(text: str, units: Mapping[str, int]) -> tuple[int, int]:
    """Read a number and its unit as an exact fraction; the denominator is 0 when the text is neither."""
    match = _QUANTITY.fullmatch(text)
    unit = units.get(match.group(3).lower()) if match else None
    if match is None or unit is None:
        return 0, 0
    whole, fraction = match.group(1), match.group(2) or ""
    return int(whole + fraction) * unit, 10 ** len(fraction)
