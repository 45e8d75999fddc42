"""What an error looks like over HTTP: a status, and OpenAI's shape `{"error": {message, type, param, code}}`.

The clients people have choose their exception by the status; `code` is for programs, `param` names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from octavo.config.option import did_you_mean
from octavo.errors import (
    CapacityError,
    EngineStoppedError,
    InvalidParameterError,
    MachineError,
    ModelError,
    OctavoError,
    QueueFullError,
    RequestAbortedError,
    RequestTooLongError,
)
from octavo.server.protocol_chat import ChatRequest
from octavo.server.protocol_completions import CompletionRequest

MAX_MESSAGE_CHARS = 2000
INVALID = "invalid_request_error"
_TYPES = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_PATHS = "the API is below /v1: /v1/chat/completions, /v1/completions, /v1/models"
_FIELDS = tuple({**ChatRequest.model_fields, **CompletionRequest.model_fields})
_STATUS: Sequence[tuple[type[OctavoError], int, str | None]] = (
    (InvalidParameterError, 400, None),
    (RequestTooLongError, 400, "context_length_exceeded"),  # the word that clients look for
    (QueueFullError, 429, None),
    (EngineStoppedError, 503, None),
    (RequestAbortedError, 503, None),
    (ModelError, 400, None),  # no chat template, or one that cannot format this chat
    (CapacityError, 400, None),
    (MachineError, 500, None),
)
"""Class to status, and the code where it is not the class's own; the first match counts."""


class ApiError(HTTPException):
    """An error as it is answered.

    Args:
        status: HTTP status.
        code: Stable word for programs.
        param: The field of the request it is about.
        headers: More headers of the answer, such as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail=message, headers=dict(headers or {}))
        self.message = message
        self.code = code
        self.param = param

    @property
    def type(self) -> str:
        return _TYPES.get(self.status_code, INVALID if self.status_code < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the answer's body."""
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": self.type, "param": param, "code": self.code}}


def _printable(text: str) -> str:
    """Return a text that any answer can hold: what a client sent may be in it, and may be no text, or long."""
    text = text.encode("utf-8", errors="backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."


def to_api_error(error: Exception) -> ApiError:
    """Return an error as it is answered; what is none of ours is a bug, and says no more than that."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OctavoError):
        status, code = next(
            ((status, code or error.code) for kind, status, code in _STATUS if isinstance(error, kind)),
            (500, error.code),
        )
        headers = {}
        if isinstance(error, QueueFullError):
            headers["Retry-After"] = str(error.retry_after_s)
        elif status == 503:
            headers["Retry-After"] = "1"
        param = error.param if isinstance(error, InvalidParameterError) else None
        if isinstance(error, RequestTooLongError):
            param = "max_tokens" if error.num_prompt_tokens < error.longest_tokens else "prompt"
        return ApiError(status, _one_line(error), code=code, param=param, headers=headers)
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        return _from_http(error)
    return ApiError(500, "the server failed on this request, because of a bug in Octavo", code="internal")


def _from_http(error: HTTPException) -> ApiError:
    message, code = str(error.detail), "error"
    if error.status_code == 404:
        message, code = f"there is no such path (hint: {_PATHS})", "no-such-path"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        message, code = f"only {allowed} is answered here" if allowed else message, "method-not-allowed"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def renamed(error: InvalidParameterError, param: str) -> InvalidParameterError:
    """Return an error about a field as its sender spelled it."""
    message = error.message.removeprefix(f"{error.param}: ")
    return InvalidParameterError(message, param=param, because=error.because, hints=error.hints)


def _one_line(error: OctavoError) -> str:
    text = error.message
    if error.because:
        text += f", because {error.because}"
    if error.hints:
        text += f" (hint: {'; or '.join(error.hints)})"
    return text


def _from_validation(error: RequestValidationError) -> ApiError:
    """Say what is wrong with a body, by its first error; what was sent is not repeated."""
    first = error.errors()[0]
    param = _path(first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such field"
        name = param.rpartition(".")[2]
        hints = () if name in _FIELDS else did_you_mean(name, _FIELDS)  # the other endpoint may have it
        message += f" ({hints[0]})" if hints else ""
    elif first["type"] == "missing":
        message = "is missing" if param else "there is no body"
    return ApiError(400, f"{param}: {message}" if param else message, code="invalid-parameter", param=param or None)


def _path(places: Sequence[int | str]) -> str:
    """Write where an error is as a person would: `messages[0].content`."""
    path = ""
    for place in places[1:] if places and places[0] in ("body", "query", "path", "header") else places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif place and not place.startswith(("function-", "literal[")) and place not in ("str", "int", "float", "bool"):
            path += f".{place}" if path else place
    return path
