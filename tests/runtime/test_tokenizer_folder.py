"""Tokenizers of Hugging Face folders, against transformers reading the same folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidParameterError, ModelFileError, UnsupportedModelError
from octavo.models.load import open_model
from octavo.runtime.folder_tokenizer import tokenizer_from_folder
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.testing.tiny_models import TinyModel, make_tokenizer, make_tokenizer_config, write_hf_model

DATA = Path(__file__).parents[1] / "data"
TEXTS = [case["text"] for case in json.loads((DATA / "smollm2_tokens" / "golden.json").read_text("utf-8"))["cases"]]
SENTENCEPIECE = json.loads((DATA / "llamacpp_tokens" / "sentencepiece.json").read_text("utf-8"))
ENDOFTEXT, IM_START, IM_END = 0, 1, 2


def bos_template(token: str, token_id: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def write_folder(
    folder: Path, tokenizer: dict[str, Any], config: dict[str, Any] | None = None, **files: str | dict[str, Any]
) -> Path:
    contents: dict[str, str | dict[str, Any]] = {
        "tokenizer__json": tokenizer,
        "tokenizer_config__json": make_tokenizer_config() if config is None else config,
        "config__json": {"model_type": "llama"},
        **files,
    }
    for name, content in contents.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def llama2_tokenizer() -> dict[str, Any]:
    """Return the small SentencePiece vocabulary as Llama 2's `tokenizer.json` writes one: merges by score."""
    stored = SENTENCEPIECE["vocabularies"]["words"]
    ids = {token: i for i, token in enumerate(stored["tokens"])}
    scores = dict(zip(stored["tokens"], stored["scores"], strict=True))
    merges = []
    for token in sorted(stored["tokens"][259:], key=lambda token: -scores[token]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(ids[left], ids[right], [left, right]) for left, right in splits if left in ids and right in ids]
        merges += [pair for *_, pair in sorted(known)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(stored["tokens"][:3])],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": bos_template("<s>", 1),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges,
        },
    }


LLAMA2_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def transformers_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the yardstick of this test")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("adds_bos", [False, True], ids=["bare", "bos"])
def test_byte_level_ids_and_texts_equal_those_of_transformers(tmp_path, adds_bos):
    tokenizer = make_tokenizer(800)
    if adds_bos:
        tokenizer["post_processor"] = bos_template("<|endoftext|>", ENDOFTEXT)
    folder = write_folder(tmp_path, tokenizer)
    reference, ours = transformers_tokenizer(folder), tokenizer_from_folder(folder)

    for text in TEXTS:
        ids = ours.encode(text)
        expected = reference(text).input_ids
        # The one difference, on purpose: no second BOS.
        assert ids == (expected[1:] if expected[:2] == [ENDOFTEXT] * 2 else expected), text
        assert ids[:1] == [ENDOFTEXT] or not adds_bos
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_ids_and_texts_equal_those_of_transformers_and_llama_cpp(tmp_path):
    folder = write_folder(tmp_path, llama2_tokenizer(), LLAMA2_CONFIG)
    reference, ours = transformers_tokenizer(folder), tokenizer_from_folder(folder)

    assert ours.strips_leading_space
    for case in SENTENCEPIECE["cases"]:
        ids = ours.encode(case["text"])
        assert ids == reference(case["text"]).input_ids == [1, *case["ids"]["words"]], case["text"]
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_broken_bytes_of_a_run_do_not_take_whole_characters_with_them(tmp_path):
    """The tokenizers package turns a whole run of byte tokens into U+FFFD if any byte of it is broken."""
    ours = tokenizer_from_folder(write_folder(tmp_path, llama2_tokenizer(), LLAMA2_CONFIG))
    byte_id = 3  # of <0x00>

    assert ours.decode([byte_id + byte for byte in "é".encode() + b"\xe2"]) == "é\ufffd"


def test_flags_of_the_config_do_not_change_what_tokenizer_json_says(tmp_path):
    tokenizer = make_tokenizer(800) | {"post_processor": bos_template("<|endoftext|>", ENDOFTEXT)}
    folder = write_folder(tmp_path, tokenizer, make_tokenizer_config() | {"add_bos_token": False})

    ids = tokenizer_from_folder(folder).encode("a")

    assert ids == transformers_tokenizer(folder)("a").input_ids
    assert ids[0] == ENDOFTEXT


def test_a_text_that_starts_with_bos_gets_no_second_one(tmp_path):
    tokenizer = make_tokenizer(800) | {"post_processor": bos_template("<|endoftext|>", ENDOFTEXT)}
    ours = tokenizer_from_folder(write_folder(tmp_path, tokenizer))

    assert ours.encode("<|endoftext|>hi") == ours.encode("hi")
    assert ours.encode("<|endoftext|>hi", parse_special=False).count(ENDOFTEXT) == 1
    assert ours.encode("<|endoftext|><|endoftext|>").count(ENDOFTEXT) == 2  # the writer's own


def test_control_tokens_are_plain_text_on_request(tmp_path):
    ours = tokenizer_from_folder(write_folder(tmp_path, make_tokenizer(800)))
    text = "<|im_start|>x"

    assert ours.encode(text)[0] == IM_START
    assert IM_START not in ours.encode(text, parse_special=False)
    assert ours.decode(ours.encode(text, parse_special=False)) == text
    assert ours.encode(text)[0] == IM_START  # the switch was not left on


def test_truncation_and_padding_of_the_file_never_cut_or_fill_a_prompt(tmp_path):
    tokenizer = make_tokenizer(800)
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    ours = tokenizer_from_folder(write_folder(tmp_path, tokenizer))

    assert len(ours.encode("1234567890")) == 10
    assert len(ours.encode("1")) == 1


@pytest.mark.parametrize("listed", [[2, 5], 5], ids=["list", "number"])
def test_ends_are_the_union_of_config_and_generation_config(tmp_path, listed):
    folder = write_folder(tmp_path, make_tokenizer(800), generation_config__json={"eos_token_id": listed})

    assert tokenizer_from_folder(folder).eos_token_ids == (IM_END, 5)


def test_roles_are_found_in_special_tokens_map_too(tmp_path):
    config = {"chat_template": "x"}
    roles = {"bos_token": "<|endoftext|>", "eos_token": {"content": "ab", "special": True}}
    folder = write_folder(tmp_path, make_tokenizer(800), config, special_tokens_map__json=roles)

    ours = tokenizer_from_folder(folder)

    assert ours.special.roles == {"bos_token": "<|endoftext|>", "eos_token": "ab"}
    (eos,) = ours.eos_token_ids
    assert ours.token(eos) == "ab"
    assert ours.decode([eos]) == ""  # named as special, so left out like the others


def test_tokens_that_only_the_config_lists_are_read(tmp_path):
    config = make_tokenizer_config()
    config["added_tokens_decoder"] = {
        "800": {"content": "<tool>", "special": False, "normalized": False, "lstrip": False, "rstrip": False},
        "801": {"content": "<secret>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
        "0": {"content": "<|endoftext|>", "special": True},
    }
    folder = write_folder(tmp_path, make_tokenizer(800), config)
    reference, ours = transformers_tokenizer(folder), tokenizer_from_folder(folder)
    text = "a<tool>b<secret>"

    assert ours.encode(text) == reference(text).input_ids
    assert ours.decode(ours.encode(text)) == "a<tool>b"


def test_vocabulary_covers_the_rows_of_the_output_layer(tmp_path):
    ours = tokenizer_from_folder(write_folder(tmp_path, make_tokenizer(800)), vocab_size=832)

    assert ours.vocab_size == 832
    assert ours.decode([ENDOFTEXT, 831, 800]) == ""
    with pytest.raises(InvalidParameterError, match=r"token id 832 .*\n.*vocab_size is 832"):
        ours.decode([832])


def test_opened_model_brings_its_tokenizer(tmp_path):
    model = TinyModel(vocab_size=800)
    write_hf_model(model, tmp_path)

    ours = load_tokenizer(open_model(tmp_path))

    assert ours.vocab_size == 800
    assert ours.decode(ours.encode("Hello, wörld")) == "Hello, wörld"


@pytest.mark.parametrize("template_files", [["chat_template.jinja"], ["chat_template.json"], []], ids=str)
def test_chat_template_is_found_wherever_the_folder_keeps_it(tmp_path, template_files):
    folder = write_folder(tmp_path, make_tokenizer(800))
    contents = {"chat_template.jinja": "from jinja", "chat_template.json": json.dumps({"chat_template": "from json"})}
    for name in template_files:
        (folder / name).write_text(contents[name], encoding="utf-8")
    (found,) = tokenizer_from_folder(folder).chat_templates.values()

    expected = {"chat_template.jinja": "from jinja", "chat_template.json": "from json"}
    assert found.text == (expected[template_files[0]] if template_files else make_tokenizer_config()["chat_template"])
    assert (template_files[0] if template_files else "tokenizer_config.json: chat_template") in found.where


def test_named_chat_templates_are_found(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config = make_tokenizer_config() | {"chat_template": named}
    folder = write_folder(tmp_path, make_tokenizer(800), config)

    found = tokenizer_from_folder(folder).chat_templates
    assert {name: source.text for name, source in found.items()} == {"default": "d", "tool_use": "t"}

    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r", encoding="utf-8")
    found = tokenizer_from_folder(folder).chat_templates
    assert {name: source.text for name, source in found.items()} == {"default": "file", "rag": "r"}


def broken(change: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(make_tokenizer(800)) | change


@pytest.mark.parametrize(
    ("tokenizer", "kind", "message"),
    [
        (broken({"decoder": None}), UnsupportedModelError, "tokenizer.json: decoder is null"),
        (
            broken({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}),
            UnsupportedModelError,
            "WordPiece",
        ),
        (broken({"model": {"type": "Dreams"}}), ModelFileError, "tokenizer.json: cannot be read as a tokenizer"),
    ],
    ids=["no decoder", "decoder", "model"],
)
def test_what_cannot_be_read_is_one_error_that_names_it(tmp_path, tokenizer, kind, message):
    with pytest.raises(kind, match=message):
        tokenizer_from_folder(write_folder(tmp_path, tokenizer))


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


def test_broken_json_beside_it_is_named(tmp_path):
    folder = write_folder(tmp_path, make_tokenizer(800), generation_config__json="{")
    with pytest.raises(ModelFileError, match=r"generation_config\.json: not JSON"):
        tokenizer_from_folder(folder)

    (folder / "generation_config.json").write_text('{"eos_token_id": 800}', encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"generation_config\.json: eos_token_id names token 800"):
        tokenizer_from_folder(folder)

    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: not UTF-8"):
        tokenizer_from_folder(folder)
