from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.detokenize import Detokenizer

SMILE = "😀".encode()


@dataclass(frozen=True)
class Tokens:
    """A tokenizer that is nothing but a table of bytes."""

    table: Sequence[bytes]
    special: Collection[int] = ()
    strips_leading_space: bool = False

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        visible = [i for i in token_ids if not (skip_special_tokens and i in self.special)]
        data = b"".join(self.table[i] for i in visible)
        if self.strips_leading_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", errors="replace")


# Pieces of characters of every length, bytes that start nothing, overlong and surrogate forms, spaces, whole words.
FRAGMENTS = [bytes([b]) for b in (0x00, 0x20, 0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0)]
FRAGMENTS += [b"\x9f", b"\x98\x80", b"\xf4\x90", b"\xff", SMILE, "é".encode(), b" the", b"  ", b"<end>", b"\r\n", b""]
SPECIAL = {FRAGMENTS.index(b"<end>"), FRAGMENTS.index(b" the")}
id_lists = st.lists(st.integers(0, len(FRAGMENTS) - 1), max_size=30)
tokenizers = st.builds(
    Tokens,
    table=st.just(FRAGMENTS),
    special=st.sampled_from([frozenset(), frozenset(SPECIAL)]),
    strips_leading_space=st.booleans(),
)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    deltas = [detokenizer.push(token_id).text for token_id in token_ids]
    return [*deltas, detokenizer.finish().text]


@given(tokenizer=tokenizers, token_ids=id_lists, skip=st.booleans())
def test_deltas_join_to_what_all_ids_decode_to(tokenizer, token_ids, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)

    deltas = stream(detokenizer, token_ids)

    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.text == "".join(deltas)


@given(tokenizer=tokenizers, prompt=id_lists, token_ids=id_lists, skip=st.booleans())
def test_prompt_and_answer_join_to_what_both_decode_to(tokenizer, prompt, token_ids, skip):
    # A prompt of half a character belongs to no text; an answer does not complete it.
    prompt = [*prompt, FRAGMENTS.index(b"\x41")] if prompt else []
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt)

    answer = "".join(stream(detokenizer, token_ids))

    whole = tokenizer.decode(prompt + token_ids, skip_special_tokens=skip)
    assert tokenizer.decode(prompt, skip_special_tokens=skip) + answer == whole


@given(tokenizer=tokenizers, token_ids=id_lists, skip=st.booleans())
def test_no_delta_breaks_a_character(tokenizer, token_ids, skip):
    """Text so far is always a beginning of the final text: nothing sent is taken back."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    final = tokenizer.decode(token_ids, skip_special_tokens=skip)

    for token_id in token_ids:
        detokenizer.push(token_id).text.encode("utf-8")  # would fail on half a surrogate pair

        assert final.startswith(detokenizer.text)


@given(
    tokenizer=tokenizers,
    token_ids=id_lists,
    stops=st.lists(st.sampled_from(["A", "é", "\ufffd", "\ufffdA", "  ", "A\r", "😀😀", "the", "\r\n"]), max_size=3),
    include_stop=st.booleans(),
)
def test_stop_strings_cut_the_text_where_they_would_cut_the_whole(tokenizer, token_ids, stops, include_stop):
    detokenizer = Detokenizer(tokenizer, stop=tuple(stops), include_stop=include_stop)
    out, stopped_by = "", None
    for token_id in token_ids:
        delta = detokenizer.push(token_id)
        out, stopped_by = out + delta.text, delta.stopped_by
        if stopped_by is not None:
            break
    rest = detokenizer.finish()
    out, stopped_by = out + rest.text, stopped_by or rest.stopped_by

    whole = tokenizer.decode(token_ids)
    found = min(((whole.find(stop), len(stop), stop) for stop in stops if stop in whole), default=None)
    if found is None:
        assert (out, stopped_by) == (whole, None)
    else:
        start, length, stop = found
        assert (out, stopped_by) == (whole[: start + length if include_stop else start], stop)


@given(tokenizer=tokenizers, token_ids=id_lists, skip=st.booleans())
def test_bytes_of_the_tokens_join_to_the_text(tokenizer, token_ids, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    data = b""
    for token_id in token_ids:
        data += detokenizer.bytes_of(token_id)
        detokenizer.push(token_id)
    detokenizer.finish()

    assert data.decode("utf-8", errors="replace") == detokenizer.text


def test_a_character_comes_out_with_its_last_byte():
    detokenizer = Detokenizer(Tokens([bytes([byte]) for byte in SMILE]))

    assert [detokenizer.push(i).text for i in range(4)] == ["", "", "", "😀"]


def test_half_a_character_at_the_end_is_one_replacement_character():
    detokenizer = Detokenizer(Tokens([b"a", SMILE[:3]]))

    assert [detokenizer.push(i).text for i in range(2)] == ["a", ""]
    assert detokenizer.finish().text == "\ufffd"


def test_only_bad_bytes_become_replacement_characters():
    tokens = Tokens(["é".encode(), b"\xff", "日".encode()[:2], b"x"])
    detokenizer = Detokenizer(tokens)

    assert stream(detokenizer, [0, 1, 0, 2, 3]) == ["é", "\ufffd", "é", "", "\ufffdx", ""]


def test_skipped_special_tokens_do_not_split_a_character():
    tokens = Tokens([SMILE[:2], b"<end>", SMILE[2:]], special={1})

    assert stream(Detokenizer(tokens), [0, 1, 2]) == ["", "", "😀", ""]
    assert "".join(stream(Detokenizer(tokens, skip_special_tokens=False), [0, 1, 2])) == "\ufffd<end>\ufffd\ufffd"


def test_only_one_leading_space_is_taken_and_only_from_the_start_of_a_text():
    tokens = Tokens([b" ", b" you", b"<s>"], special={2}, strips_leading_space=True)

    assert stream(Detokenizer(tokens), [2, 1, 1]) == ["", "you", " you", ""]
    assert stream(Detokenizer(tokens), [0, 1]) == ["", " you", ""]
    assert stream(Detokenizer(tokens, prompt_token_ids=[2]), [1]) == ["you", ""]
    assert stream(Detokenizer(tokens, prompt_token_ids=[2, 0]), [1]) == [" you", ""]
    assert stream(Detokenizer(tokens, skip_special_tokens=False), [2, 1]) == ["<s>", " you", ""]


def test_a_stop_string_before_min_tokens_is_ignored_and_one_that_ends_after_is_not():
    tokens = Tokens([b"x", b"##", b"#"])
    detokenizer = Detokenizer(tokens, stop=("###",))
    before = [detokenizer.push(token_id, may_stop=False) for token_id in (1, 2, 0, 1)]
    after = detokenizer.push(2)

    assert [delta.stopped_by for delta in before] == [None] * 4
    assert "".join(delta.text for delta in before) + after.text == "###x"
    assert after.stopped_by == "###"


def test_the_held_tail_is_delivered_at_the_end():
    detokenizer = Detokenizer(Tokens([b"yes\n", b"\nUs"]), stop=("\n\nUser:",))

    assert [detokenizer.push(i).text for i in range(2)] == ["yes", ""]
    assert detokenizer.finish().text == "\n\nUs"


def test_finish_after_a_stop_adds_nothing():
    detokenizer = Detokenizer(Tokens([b"one.two"]), stop=(".",))
    delta = detokenizer.push(0)

    assert (delta.text, delta.stopped_by) == ("one", ".")
    assert detokenizer.finish().text == ""
    with pytest.raises(AssertionError, match="after the end"):
        detokenizer.push(0)
