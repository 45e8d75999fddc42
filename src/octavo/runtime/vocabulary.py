"""Vocabulary: what each token id spells, as bytes.

Vocabularies write bytes in two ways, and text is whatever the bytes of all tokens decode to, one after another:

    byte-level       every byte is one printable character: `Ġ` is a space, `Ċ` a line feed (GPT-2's table)
    sentencepiece    text as it is, `▁` for a space, and `<0xE2>` for a byte that no piece spells

Added tokens (`<|im_end|>`) spell themselves. An id without a token is a gap: models pad their output layer to round
sizes, so such an id can be sampled; it spells nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Literal

from octavo.errors import InvalidParameterError

Spelling = Literal["byte-level", "sentencepiece"]

SPACE_MARK = "▁"


def _byte_characters() -> tuple[str, ...]:
    """Return the printable stand-in of each byte: itself if Latin-1 prints it, else the next character from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(stand_ins)) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
"""The character that byte-level vocabularies write for each byte 0..255."""

_BYTE_BY_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def spell_byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level token.

    A token with any character outside the table was never written in it, and spells itself.
    """
    try:
        return bytes([_BYTE_BY_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def is_byte_token(token: str) -> bool:
    """Tell whether a token is written as one byte: `<0x0A>`."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    return all(digit in "0123456789abcdefABCDEF" for digit in token[3:5])


def missing_utf8_bytes(tokens: Container[str]) -> bytes:
    """Return the bytes that UTF-8 uses and no token of a byte-level vocabulary writes."""
    # 0xC0, 0xC1 and 0xF5 up occur in no valid text.
    used = [*range(0xC0), *range(0xC2, 0xF5)]
    return bytes(byte for byte in used if BYTE_CHARACTERS[byte] not in tokens)


class Vocabulary:
    """Token ids 0 to `size - 1` and what they spell.

    Args:
        tokens: Token of each id as the file writes it; `None` for a gap.
        spelling: How tokens write their bytes.
        raw_ids: Ids whose tokens spell themselves, whatever the spelling.
        byte_ids: Ids of tokens written `<0x0A>` that spell that byte.
        size: Ids that exist, at least as many as tokens; ids past the tokens are gaps.
    """

    __slots__ = ("_byte_ids", "_raw_ids", "_spelled", "_spelling", "_tokens", "size")

    def __init__(
        self,
        tokens: Sequence[str | None],
        *,
        spelling: Spelling,
        raw_ids: Collection[int] = (),
        byte_ids: Collection[int] = (),
        size: int = 0,
    ) -> None:
        self.size = max(size, len(tokens))
        self._tokens = tokens
        self._spelling = spelling
        self._raw_ids = frozenset(raw_ids)
        self._byte_ids = frozenset(byte_ids)
        # Filled as ids are met: spelling all 128,256 tokens of Llama 3 would cost 0.2 s at every start.
        self._spelled: list[bytes | None] = [None] * self.size

    def token(self, token_id: int) -> str | None:
        """Return the token as the file writes it; `None` for a gap."""
        self.check_id(token_id)
        return self._tokens[token_id] if token_id < len(self._tokens) else None

    def spell(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for a gap.

        Raises:
            InvalidParameterError: no such id.
        """
        if type(token_id) is int and 0 <= token_id < self.size:
            spelled = self._spelled[token_id]
            if spelled is not None:
                return spelled
        token = self.token(token_id)
        spelled = b"" if token is None else self._spell(token_id, token)
        self._spelled[token_id] = spelled
        return spelled

    def check_id(self, token_id: int, *, param: str = "token_id") -> None:
        """Refuse what is not an id of this vocabulary.

        Raises:
            InvalidParameterError: naming the id and the size of the vocabulary.
        """
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidParameterError(f"{token_id!r} is not a token id", param=param)
        if not 0 <= token_id < self.size:
            raise InvalidParameterError(
                f"token id {token_id} is outside the vocabulary",
                param=param,
                because=f"vocab_size is {self.size:,}, so ids run from 0 to {self.size - 1}",
            )

    def _spell(self, token_id: int, token: str) -> bytes:
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        if token_id in self._raw_ids:
            return token.encode("utf-8")
        if self._spelling == "byte-level":
            return spell_byte_level(token)
        return token.replace(SPACE_MARK, " ").encode("utf-8")
