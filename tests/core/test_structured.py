"""What counts as structured output, and what it contradicts; refused where it is written down."""

from __future__ import annotations

import json
import pickle

import pytest

from octavo.core.sampling import SamplingParams
from octavo.core.structured import MAX_SCHEMA_DEPTH, MAX_STRUCTURE_CHARACTERS, StructuredOutput
from octavo.errors import InvalidParameterError

DIGITS = StructuredOutput(kind="regex", value="[0-9]+")


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("xml", "", "kinds: json_object"),
        ("json_object", "{}", "takes no value"),
        ("json_schema", "", "needs a value"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[]", "an object"),
        ("json_schema", "[" * 100_000, "not JSON"),
        ("json_schema", json.dumps(nested(MAX_SCHEMA_DEPTH)), "deep"),
        ("json_schema", json.dumps({"enum": [1, 2**53 + 1]}), "9,007,199,254,740,992"),
        ("json_schema", json.dumps({"items": [{"const": -(2**60)}]}), "not kept exactly"),
        ("regex", "", "needs a value"),
        ("regex", "a" * (MAX_STRUCTURE_CHARACTERS + 1), "131,073 characters, at most 131,072"),
        ("regex", 5, "int is not text"),
        ("choice", "[]", "at least one"),
        ("choice", '["a", ""]', "non-empty"),
        ("choice", '{"a": 1}', "list"),
        ("choice", json.dumps([str(i) for i in range(10_001)]), "10,001 choices"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_of_its_kind_is_refused(kind, value, said) -> None:
    with pytest.raises(InvalidParameterError, match=said) as caught:
        StructuredOutput(kind=kind, value=value)

    assert caught.value.param == "structured"


def test_a_schema_can_be_a_mapping_or_its_text() -> None:
    schema = {"type": "string", "maxLength": 2**63, "default": 2**63}

    made = StructuredOutput.of_json_schema(schema)

    assert made == StructuredOutput.of_json_schema(json.dumps(schema))
    assert json.loads(made.value) == schema


@pytest.mark.parametrize("schema", [{"const": {1, 2}}, {"const": b"x"}, nested(MAX_SCHEMA_DEPTH + 5)], ids=str)
def test_a_mapping_that_is_no_json_is_refused(schema) -> None:
    with pytest.raises(InvalidParameterError, match="schema"):
        StructuredOutput.of_json_schema(schema)


def test_choices_come_back_as_they_were_given() -> None:
    choices = ("a", 'b"', "é\n")

    assert StructuredOutput.of_choice(choices).choices == choices
    with pytest.raises(InvalidParameterError, match="not a list"):
        StructuredOutput.of_choice("abc")


def test_params_with_structured_output_are_hashable_and_picklable() -> None:
    params = SamplingParams(structured=DIGITS)

    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) != hash(SamplingParams())


@pytest.mark.parametrize("contradiction", [{"ignore_eos": True}, {"min_tokens": 3, "max_tokens": 9}], ids=str)
def test_what_would_keep_a_complete_text_from_ending_is_refused(contradiction) -> None:
    with pytest.raises(InvalidParameterError, match="contradicts structured output") as caught:
        SamplingParams(structured=DIGITS, **contradiction)

    assert caught.value.param == next(iter(contradiction))
    SamplingParams(**contradiction)


def test_something_else_is_no_structured_output() -> None:
    with pytest.raises(InvalidParameterError, match="dict is no StructuredOutput"):
        SamplingParams(structured={"type": "object"})
