"""Reading JSON bodies strictly: UTF-8, finite numbers, no depth that breaks a parser; and answering it.

A large body is read and checked in a thread, or the streams of others would stand still. A thread alone would not help:
Python's own scanner holds the interpreter's lock from the first byte to the last. Where a body has many values, a
scanner written in Python reads it, slower, but the lock goes from hand to hand.
"""

from __future__ import annotations

import asyncio
import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.server.errors import ApiError, to_api_error

LARGE_BODY_BYTES = 64 * 1024
"""Read in a thread from here on; half a millisecond's work."""
MANY_VALUES = 20_000
"""Values that C reads in a millisecond, and holds the lock for it."""
MAX_CONTAINERS = 100_000
"""Lists and objects in a body; a body of brackets alone would be thirty times its size in memory."""
_BAD_JSON = "bad-json"


_SPACE = r"[ \t\n\r]*"
_WHOLE_NUMBERS = re.compile(rf"(?:{_SPACE}-?(?:0|[1-9][0-9]{{0,17}}){_SPACE},){{64,4096}}(?!{_SPACE}\])")
"""Part of a list, with the comma behind it and something more to come."""


_Scan = Callable[[str, int], tuple[Any, int]]


class _YieldingDecoder(json.JSONDecoder):
    """Reads the same as its parent, in Python but for long lists of whole numbers: those it reads in parts."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant, object_pairs_hook=_read_fields)
        self._num_containers = 0
        self.parse_array = self._read_array
        self.parse_object = self._read_object
        # json's own scanner and readers where it has no C; typeshed leaves them out
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _read_array(self, text_and_start: tuple[str, int], scan_once: _Scan) -> tuple[list[Any], int]:
        self._count()
        text, start = text_and_start
        numbers: list[Any] = []
        while (part := _WHOLE_NUMBERS.match(text, start)) is not None:
            numbers += json.loads(f"[{part[0][:-1]}]")
            start = part.end()
        rest, end = json.decoder.JSONArray((text, start), scan_once)  # type: ignore[attr-defined]
        return numbers + rest if numbers else rest, end

    def _read_object(self, text_and_start: tuple[str, int], *how: Any) -> tuple[dict[str, Any], int]:
        self._count()
        return json.decoder.JSONObject(text_and_start, *how)  # type: ignore[attr-defined,no-any-return]

    def _count(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            message = f"the body has more than {MAX_CONTAINERS:,} lists and objects"
            raise ApiError(400, message, code="too-many-values")


def read_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: 400, saying what is wrong without repeating the text: it may not even be text.
    """
    try:
        text = data.decode("utf-8")
        # Not more than one before each value; those within texts cost speed, no more.
        if data.count(b",") + data.count(b"[") + data.count(b"{") > MANY_VALUES:
            return _YieldingDecoder().decode(text)
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_read_fields)
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is not UTF-8: byte {error.start:,} starts no character", code=_BAD_JSON
        ) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep", code=_BAD_JSON) from error
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} at character {error.pos:,}"
        raise ApiError(400, message, code=_BAD_JSON) from error
    except ValueError as error:  # Python reads no whole number of more than 4,300 digits
        raise ApiError(400, "the body has a number that nothing here takes", code=_BAD_JSON) from error


def dump_json(value: Any) -> str:
    """Write a value as JSON on one line; no number in it may be infinite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dump_json_yielding(value: Any) -> str:
    """Write the same as `dump_json`, for a thread: slower, but the interpreter's lock goes from hand to hand."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(encoder.iterencode(value))  # by the encoder in Python, unlike `encode`


def _read_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, unless a name comes twice: whichever was meant, the other would be dropped in silence."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ApiError(400, f"the body has {name[:100]!r} twice in one object", code=_BAD_JSON)
    return fields


def _refuse_constant(word: str) -> Any:
    raise ApiError(400, f"the body is not JSON: {word} is no JSON number", code=_BAD_JSON)


class StrictRequest(Request):
    """A request whose body is read by `read_json`.

    Args:
        model: What a body is checked against; `None` where there is none.
    """

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """Return what FastAPI checks; or, of a large body, the checked value, which it takes as it is.

        Raises:
            ApiError: 400; 429, too many large bodies wait to be read.
        """
        data = await self.body()
        model = self._model
        if model is None or len(data) <= LARGE_BODY_BYTES:
            return read_json(data)
        try:
            return await self.app.state.service.read(lambda: read_model(data, model), num_chars=len(data))
        except OctavoError as error:
            raise to_api_error(error) from error  # FastAPI would call anything else a bad body


class StrictRoute(APIRoute):
    """A route whose requests are `StrictRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        fields = self.dependant.body_params
        model: Any = fields[0].field_info.annotation if fields else None

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive, model))

        return strict


def read_model(data: bytes, model: type[BaseModel]) -> BaseModel:
    """Return a body that has been read and checked.

    Raises:
        ApiError: 400, as it would be told if FastAPI had checked it.
        OctavoError: the same.
    """
    value = read_json(data)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise to_api_error(RequestValidationError(faults)) from error


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a JSON document."""
    return Response(dump_json(value), status, headers=dict(headers or {}), media_type="application/json")


class LargeJson(Response):
    """A JSON document of maybe many megabytes."""

    media_type = "application/json"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.on_end: Callable[[], None] = lambda: None
        """Called once the client has it, or has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()


async def large_json_response(value: Any) -> LargeJson:
    """Answer with a large document, written while others' streams go on."""
    return await asyncio.to_thread(lambda: LargeJson(dump_json_yielding(value)))
