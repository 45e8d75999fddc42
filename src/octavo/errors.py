"""Everything that can go wrong through the user's input or machine, as one tree.

    OctavoError
    ├── InvalidParameterError     usage: an option, field or argument has a bad value          exit 2
    ├── ModelError                a model cannot be used
    │   ├── ModelNotFoundError    no such alias, path or hub id
    │   ├── UnsupportedModelError architecture, layer kind, tokenizer or feature we do not run
    │   ├── ModelFileError        a file is truncated, misshapen, or lacks a tensor or field
    │   ├── ModelNumbersError     its numbers come to NaN or infinity
    │   └── DownloadError         the network, the index or the checksum said no
    ├── CapacityError             it does not fit                                             exit 3
    │   └── RequestTooLongError   one request can never fit; refused on arrival               exit 3
    ├── RequestAbortedError       a request ended before it was done, and the client is told
    ├── QueueFullError            too many requests wait; come back in `retry_after_s`
    ├── EngineStoppedError        the engine has been stopped, drains, or has failed
    └── MachineError              the machine lacks something: memory, an instruction set, a file permission

`raise` one of these for the user's input or machine; `assert` guards our own bugs. Nothing else formats messages.
"""

from __future__ import annotations

from typing import ClassVar


class OctavoError(Exception):
    """Root of every error a user can meet.

    Args:
        message: What could not be done, with needed and available amounts and their units; no final period.
        because: The rule that was broken, with its arithmetic.
        hints: Fixes, best first, each with the exact flag and a value that works.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, because: str = "", hints: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.because = because
        self.hints = hints

    def __str__(self) -> str:
        lines = [self.message]
        if self.because:
            lines.append(f"  because {self.because}")
        lines.extend(f"hint: {hint}" for hint in self.hints)
        return "\n".join(lines)

    def render(self) -> str:
        """Return the text a terminal shows: `error[code]: message`, reason, hints."""
        return f"error[{self.code}]: {self}"


class InvalidParameterError(OctavoError):
    """A value that a user gave is not allowed; `param` names the option or field."""

    code = "invalid-parameter"
    exit_code = 2

    def __init__(self, message: str, *, param: str, because: str = "", hints: tuple[str, ...] = ()) -> None:
        super().__init__(f"{param}: {message}", because=because, hints=hints)
        self.param = param


class ModelError(OctavoError):
    """A model cannot be used."""

    code = "model"


class ModelNotFoundError(ModelError):
    """No such alias, path or hub id."""

    code = "model-not-found"


class UnsupportedModelError(ModelError):
    """A model whose architecture, layer kind, tokenizer or feature is refused rather than guessed."""

    code = "unsupported-model"


class ModelFileError(ModelError):
    """A model file is truncated, misshapen, or lacks a tensor or field; the message names it."""

    code = "bad-model-file"


class ModelNumbersError(ModelError):
    """What a model computes is no distribution: its weights hold NaN or infinity, or its sums overflow."""

    code = "model-numbers"


class DownloadError(ModelError):
    """A download failed, was cut short, or does not match its checksum."""

    code = "download-failed"


class CapacityError(OctavoError):
    """The model or its KV cache does not fit into the memory it was given."""

    code = "does-not-fit"
    exit_code = 3


class RequestTooLongError(CapacityError):
    """One request can never fit; refused on arrival.

    Args:
        num_prompt_tokens: Tokens in the prompt.
        max_tokens: Output tokens asked for.
        longest_tokens: Most prompt + output tokens that one request can have here.
    """

    code = "request-too-long"

    def __init__(
        self,
        message: str,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        longest_tokens: int,
        because: str = "",
        hints: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, because=because, hints=hints)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.longest_tokens = longest_tokens


class RequestAbortedError(OctavoError):
    """A request ended before it was done."""

    code = "request-aborted"


class QueueFullError(OctavoError):
    """As many requests wait as may wait; the same request can be accepted later.

    Args:
        retry_after_s: Whole seconds until a place is likely, from the rate at which requests end.
    """

    code = "queue-full"

    def __init__(self, message: str, *, retry_after_s: int, because: str = "", hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, because=because, hints=hints)
        self.retry_after_s = retry_after_s


class EngineStoppedError(OctavoError):
    """The engine takes no requests: it drains, has been stopped, or has failed."""

    code = "engine-stopped"


class MachineError(OctavoError):
    """The machine lacks something that was asked for."""

    code = "machine"
