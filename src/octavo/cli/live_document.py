"""LivePool: an `octavo.kv/1` document read back into blocks, for drawing.

The form is described in `octavo.engine.live_frame`.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.live_frame import SCHEMA
from octavo.errors import MachineError

EMPTY, CACHED, IN_USE, SHARED, COPIED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePool:
    """A document and its blocks.

    Args:
        document: As received.
        states: One of the codes above per block, in the order of ids.
    """

    document: Mapping[str, Any]
    states: bytes

    def count(self, state: int) -> int:
        return self.states.count(state)


def read_live(document: Any) -> LivePool:
    """Unpack a document.

    Raises:
        MachineError: it is none, or of another version.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else None
        raise MachineError(
            f"the server speaks {schema!r}, not {SCHEMA!r}", hints=("use the `octavo` that the server runs with",)
        )
    try:
        return LivePool(document=document, states=_halves(document["blocks"]["states"], document["num_blocks"]))
    except (KeyError, TypeError, ValueError) as error:
        raise MachineError("the server's document cannot be read", because=str(error)) from error


def expand(runs: Sequence[int]) -> list[int]:
    """Return block ids from runs: first id and length, which is negative where ids fall; id 0 repeats."""
    ids: list[int] = []
    for first, length in zip(runs[::2], runs[1::2], strict=True):
        step = 0 if first == 0 else 1 if length > 0 else -1
        ids += [first + step * index for index in range(abs(length))]
    return ids


def _halves(text: str, count: int) -> bytes:
    """Unpack two codes a byte, the low half first."""
    packed = b64decode(text, validate=True)
    codes = bytearray(2 * len(packed))
    codes[0::2] = bytes(byte & 15 for byte in packed)
    codes[1::2] = bytes(byte >> 4 for byte in packed)
    if len(codes) < count:
        raise ValueError(f"{len(codes):,} blocks instead of {count:,}")
    return bytes(codes[:count])
