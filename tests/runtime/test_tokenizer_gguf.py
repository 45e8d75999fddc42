"""Byte-level vocabularies of GGUF files, against llama.cpp and against the pipelines that their makers published."""

from __future__ import annotations

import json
import unicodedata
from array import array
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import InvalidParameterError, ModelFileError, OctavoError, UnsupportedModelError
from octavo.models.load import open_model
from octavo.runtime.gguf_tokenizer import tokenizer_from_gguf
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.testing.real_model import find_real_model

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "smollm2_tokens" / "golden.json").read_text(encoding="utf-8"))["cases"]
OTHERS = json.loads((DATA / "llamacpp_tokens" / "byte_level.json").read_text(encoding="utf-8"))

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Pieces whose borders the families place differently, and everything else Unicode has.
BORDERS = ["'s", "'LL", "'", "\u2019t", "12", "3456", "٣", "½", "Ⅷ", " ", "  ", "\t", "\n", "\r\n", "\n\n", "\x00"]
BORDERS += ["a", "Z", "e\u0301", "ß", "\u017f", "語", "한", "ा", "😀", "👍🏽", "\u200d", "\ufe0f", "\u00a0", "\u3000"]
BORDERS += [".", "!?", "<", "$", "_"]
fuzz = st.lists(st.one_of(st.sampled_from(BORDERS), st.characters(exclude_categories=["Cs"])), max_size=24).map("".join)


def metadata(pre: str = "gpt-2", **changes: object) -> dict[str, object]:
    """Return the fields of a small vocabulary; a change of `None` removes a field."""
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": OTHERS["tokens"],
        "tokenizer.ggml.token_type": array("i", OTHERS["token_types"]),
        "tokenizer.ggml.merges": OTHERS["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    fields |= {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
    return {name: value for name, value in fields.items() if value is not None}


def published(pre: str) -> Tokenizer:
    """Return the small vocabulary with the pipeline of the family's own `tokenizer.json`."""
    merges = [tuple(merge.split(" ")) for merge in OTHERS["merges"]]
    vocab = {token: i for i, token in enumerate(OTHERS["tokens"])}
    pipeline = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pipeline.pre_tokenizer = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), plain]),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), plain]),
        "gpt-2": gpt2,
    }[pre]
    if pre == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


PUBLISHED = {pre: published(pre) for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2")}
SMALL = {pre: tokenizer_from_gguf(metadata(pre), "small.gguf") for pre in [*PUBLISHED, "default"]}


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load_tokenizer(open_model(find_real_model()))
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: repr(case["text"][:20]))
def test_golden_texts_of_the_default_model_become_the_golden_ids(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids_special"]
    assert smollm2.encode(case["text"], parse_special=False) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["detokenized"]
    assert smollm2.decode(case["ids_special"], skip_special_tokens=False) == case["detokenized"]


def test_default_model_says_what_its_file_says(smollm2):
    assert smollm2.vocab_size == 49_152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert smollm2.special.prefix_ids == ()  # add_bos_token is false
    assert smollm2.decode([1, 28120, 2]) == "hello"
    assert smollm2.chat_template.startswith("{% for message in messages %}")


def test_what_the_default_model_cannot_write_is_refused_not_dropped(smollm2):
    """Its vocabulary lacks 0x04 and seven more bytes; other programs leave such characters out without a word."""
    with pytest.raises(InvalidParameterError, match=r"prompt: character '\\x04' at position 2 .*\n.*byte 0x04"):
        smollm2.encode("é\n\x04")
    with pytest.raises(InvalidParameterError, match="byte 0xF1"):
        smollm2.encode("a\U00050000")


@pytest.mark.parametrize("pre", SMALL)
def test_ids_equal_those_of_llama_cpp(pre):
    num_composed = 0
    for case in OTHERS["cases"]:
        text = case["text"]
        if pre == "qwen2" and unicodedata.normalize("NFC", text) != text:
            num_composed += 1
            continue
        assert SMALL[pre].encode(text) == case["ids"][pre], text
        plain = case.get("plain_ids", case["ids"])
        assert SMALL[pre].encode(text, parse_special=False) == plain.get(pre, case["ids"][pre]), text
    assert num_composed == (9 if pre == "qwen2" else 0)


@pytest.mark.parametrize("pre", PUBLISHED)
@given(text=fuzz)
@example(text="e\u0301 12345 it's IT'S\r\n\r\n  x")
def test_ids_equal_those_of_the_published_pipeline(pre, text):
    ids = SMALL[pre].encode(text, parse_special=False)

    # The small vocabulary's one user-defined token is no part of the published pipelines.
    if "<call>" not in text:
        assert ids == PUBLISHED[pre].encode(text).ids
    assert SMALL[pre].decode(ids) == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)


@given(ids=st.lists(st.integers(3, len(OTHERS["tokens"]) - 2), max_size=20))
def test_any_ids_decode_as_the_published_decoder_does(ids):
    """Random ids spell broken UTF-8; both make U+FFFD of the same bytes."""
    assert SMALL["gpt-2"].decode(ids) == PUBLISHED["gpt-2"].decode(ids)


def test_a_word_that_is_a_token_needs_no_merges_for_llama_3_only():
    whole = OTHERS["tokens"].index("Ġwaitable")

    assert whole in SMALL["llama-bpe"].encode("x waitable")
    assert whole not in SMALL["gpt-2"].encode("x waitable")


def test_llama_3_adds_bos_where_the_file_does_not_say():
    says_nothing = metadata("llama-bpe", ggml__add_bos_token=None)

    assert tokenizer_from_gguf(says_nothing, "f").encode("a")[0] == 0
    assert tokenizer_from_gguf(metadata("gpt-2", ggml__add_bos_token=None), "f").encode("a")[0] != 0
    assert tokenizer_from_gguf(metadata("llama-bpe"), "f").encode("a")[0] != 0


def test_flags_say_what_goes_around_a_prompt():
    tokenizer = tokenizer_from_gguf(metadata(ggml__add_bos_token=True, ggml__add_eos_token=True), "f")
    inner = tokenizer.encode("hi", add_special_tokens=False)

    assert tokenizer.encode("hi") == [0, *inner, 1]
    assert tokenizer.encode("<|start|>hi") == [0, *inner, 1]  # no second one
    assert tokenizer.encode("") == [0, 1]


def test_ends_are_the_union_of_all_that_the_file_names():
    changes = {"ggml__eot_token_id": 5, "ggml__eom_token_id": 7, "ggml__eos_token_id": 5}
    tokenizer = tokenizer_from_gguf(metadata(**changes), "f")

    assert tokenizer.eos_token_ids == (5, 7, 1)  # 1 is <|end|>, which ends turns everywhere
    assert tokenizer.is_special(7)


def test_a_control_token_that_ends_turns_everywhere_ends_them_here_too():
    tokens = ["<|start|>", "<|eot_id|>", *OTHERS["tokens"][2:]]

    tokenizer = tokenizer_from_gguf(metadata(ggml__tokens=tokens, ggml__eos_token_id=0), "f")

    assert tokenizer.eos_token_ids == (0, 1)


def test_user_defined_tokens_are_always_read_and_always_shown():
    tokenizer = SMALL["gpt-2"]
    ids = tokenizer.encode("a<call>b", parse_special=False)

    assert 2 in ids
    assert tokenizer.decode(ids) == "a<call>b"


def test_added_tokens_spell_themselves_whatever_the_byte_table_says():
    """`é` and `Ġ` stand for the bytes 0xE9 and 0x20 in other tokens."""
    tokens = ["<|é|>", "<|end|>", "Ġcall", *OTHERS["tokens"][3:]]
    tokenizer = tokenizer_from_gguf(metadata(ggml__tokens=tokens), "f")

    ids = tokenizer.encode("<|é|>aĠcall")

    assert (ids[0], ids[-1]) == (0, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|é|>aĠcall"


def test_unused_and_missing_ids_spell_nothing():
    num_tokens = len(OTHERS["tokens"])
    tokenizer = tokenizer_from_gguf(metadata(), "f", vocab_size=num_tokens + 10)

    assert tokenizer.vocab_size == num_tokens + 10
    assert [tokenizer.token_bytes(i) for i in (num_tokens - 1, num_tokens, num_tokens + 9)] == [b"", b"", b""]
    with pytest.raises(
        InvalidParameterError, match=rf"token id {num_tokens + 10} .*\n.*vocab_size is {num_tokens + 10}"
    ):
        tokenizer.token_bytes(num_tokens + 10)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"ggml__pre": "tekken"}, UnsupportedModelError, r"tokenizer\.ggml\.pre is tekken"),
        ({"ggml__pre": None}, UnsupportedModelError, r"tokenizer\.ggml\.pre is \(missing\)"),
        ({"ggml__model": "bert"}, UnsupportedModelError, r"tokenizer\.ggml\.model is 'bert'"),
        ({"ggml__model": None}, ModelFileError, r"tokenizer\.ggml\.model is missing"),
        ({"ggml__add_space_prefix": True}, UnsupportedModelError, r"add_space_prefix is true"),
        ({"ggml__tokens": None}, ModelFileError, r"tokenizer\.ggml\.tokens is missing"),
        ({"ggml__tokens": "abc"}, ModelFileError, r"tokens is not an array"),
        ({"ggml__tokens": [1, 2]}, ModelFileError, r"tokens is not an array of strings"),
        ({"ggml__tokens": [*OTHERS["tokens"][:-2], "a", ""]}, ModelFileError, r"tokens has 'a' twice, as \d+ and 560"),
        ({"ggml__merges": None}, ModelFileError, r"tokenizer\.ggml\.merges is missing"),
        ({"ggml__merges": ["ab"]}, ModelFileError, r"merges\[0\] is 'ab', two tokens"),
        ({"ggml__merges": ["☃ ☂"]}, ModelFileError, r"merges does not fit tokenizer\.ggml\.tokens: .*☃"),
        ({"ggml__token_type": array("i", [1])}, ModelFileError, r"token_type has 1 entries for 562 tokens"),
        ({"ggml__bos_token_id": 99_999}, ModelFileError, r"bos_token_id names token 99999"),
        (
            {"ggml__bos_token_id": None, "ggml__add_bos_token": True},
            ModelFileError,
            r"add_bos_token is true, but .*bos",
        ),
        ({"ggml__add_bos_token": "yes"}, ModelFileError, r"add_bos_token is 'yes', true or false"),
        ({"chat_template": 5}, ModelFileError, r"chat_template is 5, a string"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_one_error_that_names_it(changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        tokenizer_from_gguf(metadata(**changes), "some.gguf")

    assert caught.value.message.startswith("some.gguf: ")


def test_named_chat_templates_are_found():
    fields = metadata(chat_template="{{ 1 }}") | {"tokenizer.chat_template.tool_use": "{{ 2 }}"}

    templates = tokenizer_from_gguf(fields, "f.gguf").chat_templates

    assert {name: source.text for name, source in templates.items()} == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert templates["tool_use"].where == "f.gguf: tokenizer.chat_template.tool_use"
