"""StructuredOutput: what the text of an answer has to be.

Only the caller's words are kept here, and checked as far as the standard library can; whoever implements
`ports.GrammarCompiler` turns them into a grammar over the model's tokens, and has the last word on what it can follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.errors import InvalidParameterError

StructureKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

MAX_STRUCTURE_CHARACTERS = 1 << 17
MAX_SCHEMA_DEPTH = 64
MAX_STRUCTURE_CHOICES = 10_000
MAX_EXACT_INTEGER = 2**53

_PARAM = "structured"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    r"""What the text of an answer has to be. Hashable and picklable; the `of_` constructors take Python values.

    Args:
        kind: `json_object`: any JSON object. `json_schema`: JSON that a schema accepts. `regex`: a text that the whole
            expression matches (no look-around; `\d` is 0 to 9). `choice`: one of several texts. `grammar`: a text of a
            Lark grammar with a rule `start`.
        value: The schema as JSON, the expression, the texts as a JSON array, or the grammar; empty for `json_object`.

    Raises:
        InvalidParameterError: the value is not of its kind, or too large.
    """

    kind: StructureKind
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            raise InvalidParameterError(
                f"kind {self.kind!r} is not known",
                param=_PARAM,
                hints=(f"kinds: {', '.join(get_args(StructureKind))}",),
            )
        if not isinstance(self.value, str):
            raise InvalidParameterError(f"{type(self.value).__name__} is not text", param=_PARAM)
        if len(self.value) > MAX_STRUCTURE_CHARACTERS:
            raise InvalidParameterError(
                f"the {self.kind} has {len(self.value):,} characters, at most {MAX_STRUCTURE_CHARACTERS:,} are read",
                param=_PARAM,
            )
        if (self.kind == "json_object") != (self.value == ""):
            raise InvalidParameterError(
                f"{self.kind} {'takes no' if self.kind == 'json_object' else 'needs a'} value", param=_PARAM
            )
        if self.kind == "json_schema":
            _check_schema(_read_json(self.value))
        if self.kind == "choice":
            _check_choices(_read_json(self.value))

    @classmethod
    def of_json_schema(cls, schema: Mapping[str, Any] | str) -> StructuredOutput:
        """Return JSON that `schema` accepts; a text is read as JSON."""
        if isinstance(schema, str):
            return cls(kind="json_schema", value=schema)
        _check_depth(schema)
        try:
            return cls(kind="json_schema", value=json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(f"the schema is not JSON: {error}", param=_PARAM) from error

    @classmethod
    def of_choice(cls, choices: Sequence[str]) -> StructuredOutput:
        """Return one of several texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise InvalidParameterError(f"{type(choices).__name__} is not a list of texts", param=_PARAM)
        _check_choices(list(choices))
        return cls(kind="choice", value=json.dumps(list(choices)))

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of a `choice`."""
        assert self.kind == "choice"
        return tuple(json.loads(self.value))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"the value is not JSON: {error}", param=_PARAM) from error


def _check_schema(schema: object) -> None:
    if not isinstance(schema, dict | bool):
        raise InvalidParameterError("a JSON schema is an object, or true", param=_PARAM)
    _check_depth(schema)
    _check_values(schema)


def _check_values(schema: object) -> None:
    """Refuse whole numbers that an answer could not be held to: grammars are made with 64-bit floats."""
    if isinstance(schema, list):
        for child in schema:
            _check_values(child)
    if not isinstance(schema, dict):
        return
    for name, child in schema.items():
        values = child if name == "enum" and isinstance(child, list) else [child] if name == "const" else []
        for value in values:
            if type(value) is int and abs(value) > MAX_EXACT_INTEGER:
                raise InvalidParameterError(
                    f"{name} holds {value}",
                    param=_PARAM,
                    because=f"whole numbers beyond {MAX_EXACT_INTEGER:,} are not kept exactly",
                    hints=("write it as a string",),
                )
        _check_values(child)


def _check_depth(schema: object) -> None:
    """Refuse a schema that only a deep stack could read."""
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, Mapping | list | tuple)
            for child in (value.values() if isinstance(value, Mapping) else value)
        ]
        if not level:
            return
        if len(level) > MAX_STRUCTURE_CHARACTERS:
            raise InvalidParameterError("the schema is too large", param=_PARAM)
    raise InvalidParameterError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep", param=_PARAM)


def _check_choices(choices: object) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidParameterError("choices are a list of at least one non-empty text", param=_PARAM)
    if len(choices) > MAX_STRUCTURE_CHOICES:
        raise InvalidParameterError(
            f"{len(choices):,} choices, at most {MAX_STRUCTURE_CHOICES:,} are read", param=_PARAM
        )
