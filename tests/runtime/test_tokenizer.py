"""What every tokenizer promises, and that streaming its tokens gives the text that decoding them gives."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.detokenize import Detokenizer
from octavo.errors import InvalidParameterError
from octavo.runtime.gguf_tokenizer import tokenizer_from_gguf
from octavo.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "llamacpp_tokens"
BYTE_LEVEL = json.loads((DATA / "byte_level.json").read_text(encoding="utf-8"))
SENTENCEPIECE = json.loads((DATA / "sentencepiece.json").read_text(encoding="utf-8"))["vocabularies"]["words"]


def make_tokenizers() -> dict[str, Tokenizer]:
    def field(names: dict[str, object]) -> dict[str, object]:
        return {f"tokenizer.ggml.{name}": value for name, value in names.items()}

    byte_level = field(
        {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": BYTE_LEVEL["tokens"],
            "token_type": BYTE_LEVEL["token_types"],
            "merges": BYTE_LEVEL["merges"],
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
    )
    sentencepiece = field(
        {
            "model": "llama",
            "tokens": SENTENCEPIECE["tokens"],
            "scores": SENTENCEPIECE["scores"],
            "token_type": SENTENCEPIECE["token_types"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
    )
    no_space = sentencepiece | field({"add_space_prefix": False})
    fields = {"byte-level": byte_level, "sentencepiece": sentencepiece, "sentencepiece without prefix": no_space}
    return {name: tokenizer_from_gguf(value, f"{name}.gguf") for name, value in fields.items()}


TOKENIZERS = make_tokenizers()
families = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

HARD_TEXTS = [
    "👨‍👩‍👧‍👦 family, 🇨🇳🇫🇷 flags, 👍🏽 skin",
    "한국어 문장입니다",
    "नमस्ते दुनिया",
    "e\u0301 combining a\u0300\u0323",
    "   leading, trailing   ",
    "a  b   c    d",
    "spaces before . and , and ! and n't 's",
    "\r\nCR LF\r\n\r\nand\rCR",
    "☃ ⁂ \U0001d518\U0001d52b \U0010ffff",
    "NUL\x00inside",
    "",
    " ",
]
# U+2581 is how SentencePiece writes a space: see the test that says what becomes of one.
random_text = st.text(
    st.one_of(
        st.sampled_from(" the\n.😀語é\r\x00"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"),
    ),
    max_size=30,
)


def stream(tokenizer: Tokenizer, token_ids: list[int], **options: object) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    deltas = [detokenizer.push(token_id).text for token_id in token_ids]
    return [*deltas, detokenizer.finish().text]


@families
@pytest.mark.parametrize("text", HARD_TEXTS, ids=ascii)
def test_hard_texts_come_back_whole_and_in_a_stream(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(tokenizer, ids)

    assert tokenizer.decode(ids) == text
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_sign_for_a_space_reads_back_as_a_space_in_sentencepiece_and_as_itself_elsewhere(name):
    tokenizer = TOKENIZERS[name]
    sign = "\u2581" if name == "byte-level" else " "

    for text in ("\u2581", "a\u2581b", "\u2581\u2581 c\u2581"):
        ids = tokenizer.encode(text, add_special_tokens=False)

        assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == text.replace("\u2581", sign)
        assert ids == tokenizer.encode(text.replace("\u2581", sign), add_special_tokens=False)


@families
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_as_they_decode(tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))

    deltas = stream(tokenizer, ids, skip_special_tokens=skip)

    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@families
@given(prompt=random_text, answer=random_text)
def test_prompt_and_answer_read_on_as_one_text(tokenizer, prompt, answer):
    """The answer's first word keeps its space after a prompt, and loses it after nothing but BOS."""
    prompt_ids = tokenizer.encode(prompt)
    answer_ids = tokenizer.encode(answer, add_special_tokens=False)

    text = "".join(stream(tokenizer, answer_ids, prompt_token_ids=prompt_ids))

    assert prompt + text == tokenizer.decode(prompt_ids + answer_ids)
    assert text == (" " if prompt and answer and tokenizer.strips_leading_space else "") + answer


@families
@given(text=random_text)
def test_bytes_of_the_tokens_join_to_the_utf8_form_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    data = b""
    for token_id in ids:
        data += detokenizer.bytes_of(token_id)
        detokenizer.push(token_id)

    assert data == text.encode("utf-8")
    space = b" " if tokenizer.strips_leading_space and text else b""
    assert b"".join(map(tokenizer.token_bytes, ids)) == space + data


@families
@pytest.mark.parametrize(
    "text", ["a\ud800", "\udfff", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16") + "\ud83d"]
)
def test_half_a_surrogate_pair_is_refused_by_place(tokenizer, text):
    with pytest.raises(
        InvalidParameterError, match=r"prompt: half a surrogate pair \(U\+D[0-9A-F]{3}\) at character [01]"
    ):
        tokenizer.encode(text)


@families
@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40, True, "1", 1.0])
def test_what_is_no_id_is_refused(tokenizer, token_id):
    for use in (lambda: tokenizer.decode([token_id]), lambda: tokenizer.check_ids([0, token_id])):
        with pytest.raises(InvalidParameterError) as caught:
            use()
        assert caught.value.param in {"token_id", "prompt_token_ids"}
        if type(token_id) is int:
            assert f"token id {token_id} " in str(caught.value)
            assert f"vocab_size is {tokenizer.vocab_size:,}" in str(caught.value)


@families
def test_text_of_the_wrong_type_is_refused(tokenizer):
    with pytest.raises(InvalidParameterError, match="bytes is not text"):
        tokenizer.encode(b"abc")


@families
@pytest.mark.parametrize("unit", ["word ", "a", "語", " ", "\n", "\x00", "<s>"], ids=ascii)
def test_a_text_of_a_hundred_thousand_characters_comes_back(tokenizer, unit):
    text = (unit * 100_000)[:100_000]

    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    assert tokenizer.decode(ids) == text


@families
def test_threads_share_a_tokenizer(tokenizer):
    """Half of them read control tokens as text, which must not turn the others' into text."""
    texts = [f"{text}</s><|end|>" for text in HARD_TEXTS] * 20
    expected = [[tokenizer.encode(text, parse_special=parse) for parse in (True, False)] for text in texts]
    assert expected[0][0] != expected[0][1]

    with ThreadPoolExecutor(8) as pool:
        for parse in (True, False):
            found = pool.map(lambda text, parse=parse: tokenizer.encode(text, parse_special=parse), texts)
            assert list(found) == [pair[not parse] for pair in expected]
