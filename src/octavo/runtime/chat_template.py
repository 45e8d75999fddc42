"""ChatTemplate: a list of messages as the text, or the token ids, that a model was trained to answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError

from octavo.errors import InvalidParameterError, ModelFileError, OctavoError, UnsupportedModelError
from octavo.runtime.template_sandbox import TemplateSandbox
from octavo.runtime.tokenizer import ChatTemplateSource, Tokenizer

MAX_TEMPLATE_CHARACTERS = 1 << 20
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class RefusedByTemplateError(jinja2.TemplateError):
    """The template itself called `raise_exception`: its author's words about the chat."""


class ChatTemplate:
    """Formats chats for one model. Safe to use from several threads.

    Results equal those of transformers' `apply_chat_template`, with a prompt for the answer by default.

    Args:
        tokenizer: Whose template is used, and whose special tokens are its variables.
        override: A template to use instead of the model's own.
        now: Wall-clock time, for templates that write today's date.
    """

    __slots__ = ("_compiled", "_sandbox", "_sources", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        override: ChatTemplateSource | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self._tokenizer = tokenizer
        self._sources = {"default": override} if override else dict(tokenizer.chat_templates)
        self._sandbox = TemplateSandbox()
        self._sandbox.globals["raise_exception"] = _raise_exception
        self._sandbox.globals["strftime_now"] = lambda form: now().strftime(form)
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def reads_tools(self) -> bool:
        """Whether the template that tools would be given to does anything with them; if not, the model never sees them.

        Raises:
            As `render`, but for what concerns messages.
        """
        name, source = self._choose(has_tools=True)
        self._compile(name, source)
        return "tools" in jinja2.meta.find_undeclared_variables(self._sandbox.parse(source.text))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return a chat as token ids: `render`, with control tokens read and nothing added around.

        The template writes the beginning-of-sequence token where the model wants one; adding it here again would shift
        every position.

        Raises:
            As `render`.
        """
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self._tokenizer.encode(text, add_special_tokens=False, param="messages")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a chat as text.

        Args:
            messages: `{"role": ..., "content": ...}` and whatever else the template knows (`tool_calls`, `name` ...).
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: End with the start of an answer.
            variables: More variables for the template, such as `enable_thinking`.

        Raises:
            InvalidParameterError: messages or tools of a wrong shape, or a chat that the template refuses.
            ModelFileError: the template is broken, or does more than any honest one needs.
            UnsupportedModelError: the model has no chat template.
        """
        name, source = self._choose(has_tools=tools is not None)
        values = {
            **self._tokenizer.special.roles,
            "messages": _check_messages(messages),
            "tools": None if tools is None else _check_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{key: _plain(value, f"chat_template_kwargs.{key}") for key, value in (variables or {}).items()},
        }
        template = self._compile(name, source)
        try:
            return self._sandbox.render_bounded(template, values)
        except Exception as error:
            raise _explain(error, source) from error

    def _choose(self, *, has_tools: bool) -> tuple[str, ChatTemplateSource]:
        for name in ("tool_use", "default") if has_tools else ("default",):
            source = self._sources.get(name)
            if source is not None:
                return name, source
        raise UnsupportedModelError(
            "the model has no chat template" + (f" named default, only {sorted(self._sources)}" * bool(self._sources)),
            because="without one, a list of messages has no text that the model was trained on",
            hints=("send a plain prompt instead of messages",),
        )

    def _compile(self, name: str, source: ChatTemplateSource) -> jinja2.Template:
        if name not in self._compiled:
            if len(source.text) > MAX_TEMPLATE_CHARACTERS:
                raise ModelFileError(
                    f"{source.where} has {len(source.text):,} characters, at most {MAX_TEMPLATE_CHARACTERS:,} are read"
                )
            try:
                self._compiled[name] = self._sandbox.from_string(source.text)
            except jinja2.TemplateSyntaxError as error:
                raise ModelFileError(f"{source.where} is no valid template: line {error.lineno}: {error}") from error
            except Exception as error:  # constants are worked out while compiling, and nesting may be too deep
                raise ModelFileError(f"{source.where} is no valid template: {_brief(error)}") from error
        return self._compiled[name]


def _raise_exception(message: object) -> None:
    raise RefusedByTemplateError(str(message))


def _explain(error: Exception, source: ChatTemplateSource) -> OctavoError:
    """Return what went wrong while rendering, said to the one who can change it: the caller, or the model's maker."""
    if isinstance(error, RefusedByTemplateError):
        return InvalidParameterError(
            f"the model's chat template refuses this chat: {error.message}",
            param="messages",
            because=f"{source.where} says so",
        )
    if isinstance(error, SecurityError | RecursionError | MemoryError):
        return ModelFileError(
            f"{source.where} was stopped: {_brief(error)}",
            because="a chat template is a program from somebody else, and is run with limits",
        )
    return InvalidParameterError(
        f"the model's chat template cannot format this chat: {_brief(error)}",
        param="messages",
        because=f"{source.where} failed on it",
    )


def _brief(error: Exception) -> str:
    return f"{error}" or type(error).__name__


def _check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as plain data, without absent fields, or say which one is wrong."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidParameterError("a list of at least one message was expected", param="messages")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidParameterError(f"{type(message).__name__} is not a message", param=where)
        if not isinstance(message.get("role"), str):
            raise InvalidParameterError("a message needs a role, such as user", param=f"{where}.role")
        if not isinstance(message.get("content"), str | Sequence | None):
            raise InvalidParameterError("text or a list of parts was expected", param=f"{where}.content")
        # null means absent, as in OpenAI's API; templates would print the word None.
        plain = _plain({key: value for key, value in message.items() if value is not None}, where)
        checked.append(_name_reasoning(plain))
    return checked


def _name_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the two names that templates read, whichever the caller used."""
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidParameterError("a list of tools was expected", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidParameterError(f"{type(tool).__name__} is not a tool's JSON schema", param=f"tools[{i}]")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _plain(value: Any, where: str, *, depth: int = 0) -> Any:
    """Return a copy made of JSON's own types, so that a template meets no object with methods of its own."""
    if depth > 100:
        raise InvalidParameterError("nested more than 100 deep", param=where.partition(".")[0])
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", depth=depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
    for kind in (str, int, float):  # enums and the like
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    raise InvalidParameterError(f"{type(value).__name__} is not text, a number, a list or an object", param=where)
