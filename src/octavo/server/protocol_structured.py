"""Fields that say what the text of an answer has to be: OpenAI's `response_format`, vLLM's `guided_*` and
`structured_outputs`. They are different spellings of one thing, so at most one is given.
"""  # noqa: D205 - one sentence

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError

MAX_FIELDS = 256
Schema = dict[str, Any] | str | bool
# Lists fail fast: a body has room for a million faults, and listing them takes half a minute.


class NullsAbsent(BaseModel):
    """An object of a request in which `null` means absent and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value):,} fields; no object here has more than {MAX_FIELDS}")
        return {name: each for name, each in value.items() if each is not None}


class NamedSchema(NullsAbsent):
    """A JSON schema with a name; name, description and `strict` change nothing, a schema is always kept to."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(NullsAbsent):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(NullsAbsent):
    """vLLM's way to ask for a structure; one of them."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, fail_fast=True)
    grammar: str | None = None


class StructuredFields(NullsAbsent):
    """The spellings, as fields of a request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, fail_fast=True)
    guided_grammar: str | None = None

    def structured(self) -> StructuredOutput | None:
        """Return what the text has to be.

        Raises:
            InvalidParameterError: it is said twice, or cannot be followed; `param` is the field that says it.
        """
        asked = self._made()
        if not asked:
            return None
        if len(asked) > 1:
            raise InvalidParameterError(f"given together with {asked[1][0]}", param=asked[0][0], hints=("give one",))
        param, make = asked[0]
        try:
            return make()
        except InvalidParameterError as error:
            message = error.message.removeprefix(f"{error.param}: ")
            raise InvalidParameterError(message, param=param, because=error.because, hints=error.hints) from error

    @property
    def structured_by(self) -> str | None:
        """The field that says what the text has to be."""
        return next((param for param, _ in self._made()), None)

    def _made(self) -> list[tuple[str, Callable[[], StructuredOutput]]]:
        return [(param, make) for param, make in self._asked().items() if make is not None]

    def _asked(self) -> dict[str, Callable[[], StructuredOutput] | None]:
        asked = {f"guided_{kind}": _maker(kind, getattr(self, f"guided_{kind}")) for kind in _KINDS}
        outputs = self.structured_outputs
        if outputs is not None:
            made = {kind: _maker(kind, getattr(outputs, _FIELDS.get(kind, kind))) for kind in _KINDS}
            asked |= {f"structured_outputs.{kind}": make for kind, make in made.items()}
            if outputs.json_object:
                asked["structured_outputs.json_object"] = lambda: StructuredOutput(kind="json_object")
        asked["response_format"] = self._response_format()
        return asked

    def _response_format(self) -> Callable[[], StructuredOutput] | None:
        form = self.response_format
        if form is None:
            return None
        if form.type == "json_schema":
            if form.json_schema is None:
                raise InvalidParameterError("is missing", param="response_format.json_schema")
            return _maker("json", form.json_schema.schema_)
        if form.json_schema is not None:
            raise InvalidParameterError(f"given with type {form.type}", param="response_format.json_schema")
        return None if form.type == "text" else lambda: StructuredOutput(kind="json_object")


_KINDS = ("json", "regex", "choice", "grammar")
_FIELDS = {"json": "json_"}


def _maker(kind: str, value: Any) -> Callable[[], StructuredOutput] | None:
    if value is None:
        return None
    if kind == "choice":
        return lambda: StructuredOutput.of_choice(value)
    if kind == "json":
        if isinstance(value, bool):
            return lambda: StructuredOutput(kind="json_schema", value="true" if value else "false")
        return lambda: StructuredOutput.of_json_schema(value)
    if kind == "regex":
        return lambda: StructuredOutput(kind="regex", value=value)
    return lambda: StructuredOutput(kind="grammar", value=value)
