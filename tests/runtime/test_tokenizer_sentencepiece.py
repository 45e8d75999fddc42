"""SentencePiece vocabularies of GGUF files, against llama.cpp, the sentencepiece package and the rule of merging."""

from __future__ import annotations

import json
import warnings
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError, ModelFileError, UnsupportedModelError
from octavo.runtime.gguf_tokenizer import tokenizer_from_gguf
from octavo.runtime.sentencepiece_encoder import SentencePieceEncoder
from octavo.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "llamacpp_tokens" / "sentencepiece.json").read_text(encoding="utf-8"))
UNKNOWN, BOS, EOS = 0, 1, 2


def metadata(vocabulary: str = "words", **changes: object) -> dict[str, object]:
    """Return the fields of a small vocabulary; a change of `None` removes a field."""
    stored = GOLDEN["vocabularies"][vocabulary]
    fields: dict[str, object] = {
        "model": "llama",
        "pre": "default",
        "tokens": stored["tokens"],
        "scores": array("f", stored["scores"]),
        "token_type": array("i", stored["token_types"]),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "unknown_token_id": UNKNOWN,
        "add_space_prefix": stored["add_space_prefix"],
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items() if value is not None}


SMALL = {name: tokenizer_from_gguf(metadata(name), "small.gguf") for name in GOLDEN["vocabularies"]}
any_text = st.text(
    st.one_of(st.sampled_from(" aeint\n.1語😀é▁"), st.characters(exclude_categories=["Cs"])), max_size=40
)


def encode_bare(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


@pytest.mark.parametrize("name", SMALL)
def test_ids_equal_those_of_llama_cpp(name):
    for case in GOLDEN["cases"]:
        text = case["text"]
        assert SMALL[name].encode(text, add_special_tokens=False) == case["ids"][name], text
        plain = case.get("plain_ids", case["ids"])
        assert encode_bare(SMALL[name], text) == plain.get(name, case["ids"][name]), text


@pytest.mark.parametrize("name", ["words", "phrases", "bare"])
@given(text=any_text)
def test_every_text_comes_back(name, text):
    expected = text.replace("▁", " ")  # the one character that the vocabulary cannot tell from a space

    assert SMALL[name].decode(encode_bare(SMALL[name], text)) == expected


def merge_plainly(symbols: list[str], scores: dict[str, float]) -> list[str]:
    """Merge the neighbours whose union scores highest, the leftmost of equals, one pair after another."""
    while True:
        unions = [left + right for left, right in pairwise(symbols)]
        known = [(-scores[union], i) for i, union in enumerate(unions) if union in scores]
        if not known:
            return symbols
        _, i = min(known)
        symbols = [*symbols[:i], unions[i], *symbols[i + 2 :]]


@given(
    pieces=st.dictionaries(
        st.text("ab▁", min_size=1, max_size=4), st.sampled_from([-1.0, -2.0, -3.0, 0.0]), min_size=1, max_size=20
    ),
    text=st.text("ab ", max_size=20),
    adds_space=st.booleans(),
)
def test_merges_follow_the_rule_where_scores_are_equal_and_pieces_overlap(pieces, text, adds_space):
    pieces = {"a": 0.0, "b": 0.0, "▁": 0.0} | pieces
    ids = {piece: i for i, piece in enumerate(pieces)}
    encoder = SentencePieceEncoder(
        pieces=ids,
        scores=pieces,
        byte_ids=None,
        unknown_id=len(ids),
        control_ids={},
        added_ids={},
        adds_space=adds_space,
    )

    found = encoder.encode(text, parse_special=False, param="prompt")

    marked = ("▁" if adds_space and text else "") + text.replace(" ", "▁")
    assert found == [ids[piece] for piece in merge_plainly(list(marked), pieces)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A vocabulary trained just now with Llama 2's options: the package's own encoder, and ours of its GGUF fields."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its bindings define types in an old way
        sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(case["text"].replace("\x00", "") for case in GOLDEN["cases"] * 5), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "small"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.99,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "small.model"))
    ids = range(reference.vocab_size())
    kinds = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1
        for i in ids
    ]
    fields = metadata(
        tokens=[reference.id_to_piece(i) for i in ids],
        scores=[reference.get_score(i) for i in ids],
        token_type=kinds,
    )
    return reference, tokenizer_from_gguf(fields, "trained.gguf")


@given(text=any_text)
def test_ids_and_texts_equal_those_of_the_sentencepiece_package(trained, text):
    reference, ours = trained
    ids = encode_bare(ours, text)

    assert ids == reference.encode(text)
    assert ours.decode(ids) == reference.decode(ids)


@given(ids=st.lists(st.integers(3, 799), max_size=20))
def test_any_ids_decode_as_the_package_decodes_them(trained, ids):
    """Of a broken character the package makes one U+FFFD per byte, we (as Python and browsers) one per broken piece."""
    reference, ours = trained

    assert squeeze(ours.decode(ids)) == squeeze(reference.decode(ids))


def squeeze(text: str) -> str:
    while "\ufffd\ufffd" in text:
        text = text.replace("\ufffd\ufffd", "\ufffd")
    return text


def test_bytes_stand_for_what_no_piece_spells():
    tokenizer = SMALL["words"]
    ids = encode_bare(tokenizer, "☃")

    assert b"".join(map(tokenizer.token_bytes, ids)) == " ☃".encode()
    assert [tokenizer.token(i) for i in ids[1:]] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert tokenizer.decode(ids[1:-1]) == "\ufffd"


def test_prompt_gets_one_bos_and_the_space_that_words_have():
    tokenizer = SMALL["words"]

    assert tokenizer.encode("the")[0] == BOS
    assert tokenizer.encode("<s>the")[:2] == tokenizer.encode("the")[:2]
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.token(tokenizer.encode("the")[1]).startswith("▁")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode("  the")) == "  the"


def test_control_text_is_only_read_on_request():
    tokenizer = SMALL["words"]

    assert EOS in tokenizer.encode("a</s>")
    assert EOS not in encode_bare(tokenizer, "a</s>")
    assert tokenizer.decode(encode_bare(tokenizer, "a</s>")) == "a</s>"
    assert tokenizer.decode([BOS, *encode_bare(tokenizer, "a"), EOS]) == "a"
    assert tokenizer.decode([BOS, *encode_bare(tokenizer, "a")], skip_special_tokens=False) == "<s> a"


def test_without_bytes_a_run_of_strange_characters_is_one_unknown_token():
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"]
    fields = metadata(tokens=tokens, scores=[0.0, 0.0, 0.0, -2.0, -2.0, -1.0], token_type=[2, 3, 3, 1, 1, 1])

    tokenizer = tokenizer_from_gguf(fields, "f")

    assert encode_bare(tokenizer, "a日本語a 日") == [5, UNKNOWN, 4, 3, UNKNOWN]

    tokens[3:] = ["b", "a", "aa"]  # not even the space is a piece
    spaceless = tokenizer_from_gguf(fields | {"tokenizer.ggml.tokens": tokens}, "f")
    assert encode_bare(spaceless, "日 本 a") == [UNKNOWN, 4]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"scores": None}, ModelFileError, r"tokenizer\.ggml\.scores is missing"),
        ({"scores": [0.0]}, ModelFileError, r"scores has 1 entries for 700 tokens"),
        ({"scores": ["a"] * 700}, ModelFileError, r"scores is not an array of numbers"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, r"remove_extra_whitespaces is set"),
        ({"precompiled_charsmap": [1]}, UnsupportedModelError, r"precompiled_charsmap is set"),
        ({"token_type": [2, 3, 3] + [6] * 255 + [1] * 442}, ModelFileError, r"byte tokens for 255 of 256 bytes"),
        ({"token_type": [2, 3, 3] + [6] * 697}, ModelFileError, r"tokens\[259\] is .*, a byte as <0x0A>"),
        ({"token_type": [1] * 700, "unknown_token_id": None}, ModelFileError, r"unknown_token_id is missing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_one_error_that_names_it(changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        tokenizer_from_gguf(metadata(**changes), "some.gguf")

    assert caught.value.message.startswith("some.gguf: ")


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidParameterError, match=r"token id 700 .*\n.*vocab_size is 700"):
        SMALL["words"].decode([700])
