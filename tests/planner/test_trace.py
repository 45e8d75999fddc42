"""Traces of requests: what is read, and what is refused with the entry and the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import InvalidParameterError, MachineError
from octavo.planner.trace import read_trace

COLUMNS = "ContextTokens,GeneratedTokens"
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


def classes_of(path: Path, text: str) -> list[tuple[int, int]]:
    path.write_text(text, encoding="utf-8")
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in read_trace(path).classes]


def test_text_between_the_lengths_may_hold_any_character(tmp_path):
    path = tmp_path / "trace"
    line = json.dumps({"prompt": "a\u2028b\x0cc", "input_length": 5, "output_length": 6}, ensure_ascii=False)
    assert classes_of(path, f"{line}\n{line}\n") == [(5, 6)]
    assert classes_of(path, f'text,{COLUMNS}\n"a\nb, ""c""\u2028",5,6\n') == [(5, 6)]
    assert classes_of(path, "TIMESTAMP, ContextTokens, GeneratedTokens\n2023, 5, 6\n") == [(5, 6)]


def test_requests_without_an_answer_are_left_out_and_said_to_be(tmp_path):
    path = tmp_path / "trace"
    assert classes_of(path, f"{COLUMNS}\n5,0\n7,1\n6,0\n") == [(7, 1)]
    assert read_trace(path).source == "3 requests of trace, 2 of them without an output token and left out"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"input_length": 5, "output_length": 6}\n[1]\n',
            "entry 2 has no lengths\n  because it is [1], and no object",
        ),
        ('[{"prompt_token_ids": [1], "max_tokens": 3}, 7]', "entry 2 has no lengths\n  because it is 7"),
        ('[{"prompt_token_ids": [1], "max_tokens": null}]', "max_tokens is None"),
        (f"{COLUMNS}\n5,6\n-5,6\n", "entry 2 has no lengths\n  because ContextTokens is '-5'"),
        (f'{COLUMNS}\n"1,024",6\n', "ContextTokens is '1,024'"),
        (f"{COLUMNS}\n5\n", "GeneratedTokens is None"),
        ("contexttokens,generatedtokens\n5,6\n", "has no columns of lengths\n  because its first line names 'contextt"),
        ("ContextTokens;GeneratedTokens\n5;6\n", "first line names 'ContextTokens;GeneratedTokens'; known columns"),
        ("hello world\n", "first line names 'hello world'"),
        ("ContextTokens,ContextTokens,GeneratedTokens\n5,6,7\n", "has the column ContextTokens twice"),
        ('{"input_length": 5, "output_length": 6}\n\n{bad\n', "neither CSV nor JSON lines in line 3"),
        ('[{"input_length": 5', "neither CSV nor JSON lines: "),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_place(tmp_path, text, words):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(InvalidParameterError) as caught:
        read_trace(tmp_path / "trace")
    assert words in str(caught.value)
