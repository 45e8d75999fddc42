"""PipelineEncoder: text to ids through a pipeline of the `tokenizers` package (added tokens, splitting, BPE merges)."""

from __future__ import annotations

import re

import tokenizers

from octavo.errors import InvalidParameterError


class PipelineEncoder:
    """Encodes with a `tokenizers.Tokenizer`, whose post-processor, truncation and padding are never used.

    Args:
        pipeline: Owned by this object from here on; not changed by it.
        missing_bytes: Bytes of UTF-8 that no token of the vocabulary writes. Such a vocabulary exists (SmolLM2 lacks
            0x04 and seven more), and the pipeline would drop what it cannot write without a word.
    """

    __slots__ = ("_literal", "_missing", "_pipeline")

    def __init__(self, pipeline: tokenizers.Tokenizer, *, missing_bytes: bytes = b"") -> None:
        self._pipeline = pipeline
        self._literal: tokenizers.Tokenizer | None = None
        self._missing = re.compile(b"[" + re.escape(missing_bytes) + b"]") if missing_bytes else None

    def encode(self, text: str, *, parse_special: bool, param: str) -> list[int]:
        """Return the ids of a text; see `TextEncoder`."""
        self._check_writable(text, param)
        pipeline = self._pipeline if parse_special else self._literal_pipeline()
        # As a batch of one: only batches let other threads run meanwhile, and a long text takes half a second.
        ids: list[int] = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _check_writable(self, text: str, param: str) -> None:
        data = text.encode("utf-8")
        found = self._missing.search(data) if self._missing else None
        if found is None:
            return
        position = len(data[: found.start()].decode("utf-8", errors="ignore"))
        raise InvalidParameterError(
            f"character {text[position]!r} at position {position:,} cannot be written in this model's vocabulary",
            param=param,
            because=f"it has no token for byte 0x{found.group()[0]:02X}",
            hints=("remove the character from the text",),
        )

    def _literal_pipeline(self) -> tokenizers.Tokenizer:
        """Return a copy that reads control tokens as plain text, made when first asked for.

        A copy, because reading them is a switch of the whole pipeline, and other threads may be encoding.
        """
        if self._literal is None:
            literal = tokenizers.Tokenizer.from_str(self._pipeline.to_str())
            literal.encode_special_tokens = True
            self._literal = literal
        return self._literal
