"""Lengths of requests: how they are asked, read from traces, and what they hold on average."""

from __future__ import annotations

import json
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError, MachineError
from octavo.planner.lengths import LengthClass, Lengths, parse_lengths, read_trace


def test_one_pair_and_several_with_weights_are_read():
    assert parse_lengths("1155:211").classes == (LengthClass(1155, 211),)
    several = parse_lengths("500:100x3, 8k:500")
    assert several.classes == (LengthClass(500, 100, 3), LengthClass(8192, 500))
    assert several.num_requests == 4
    assert several.mean_prompt_tokens == (3 * 500 + 8192) / 4
    assert several.quantile_tokens(0.5) == 600
    assert several.quantile_tokens(0.99) == 8692


@pytest.mark.parametrize("text", ["", "1155", "1155:", ":211", "0:5", "5:0", "a:b", "5:5x0", "1:2:3", "-5:5", "5:5,"])
def test_other_words_are_refused_with_an_example(text):
    with pytest.raises(InvalidParameterError) as caught:
        parse_lengths(text)
    assert "--lengths" in str(caught.value)


@given(
    classes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 4)), min_size=1, max_size=5),
    step=st.integers(2, 40),
)
def test_the_mean_is_the_plain_sum_over_all_steps_of_all_answers(classes, step):
    lengths = Lengths(classes=tuple(LengthClass(*each) for each in classes), source="drawn")

    def held(num_tokens: int) -> float:
        return min(ceil(num_tokens / step), 7) ** 2  # changes at multiples of the step only

    steps = [
        held(prompt + token)
        for prompt, output, weight in classes
        for token in range(1, output + 1)
        for _ in range(weight)
    ]
    assert lengths.mean_held(held, step=step) == pytest.approx(sum(steps) / len(steps))


def test_tokens_that_count_one_by_one_are_summed_exactly():
    lengths = parse_lengths("1155:211,3:200x2")
    steps = [1155 + token for token in range(1, 212)] + 2 * [3 + token for token in range(1, 201)]
    assert lengths.mean_held(float, step=1) == pytest.approx(sum(steps) / len(steps))


def test_made_up_lengths_cost_no_more_than_real_ones():
    calls = []

    def held(num_tokens: int) -> float:
        calls.append(num_tokens)
        return num_tokens / 16

    lengths = parse_lengths("1000000000:1000000000")
    assert lengths.mean_held(held, step=16) == pytest.approx(1.5e9 / 16, rel=1e-3)
    assert len(calls) < 200_000


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04.03,3180,8\n"
MOONCAKE = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
SIMULATED = '{"input_toks": 27369, "output_toks": 1626, "arrival_time_ns": 101537000}\n\n'
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n"
WORKLOAD = json.dumps([{"prompt_token_ids": [1, 2, 3], "max_tokens": 5}, {"prompt_token_ids": [1], "max_tokens": 5}])


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        (AZURE, [(4808, 10), (3180, 8)]),
        (MOONCAKE * 3, [(6758, 500)]),
        (SIMULATED, [(27369, 1626)]),
        (VIDUR, [(3772, 54)]),
        (WORKLOAD, [(3, 5), (1, 5)]),
    ],
)
def test_published_traces_are_read_as_they_are(tmp_path, text, classes):
    (tmp_path / "trace").write_text(text)
    lengths = read_trace(tmp_path / "trace")
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in lengths.classes] == classes
    assert "trace" in lengths.source


def test_marks_of_a_spreadsheet_and_whole_numbers_with_a_point_are_read(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbfContextTokens,GeneratedTokens\r\n10,5.0\r\n")
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in read_trace(path).classes] == [(10, 5)]
    path.write_text('{"input_length": 1e3, "output_length": 5.0}\n')
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in read_trace(path).classes] == [(1000, 5)]


def test_parts_of_a_token_and_cells_without_an_end_are_refused(tmp_path):
    path = tmp_path / "trace"
    for text in ("10.7,5", "nan,5", "inf,5", "1,-5", '"' + "x" * 200_000):
        path.write_text(f"ContextTokens,GeneratedTokens\n{text}\n")
        with pytest.raises(InvalidParameterError):
            read_trace(path)


def test_a_file_without_lengths_is_refused_with_the_columns_that_are_known(tmp_path):
    path = tmp_path / "trace"
    for text in ("a,b\n1,2\n", '{"a": 1}\n', "{nonsense", "", "ContextTokens,GeneratedTokens\n5,0\n", "\0"):
        path.write_text(text)
        with pytest.raises(InvalidParameterError):
            read_trace(path)
    with pytest.raises(MachineError, match="No such file"):
        read_trace(tmp_path / "absent")
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidParameterError):
        read_trace(path)


def test_requests_beyond_a_limit_are_left_out():
    lengths = parse_lengths("100:10x9,1000:10")
    kept = lengths.up_to(500)
    assert kept is not None
    assert kept.num_requests == 9
    assert lengths.up_to(50) is None
