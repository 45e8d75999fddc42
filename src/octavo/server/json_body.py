"""Reading JSON bodies strictly: UTF-8, finite numbers, no depth that breaks a parser; and answering it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from octavo.server.errors import ApiError

_BAD_JSON = "bad-json"


def read_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: 400, saying what is wrong without repeating the text: it may not even be text.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
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


def _refuse_constant(word: str) -> Any:
    raise ApiError(400, f"the body is not JSON: {word} is no JSON number", code=_BAD_JSON)


class StrictRequest(Request):
    """A request whose body is read by `read_json`."""

    async def json(self) -> Any:
        return read_json(await self.body())


class StrictRoute(APIRoute):
    """A route whose requests are `StrictRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a JSON document."""
    return Response(dump_json(value), status, headers=dict(headers or {}), media_type="application/json")
