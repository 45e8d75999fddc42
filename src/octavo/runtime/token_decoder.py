"""TokenDecoder: which of the two ways of writing bytes a `tokenizer.json` uses, read off its decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.runtime.vocabulary import SPACE_MARK, Spelling


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDecoder:
    """How the tokens of a `tokenizer.json` become text.

    Args:
        has_byte_tokens: Tokens such as `<0x0A>` spell a byte.
        strips_leading_space: One space at the start of a decoded text belongs to the encoder.
    """

    spelling: Spelling
    has_byte_tokens: bool = False
    strips_leading_space: bool = False


def describe_decoder(decoder: Any, where: str) -> TokenDecoder:
    """Read a decoder of the `tokenizers` package.

    Args:
        decoder: `Tokenizer.decoder`, maybe `None`.
        where: Start of the error messages: file and field.

    Raises:
        UnsupportedModelError: a decoder that rewrites text in a way we cannot follow token by token.
    """
    if decoder is None:
        raise UnsupportedModelError(f"{where} is null, so tokens do not say where spaces go")
    steps = list(_flatten(json.loads(decoder.__getstate__())))
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoder(spelling="byte-level")
    if kinds == ["Metaspace"] and steps[0].get("replacement") == SPACE_MARK:
        return TokenDecoder(spelling="sentencepiece", strips_leading_space=steps[0].get("prepend_scheme") != "never")
    known = all(map(_is_sentencepiece_step, steps))
    if known and "Replace" in kinds:
        return TokenDecoder(
            spelling="sentencepiece",
            has_byte_tokens="ByteFallback" in kinds,
            strips_leading_space="Strip" in kinds,
        )
    raise UnsupportedModelError(
        f"{where} is {' + '.join(kinds)}, an unknown way of turning tokens into text",
        because="byte-level tokens and SentencePiece's space marks with byte fallback are known",
    )


def _flatten(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step.get("type") == "Sequence":
        for inner in step.get("decoders", ()):
            yield from _flatten(inner)
    else:
        yield step


def _is_sentencepiece_step(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return bool(pattern == SPACE_MARK and content == " ")
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return True
    return False
