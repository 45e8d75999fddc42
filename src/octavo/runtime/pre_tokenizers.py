"""How byte-level vocabularies cut text into words before merging, by the names that GGUF files use.

A wrong cut loads and runs, but costs tokens and answers badly, so a name that is not in the table is refused.

Source: the tokenizer files that the models' makers published; names and `default` as in llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 and Qwen 2 differ in the digits that one word may hold: three, or one.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSplit:
    """How a family cuts text into words.

    Args:
        patterns: Applied one after another to the pieces the last one left; both what matches and what lies between
            becomes a piece.
        composes: Text is put into Unicode's composed form (NFC) first.
        whole_words: A word that is a token is taken without merging, even if the merges lead elsewhere.
        adds_bos: A prompt starts with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """Return the splitting step of a `tokenizers` pipeline; bytes become characters after the last cut."""
        cuts: Sequence[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Any:
        """Return the normalising step; `None` if text is taken as it is."""
        return normalizers.NFC() if self.composes else None


_LLAMA3_SPLIT = WordSplit(patterns=(_LLAMA3,), whole_words=True, adds_bos=True)

WORD_SPLITS = {
    "smollm": WordSplit(patterns=(r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": WordSplit(patterns=(_QWEN2,), composes=True),
    "gpt-2": WordSplit(patterns=(_GPT2,)),
    # What llama.cpp does with a file that names no family; no published tokenizer cuts exactly so.
    "default": WordSplit(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""Splits by the value of `tokenizer.ggml.pre`."""
