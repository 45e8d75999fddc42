"""A tokenizer from a Hugging Face folder: `tokenizer.json`, and what the files beside it add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.json_file import read_json
from octavo.runtime.folder_chat_templates import read_chat_templates
from octavo.runtime.pipeline_encoder import PipelineEncoder
from octavo.runtime.token_decoder import TokenDecoder, describe_decoder
from octavo.runtime.tokenizer import SpecialTokens, Tokenizer
from octavo.runtime.vocabulary import Vocabulary, is_byte_token, missing_utf8_bytes

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ROLE_LISTS = ("additional_special_tokens", "extra_special_tokens")
_MAX_TOKEN_ID = 1 << 24


def tokenizer_from_folder(folder: Path, *, vocab_size: int = 0) -> Tokenizer:
    """Build a tokenizer from the files of a folder.

    What goes around a prompt is what the post-processor of `tokenizer.json` adds. `add_bos_token` and `add_eos_token`
    of `tokenizer_config.json` do not count: they say how that post-processor was once made, and transformers 5 reads
    them no more.

    Args:
        vocab_size: Rows of the model's output layer, where it may have more than the tokenizer has tokens.

    Raises:
        UnsupportedModelError: no `tokenizer.json`, or tokens written in a way we cannot read.
        ModelFileError: a file is broken or contradicts another.
    """
    pipeline = _read_pipeline(folder)
    config = _read_optional(folder / "tokenizer_config.json")
    roles = _roles(config, _read_optional(folder / "special_tokens_map.json"))
    _add_listed_tokens(pipeline, config)
    _mark_special(pipeline, [*roles.values(), *_listed_specials(config)])
    decoder = describe_decoder(pipeline.decoder, f"{folder / 'tokenizer.json'}: decoder")
    vocabulary = _vocabulary(pipeline, decoder, folder, vocab_size)
    return Tokenizer(
        encoder=PipelineEncoder(pipeline, missing_bytes=_missing_bytes(pipeline, decoder)),
        vocabulary=vocabulary,
        special=_special_tokens(pipeline, roles, _generation_ends(folder, vocabulary.size)),
        strips_leading_space=decoder.strips_leading_space,
        chat_templates=read_chat_templates(folder, config),
    )


def _read_pipeline(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedModelError(
            f"{folder}: has no tokenizer.json",
            because="other tokenizer files say only in part how text becomes tokens",
            hints=("save it with transformers: `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`",),
        )
    try:
        pipeline = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare exceptions
        raise ModelFileError(f"{path}: cannot be read as a tokenizer: {error}") from error
    # Both are settings of somebody's training run, and would cut or fill prompts without a word.
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _roles(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens with a role, by role; `tokenizer_config.json` counts before `special_tokens_map.json`."""
    texts = {role: _content(config.get(role)) or _content(special_map.get(role)) for role in _ROLES}
    return {role: text for role, text in texts.items() if text}


def _content(token: object) -> str | None:
    """Return the text of a token given as a string or as an object; `None` for anything else."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _listed_specials(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _ROLE_LISTS:
        listed = config.get(name)
        entries = listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ()
        yield from (text for text in map(_content, entries) if text)


def _add_listed_tokens(pipeline: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens that only `tokenizer_config.json` lists, where they get the ids it lists them with."""
    listed = config.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, Mapping) else ()
    by_id = {int(key): entry for key, entry in entries if key.isdecimal() and isinstance(entry, Mapping)}
    for i, entry in sorted(by_id.items()):
        content = _content(entry) or ""
        next_id = pipeline.get_vocab_size(with_added_tokens=True)
        known_id = pipeline.token_to_id(content)
        if not content or i in pipeline.get_added_tokens_decoder() or i != (next_id if known_id is None else known_id):
            continue
        flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        pipeline.add_tokens([AddedToken(content, **flags)])


def _mark_special(pipeline: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Make control tokens of the named ones. One that has no id is left alone: the model has no row for it."""
    special = {token.content for token in pipeline.get_added_tokens_decoder().values() if token.special}
    names = [text for text in texts if text not in special and pipeline.token_to_id(text) is not None]
    pipeline.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in names])


def _vocabulary(pipeline: tokenizers.Tokenizer, decoder: TokenDecoder, folder: Path, vocab_size: int) -> Vocabulary:
    ids = pipeline.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest < 0 or largest > _MAX_TOKEN_ID:
        raise ModelFileError(f"{folder / 'tokenizer.json'}: the largest token id is {largest}")
    tokens: list[str | None] = [None] * (largest + 1)
    for token, i in ids.items():
        tokens[i] = token
    added = pipeline.get_added_tokens_decoder()
    return Vocabulary(
        tokens,
        spelling=decoder.spelling,
        # A byte-level token that was added is matched against plain text, so it is plain text; SentencePiece's
        # space marks are replaced in all tokens alike.
        raw_ids=added if decoder.spelling == "byte-level" else (),
        byte_ids=[i for token, i in ids.items() if is_byte_token(token)] if decoder.has_byte_tokens else (),
        size=vocab_size,
    )


def _missing_bytes(pipeline: tokenizers.Tokenizer, decoder: TokenDecoder) -> bytes:
    model = pipeline.model
    if decoder.spelling != "byte-level" or getattr(model, "unk_token", None) or getattr(model, "byte_fallback", False):
        return b""
    return missing_utf8_bytes(pipeline.get_vocab(with_added_tokens=False))


def _generation_ends(folder: Path, vocab_size: int) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    return Fields(_read_optional(path), str(path)).token_ids("eos_token_id", vocab_size)


def _special_tokens(
    pipeline: tokenizers.Tokenizer, roles: Mapping[str, str], generation_ends: tuple[int, ...]
) -> SpecialTokens:
    role_ids = {role: pipeline.token_to_id(text) for role, text in roles.items()}
    bos, eos = role_ids.get("bos_token"), role_ids.get("eos_token")
    prefix, suffix = _post_processor_ids(pipeline)
    special = {i for i, token in pipeline.get_added_tokens_decoder().items() if token.special}
    ends = tuple(dict.fromkeys([*(() if eos is None else (eos,)), *generation_ends]))
    return SpecialTokens(
        bos_token_id=bos,
        eos_token_ids=ends,
        control_ids=frozenset(special),
        prefix_ids=prefix,
        suffix_ids=suffix,
        roles=dict(roles),
    )


def _post_processor_ids(pipeline: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what the post-processor puts before and behind a text, by trying it on one."""
    if pipeline.post_processor is None or not pipeline.post_processor.num_special_tokens_to_add(is_pair=False):
        return (), ()
    bare = pipeline.encode("a", add_special_tokens=False).ids
    around = pipeline.encode("a", add_special_tokens=True).ids
    for start in range(len(around) - len(bare) + 1):
        if around[start : start + len(bare)] == bare:
            return tuple(around[:start]), tuple(around[start + len(bare) :])
    raise UnsupportedModelError(
        "tokenizer.json: post_processor changes the text's own tokens",
        because=f"`a` is {bare} without it and {around} with it",
    )
