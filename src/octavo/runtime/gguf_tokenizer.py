"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, models

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.runtime.gguf_vocabulary import PREFIX, GgufVocabulary, TokenType
from octavo.runtime.pipeline_encoder import PipelineEncoder
from octavo.runtime.pre_tokenizers import WORD_SPLITS, WordSplit
from octavo.runtime.sentencepiece_encoder import SentencePieceEncoder
from octavo.runtime.tokenizer import Tokenizer
from octavo.runtime.vocabulary import Vocabulary, is_byte_token, missing_utf8_bytes

_USE_FOLDER = "use the model's safetensors folder, whose tokenizer.json says it"


def tokenizer_from_gguf(metadata: Mapping[str, object], where: str, *, vocab_size: int = 0) -> Tokenizer:
    """Build a tokenizer from GGUF metadata.

    Args:
        where: Start of the error messages: the file.
        vocab_size: Rows of the model's output layer, where it may have more than the tokenizer has tokens.

    Raises:
        UnsupportedModelError: another kind of vocabulary, or an unknown way of cutting text into words.
        ModelFileError: a field is missing, or contradicts the others.
    """
    fields = Fields(metadata, where)
    kind = fields.text(f"{PREFIX}model")
    if kind == "gpt2":
        return _byte_level(GgufVocabulary(fields), _word_split(fields), vocab_size)
    if kind == "llama":
        return _sentencepiece(GgufVocabulary(fields), vocab_size)
    raise UnsupportedModelError(
        f"{fields.describe(f'{PREFIX}model')}, a kind of vocabulary that cannot be read",
        because="gpt2 (byte-level BPE) and llama (SentencePiece BPE) can be",
    )


def _byte_level(file: GgufVocabulary, split: WordSplit, vocab_size: int) -> Tokenizer:
    unused = frozenset(file.ids_of(TokenType.UNUSED))
    used = [i for i, token in enumerate(file.tokens) if token and i not in unused]
    ids = file.by_text(used)
    tokens: list[str | None] = [None] * len(file.tokens)
    for i in used:
        tokens[i] = file.tokens[i]
    return Tokenizer(
        encoder=PipelineEncoder(_pipeline(file, split, ids), missing_bytes=missing_utf8_bytes(ids)),
        vocabulary=Vocabulary(
            tokens, spelling="byte-level", raw_ids=[*file.control, *file.added], size=max(vocab_size, len(tokens))
        ),
        special=file.special_tokens(adds_bos=split.adds_bos),
        chat_templates=file.chat_templates(),
    )


def _pipeline(file: GgufVocabulary, split: WordSplit, ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    merges = file.merges()
    try:
        model = models.BPE(vocab=dict(ids), merges=merges, ignore_merges=split.whole_words)
    except Exception as error:  # the package raises bare exceptions
        raise file.error("merges", f"does not fit {PREFIX}tokens: {error}") from error
    pipeline = tokenizers.Tokenizer(model)
    normalizer = split.normalizer()
    if normalizer is not None:
        pipeline.normalizer = normalizer
    pipeline.pre_tokenizer = split.pre_tokenizer()
    control = [file.tokens[i] for i in file.control if file.tokens[i]]
    added = [file.tokens[i] for i in file.added if file.tokens[i]]
    pipeline.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    pipeline.add_tokens([AddedToken(token, normalized=False) for token in added])
    return pipeline


def _word_split(fields: Fields) -> WordSplit:
    name = fields.text(f"{PREFIX}pre", default="(missing)")
    if name not in WORD_SPLITS:
        raise UnsupportedModelError(
            f"{fields.where}: {PREFIX}pre is {name}, an unknown way of cutting text into words",
            because=f"a wrong cut loads, runs and answers badly; known are {', '.join(WORD_SPLITS)}",
            hints=(_USE_FOLDER,),
        )
    if fields.flag(f"{PREFIX}add_space_prefix", default=False):
        raise UnsupportedModelError(
            f"{fields.where}: {PREFIX}add_space_prefix is true for a byte-level vocabulary",
            because="the format does not say which pieces of a text the space goes before",
            hints=(_USE_FOLDER,),
        )
    return WORD_SPLITS[name]


def _sentencepiece(file: GgufVocabulary, vocab_size: int) -> Tokenizer:
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if file.fields.raw(PREFIX + name):
            raise UnsupportedModelError(
                f"{file.fields.where}: {PREFIX}{name} is set",
                because="a llama vocabulary whose text is rewritten before it is cut cannot be read",
                hints=(_USE_FOLDER,),
            )
    byte_tokens = file.ids_of(TokenType.BYTE)
    apart = {*file.control, *byte_tokens}
    pieces = file.by_text([i for i in range(len(file.tokens)) if i not in apart])
    scores = file.numbers("scores")
    adds_space = file.fields.flag(f"{PREFIX}add_space_prefix", default=True)
    return Tokenizer(
        encoder=SentencePieceEncoder(
            pieces=pieces,
            scores={token: scores[i] for token, i in pieces.items()},
            byte_ids=_byte_ids(file, byte_tokens),
            unknown_id=file.id_of("unknown_token_id"),
            control_ids=file.by_text(file.control),
            added_ids=file.by_text(file.added),
            adds_space=adds_space,
        ),
        vocabulary=Vocabulary(
            file.tokens,
            spelling="sentencepiece",
            raw_ids=file.control,
            byte_ids=byte_tokens,
            size=max(vocab_size, len(file.tokens)),
        ),
        special=file.special_tokens(adds_bos=True),
        strips_leading_space=adds_space,
        chat_templates=file.chat_templates(),
    )


def _byte_ids(file: GgufVocabulary, byte_tokens: Sequence[int]) -> list[int] | None:
    """Return the token of each byte; `None` if the vocabulary writes unknown characters as one unknown token."""
    if not byte_tokens:
        if file.id_of("unknown_token_id") is None:
            raise file.error("unknown_token_id", "is missing, and there are no byte tokens either")
        return None
    by_byte: dict[int, int] = {}
    for i in byte_tokens:
        if not is_byte_token(file.tokens[i]):
            raise file.error(f"tokens[{i}]", f"is {file.tokens[i]!r}, a byte as <0x0A> was expected")
        by_byte[int(file.tokens[i][3:5], 16)] = i
    if len(by_byte) != 256:
        raise file.error("tokens", f"has byte tokens for {len(by_byte)} of 256 bytes")
    return [by_byte[byte] for byte in range(256)]
