"""Numbers, sizes and named settings in the text of a log."""

from __future__ import annotations

import re
from dataclasses import dataclass


def first_match(text: str, pattern: str) -> tuple[str, ...] | None:
    """Return the groups of the first match."""
    match = re.search(pattern, text)
    return None if match is None else match.groups()


def sizes_after(text: str, pattern: str, *, unit: int) -> tuple[int, ...]:
    """Return every number that group 1 of the pattern finds, in bytes."""
    return tuple(int(float(found) * unit) for found in re.findall(pattern, text))


def size_after(text: str, pattern: str, *, unit: int) -> int | None:
    """Return the largest of the sizes, as devices of a group print one each."""
    return max(sizes_after(text, pattern, unit=unit), default=None)


def count_after(text: str, pattern: str) -> int | None:
    """Return the first whole number that group 1 of the pattern finds; digits may be grouped by commas."""
    found = first_match(text, pattern)
    return None if found is None else int(found[0].replace(",", ""))


@dataclass(frozen=True, slots=True)
class Fields:
    """Named settings as logs print them; the first value counts.

    `max_num_seqs=256`, `'max_num_seqs': 256`, `--max-num-seqs 256` and `gpu_memory_utilization (0.90)` are all read.
    """

    log: str

    def text(self, name: str) -> str | None:
        found = first_match(self.log, rf"\b{_spelled(name)}['\"]?\s*[:=]\s*['\"]([^'\"\n]{{1,300}})['\"]")
        return None if found is None else found[0]

    def count(self, *names: str) -> int | None:
        """Return the first of the names that has a whole number of at least 0; engines say `none` by -1."""
        for name in names:
            found = first_match(self.log, rf"\b{_spelled(name)}['\"]?(?:\s*[:=]\s*|\s+)(\d{{1,12}})(?![\d.]*\d)")
            if found is not None:
                return int(found[0])
        return None

    def number(self, name: str) -> float | None:
        found = first_match(self.log, rf"\b{_spelled(name)}['\"]?(?:\s*[:=]\s*|\s*\(|\s+)(\d{{0,15}}\.?\d{{1,15}})")
        return None if found is None else float(found[0])

    def is_true(self, name: str) -> bool:
        return first_match(self.log, rf"\b{_spelled(name)}['\"]?\s*[:=]\s*(True)\b") is not None


def _spelled(name: str) -> str:
    return name.replace("_", "[_-]")
