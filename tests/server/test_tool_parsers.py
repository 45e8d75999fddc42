"""Calls in the text of an answer: however it is cut, wherever it ends, nothing is lost and nothing made up."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.errors import InvalidParameterError
from octavo.server.tool_parsers.deltas import ArgumentsDelta, ContentDelta, ToolCallStart, ToolDelta
from octavo.server.tool_parsers.describe import describe_tools
from octavo.server.tool_parsers.formats import CALL_FORMATS, detect_tool_format, make_tool_parser
from octavo.server.tool_parsers.grammar import tool_grammar
from octavo.testing.tiny_models import TinyModel, write_hf_model

FORMATS = sorted(CALL_FORMATS)


@dataclass
class Answer:
    """What a client has put together."""

    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    reason: str = ""

    def take(self, deltas: Sequence[ToolDelta]) -> None:
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    assert text
                    self.content += text
                case ToolCallStart(index, name):
                    assert index == len(self.names)
                    self.names.append(name)
                    self.arguments.append("")
                case ArgumentsDelta(index, text):
                    assert text and index == len(self.names) - 1
                    self.arguments[index] += text


def read(form: str, pieces: Sequence[str], reason: str = "stop", names: Sequence[str] | None = None) -> Answer:
    parser, answer = make_tool_parser(form, names), Answer()
    for piece in pieces:
        answer.take(parser.push(piece))
    end = parser.finish(reason)
    answer.take(end.deltas)
    answer.reason = end.finish_reason
    return answer


def write(form: str, name: str, arguments: Any, **dumps: Any) -> str:
    if form == "hermes":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, **dumps)}\n</tool_call>"
    return json.dumps({"name": name, "parameters": arguments}, **dumps)


# --- what is a call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_is_its_name_and_its_arguments_as_written(form: str) -> None:
    answer = read(form, [write(form, "get_weather", {"city": "Paris", "days": [1, 2]}, indent=2)])

    assert answer.names == ["get_weather"] and answer.content == ""
    assert json.loads(answer.arguments[0]) == {"city": "Paris", "days": [1, 2]}
    assert answer.arguments[0].startswith('{\n    "city"'), "spacing stays the model's own"
    assert answer.reason == "tool_calls"


def test_content_comes_before_calls_and_the_white_space_between_is_dropped() -> None:
    calls = "\n".join(write("hermes", name, {}) for name in ("f", "g"))

    answer = read("hermes", [f"Let me look.\n\n{calls}\n"])

    assert (answer.content, answer.names, answer.reason) == ("Let me look.", ["f", "g"], "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}};{"type": "function", "name": "g", "parameters": null}',
        ' {"type": "function", "name": "f", "parameters": {"a": 1}}\n<|python_tag|>{"name": "g", "arguments": {}}',
    ],
)
def test_llama_writes_several_calls_with_and_without_its_tag(text: str) -> None:
    answer = read("llama3_json", [text])

    assert (answer.content, answer.names, answer.arguments) == ("", ["f", "g"], ['{"a": 1}', "{}"])
    assert answer.reason == "tool_calls"


def test_arguments_may_come_first_or_as_a_text_or_not_at_all() -> None:
    first = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    as_text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    none = '<tool_call>{"name": "f"}</tool_call>'

    assert [read("hermes", [text]).arguments for text in (first, as_text, none)] == [['{"a": 1}'], ['{"a": 1}'], ["{}"]]


def test_tags_and_braces_within_arguments_are_arguments() -> None:
    arguments = {"text": '</tool_call> <tool_call>{"name": "g", "arguments": {}} }} \\" {'}

    answer = read("hermes", [write("hermes", "f", arguments)])

    assert answer.names == ["f"] and json.loads(answer.arguments[0]) == arguments


def test_a_call_without_its_closing_tag_is_complete_once_its_object_is() -> None:
    assert read("hermes", ['<tool_call>\n{"name": "f", "arguments": {}}']).reason == "tool_calls"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "no call at all"),
        ("hermes", " \n"),
        ("hermes", "a <b and <tool_ and <tool_call"),
        ("hermes", "<tool_call>\n"),
        ("hermes", "text\n<tool_call> not JSON </tool_call>\n"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1,}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"na\nme": "f"}</tool_call>'),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"a": [1, {"name": "f", "parameters": {}}]}'),
        ("llama3_json", "{not JSON} ; {}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", 'Here: {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python"),
        ("llama3_json", ""),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(form: str, text: str) -> None:
    answer = read(form, [text])

    assert (answer.content, answer.names, answer.reason) == (text, [], "stop")


@pytest.mark.parametrize("form", FORMATS)
def test_a_function_that_was_not_offered_is_no_call(form: str) -> None:
    text = write(form, "rm_rf", {"path": "/"})

    assert read(form, [text], names=["ls"]).content == text
    assert read(form, [text], names=["rm_rf"]).names == ["rm_rf"]


def test_text_behind_a_call_is_content_with_its_space() -> None:
    answer = read("hermes", [write("hermes", "f", {}) + "\n\nDone. "])

    assert (answer.content, answer.names, answer.reason) == ("\n\nDone. ", ["f"], "tool_calls")
    assert read("llama3_json", ['{"name": "f", "parameters": {}} ; done']).content == " ; done"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1} and so on',
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "x": }</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}</tool_call>",
    ],
    ids=lambda text: text[30:60],
)
def test_a_call_that_went_wrong_is_not_announced_as_one(text: str) -> None:
    answer = read("hermes", [text])

    assert answer.names == ["f"] and answer.reason == "stop"


# --- however it is cut ------------------------------------------------------------------------------------------------

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text('ab"\\{}[],:<> é\n', max_size=8)),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text('a"\\}', max_size=3), children, max_size=3)
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.text("abc", max_size=3), values, max_size=3)
calls = st.tuples(st.sampled_from(["f", "get_x", "name"]), objects, st.sampled_from([None, 1]))
noise = st.text('<tool_call>{}/";|python_ \n', max_size=12)
fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f"', '"arguments": {', '"parameters": {', "}", "{",
        ",", ";", " ", "\n", '"', "\\", '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {}}', "text",
    ]
)  # fmt: skip


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.one_of(fragments, noise), max_size=12), cuts=st.lists(st.integers(0, 10_000), max_size=30))
@example(parts=['<tool_call>{"name": "f", "arguments": {"a":1,}}'], cuts=[36])
def test_any_cut_of_any_text_reads_the_same(form: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = read(form, [text])

    assert read(form, pieces_of(text, cuts)) == whole
    assert read(form, list(text)) == whole
    if whole.reason == "tool_calls":
        assert all(isinstance(json.loads(arguments), dict) for arguments in whole.arguments)
    if not whole.names:
        assert whole.content == text


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    content=st.text("abc <é", max_size=10),
    written=st.lists(calls, min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_calls_come_back_as_they_were_written(
    form: str, content: str, written: list[tuple[str, dict, int | None]], cuts: list[int]
) -> None:
    if form == "llama3_json":
        content = ""
    text = content + "; \n"[form == "hermes" :].join(write(form, name, a, indent=indent) for name, a, indent in written)

    answer = read(form, pieces_of(text, cuts))

    assert answer.content == content.rstrip()
    assert answer.names == [name for name, _, _ in written]
    assert [json.loads(arguments) for arguments in answer.arguments] == [a for _, a, _ in written]
    assert answer.reason == "tool_calls"


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_cut_by_the_limit_at_any_place_says_length_streamed_or_not(form: str) -> None:
    text = write(form, "get_weather", {"city": "Paris", "deep": {"a": [1, "}"]}})
    whole = read(form, [text])
    assert whole.reason == "tool_calls"

    for stop in range(len(text) + 1):
        cut = read(form, [text[:stop]], reason="length")
        streamed = read(form, list(text[:stop]), reason="length")
        ended = read(form, [text[:stop]], reason="stop")
        assert streamed == cut and cut.reason == "length"
        assert (ended.content, ended.names, ended.arguments) == (cut.content, cut.names, cut.arguments)
        if ended.reason == "tool_calls":
            assert ended.arguments == whole.arguments
        if cut.names:
            assert whole.arguments[0].startswith(cut.arguments[0]) and cut.content == ""
        else:
            assert cut.content == text[:stop], "what did not become a call is shown as it was"


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_another_end_than_the_models_own_stays(reason: str) -> None:
    assert read("hermes", [write("hermes", "f", {})], reason=reason).reason == reason


def test_arguments_go_out_while_they_grow() -> None:
    parser = make_tool_parser("hermes")
    parser.push('<tool_call>{"name": "f", "arguments": {"a')

    assert parser.push("bc") == [ArgumentsDelta(0, "bc")]


def test_reading_takes_time_in_proportion_to_the_text() -> None:
    """Nested beginnings of calls are not read again for each of them: counted in characters read, not in seconds."""
    from octavo.server.tool_parsers import envelope

    text = '<tool_call>{"a":"' * 3000
    num_read = 0
    push = envelope.CallEnvelope.push

    def counting(self, piece):
        nonlocal num_read
        taken, deltas = push(self, piece)
        num_read += taken
        return taken, deltas

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope.CallEnvelope, "push", counting)
        assert read("hermes", [text]).content == text
    assert num_read <= len(text)


# --- required calls ---------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_light",
            "parameters": {
                "type": "object",
                "properties": {"room": {"$ref": "#/$defs/Room"}, "on": {"type": "boolean"}},
                "required": ["room", "on"],
                "additionalProperties": False,
                "$defs": {"Room": {"enum": ["hall", "attic"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_hf_model(TinyModel(vocab_size=512, num_layers=1), tmp_path_factory.mktemp("tiny") / "model")
    return LLM(str(folder), max_model_len=640, num_blocks=400, threads=1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("named", [None, "set_light", "stop"])
def test_a_random_model_that_must_call_does(llm: LLM, form: str, named: str | None) -> None:
    names = [tool["function"]["name"] for tool in TOOLS]
    structured = tool_grammar(form, TOOLS, named=named, is_parallel=False)
    params = SamplingParams(structured=structured, n=24, seed=50, temperature=100.0, max_tokens=300)

    answers = [read(form, list(one.text), one.finish_reason, names) for one in llm.generate("x", params)[0].outputs]

    for answer in answers:
        assert answer.content == "" or answer.reason == "length"
        if answer.reason != "length":
            assert answer.reason == "tool_calls" and len(answer.names) == 1
            assert answer.names[0] in ([named] if named else names)
            arguments = json.loads(answer.arguments[0])
            if answer.names[0] == "stop":
                assert arguments == {}
            else:
                assert arguments["room"] in ("hall", "attic") and isinstance(arguments["on"], bool)
    assert sum(answer.reason == "tool_calls" for answer in answers) >= 12
    if named is None:
        assert len({answer.names[0] for answer in answers if answer.names}) == 2


def test_several_calls_only_where_they_are_wanted(llm: LLM) -> None:
    params = {"n": 12, "seed": 1, "temperature": 5.0, "max_tokens": 600}
    tools = TOOLS[1:]

    several, single = (
        llm.generate("x", SamplingParams(structured=tool_grammar("hermes", tools, is_parallel=many), **params))[0]
        for many in (True, False)
    )

    assert max(len(read("hermes", [one.text]).names) for one in several.outputs) > 1
    assert {len(read("hermes", [one.text]).names) for one in single.outputs} == {1}


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="'g' is not among the tools"):
        tool_grammar("hermes", TOOLS, named="g")
    with pytest.raises(InvalidParameterError, match="no tools"):
        tool_grammar("hermes", [])
    with pytest.raises(InvalidParameterError, match="not a schema of an object"):
        tool_grammar("hermes", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}])
    with pytest.raises(InvalidParameterError, match="formats: hermes, llama3_json"):
        make_tool_parser("pythonic")


# --- which format, and models that know of none -----------------------------------------------------------------------


def test_the_format_is_the_one_that_the_template_teaches() -> None:
    qwen = "{% if tools %}within <tool_call></tool_call>{% endif %}{{ message.tool_calls }}"
    llama = """{% if tools %}Respond in the format {"name": function name, "parameters": ...}{% endif %}"""

    assert [detect_tool_format(one) for one in (qwen, llama, "<|python_tag|>", None)] == [
        "hermes", "llama3_json", "llama3_json", "hermes",
    ]  # fmt: skip


def test_tools_are_told_in_the_system_message_of_a_chat_whose_template_drops_them() -> None:
    call = {"type": "function", "function": {"name": "stop", "arguments": {"a": "é"}}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Stop!"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "stopped", "tool_call_id": "1"},
    ]

    told = describe_tools(chat, TOOLS)

    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be kind.\n\n")
    lines = re.search("<tools>\n(.*)\n</tools>", told[0]["content"], re.DOTALL)
    assert lines is not None and [json.loads(line) for line in lines[1].split("\n")] == TOOLS
    assert read("hermes", [told[2]["content"]]).names == ["stop"]
    assert "stopped" in told[3]["content"] and "tool_calls" not in told[2]
    assert chat[0]["content"] == "Be kind.", "the caller's chat is left alone"
    assert describe_tools(chat[1:2], TOOLS)[0]["role"] == "system"
