"""EngineVersion: release numbers as people and logs write them, so that rules can be chosen by era."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.errors import InvalidParameterError
from octavo.units import quote

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4}|x)(?:\.(\d{1,4}|x))?(?:[.+-]?[a-z][\w.+-]*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class EngineVersion:
    """A release, ordered by its numbers; what was left out counts as 0."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


def parse_version(text: str, *, param: str = "engine-version") -> EngineVersion:
    """Read `0.17`, `v0.11.0`, `0.6.x`, `0.10.1.dev101` or `0.5.3.post1`.

    Raises:
        InvalidParameterError: it is not a release number.
    """
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise InvalidParameterError(
            f"{quote(text)} is not a release number",
            param=param,
            because="rules are kept by release",
            hints=(f"write for example `--{param} 0.19`",),
        )
    return EngineVersion(*(0 if part is None or part in "xX" else int(part) for part in match.groups()))
