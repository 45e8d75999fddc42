"""Service: what all routes share. The model behind them, its names, and threads for reading text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.core.sampling import MAX_CHOICES
from octavo.errors import InvalidParameterError
from octavo.llm.async_llm import AsyncLLM
from octavo.llm.prompts import TokenizedPrompt, tokenize
from octavo.server.errors import ApiError, renamed
from octavo.server.protocol_chat import ChatMessage, Tool
from octavo.server.request_ids import ClientIds
from octavo.server.score_limits import ScoreLimits
from octavo.server.settings import ServerSettings
from octavo.server.text_pool import TextPool
from octavo.server.tool_parsers.describe import describe_tools
from octavo.server.tool_parsers.formats import detect_tool_format
from octavo.version import __version__

T = TypeVar("T")
LARGE_CHARS = 64 * 1024
"""Characters, bytes or ids that are large: a tenth of a second's work, or four for the worst of texts."""


class Service:
    """One model, as clients see it.

    Args:
        llm: Answers.
        settings: What was asked of the server.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.names = settings.served_model_name or (served_name(llm.model_name),)
        self._text = TextPool()
        self._large = TextPool(1)
        self.ids = ClientIds()
        self.scores = ScoreLimits()
        self.fingerprint = _fingerprint(llm)
        form = settings.tool_call_parser
        self.tool_format = detect_tool_format(llm.tokenizer.chat_template) if form == "auto" else form

    async def read(self, work: Callable[[], T], *, num_chars: int) -> T:
        """Do what takes time for each character in a thread, and return what it returns.

        What is large waits for one thread, alone with its like: seconds of it must not stand before everybody's words.

        Args:
            num_chars: How much there is to do.

        Raises:
            QueueFullError: too much waits already.
        """
        pool = self._large if num_chars > LARGE_CHARS else self._text
        return await pool.run(work, num_chars=num_chars)

    def check_model(self, name: str | None) -> str:
        """Return the name to answer under.

        Raises:
            ApiError: 404, with the names there are.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"there is no model {name[:100]!r} here, only {known}", code="model_not_found", param="model"
            )
        return name

    def tokenize(self, prompts: Sequence[str | tuple[int, ...]], *, add_special_tokens: bool) -> list[TokenizedPrompt]:
        """Turn prompts into token ids, by the code that `LLM.generate` uses. For a thread of the text pool.

        Raises:
            InvalidParameterError: too long, or not to be written in the vocabulary.
        """
        return [self._tokenize(prompt, add_special_tokens=add_special_tokens) for prompt in prompts]

    def _tokenize(self, prompt: str | tuple[int, ...], *, add_special_tokens: bool) -> TokenizedPrompt:
        tokenizer = self.llm.tokenizer
        if not isinstance(prompt, str):
            try:
                return tokenize({"prompt_token_ids": prompt}, tokenizer, self.llm.vocab_size)
            except InvalidParameterError as error:
                raise renamed(error, "prompt") from error
        self.check_length(len(prompt), "prompt")
        if add_special_tokens:
            return tokenize(prompt, tokenizer, self.llm.vocab_size)
        return TokenizedPrompt(text=prompt, token_ids=tuple(tokenizer.encode(prompt, add_special_tokens=False)))

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        add_special_tokens: bool = False,
    ) -> TokenizedPrompt:
        """Turn a chat into token ids: the template's text, to which nothing is added. For a thread of the text pool.

        Raises:
            InvalidParameterError: too long, or refused by the template.
            ModelError: the model has no template, or one that does more than it may.
        """
        self.check_length(num_chars_of(messages), "messages")
        template = self.llm.chat_template
        knows_developer = "developer" in (self.llm.tokenizer.chat_template or "")
        chat: list[Mapping[str, Any]] = [
            message.for_template(f"messages[{index}]", knows_developer=knows_developer)
            for index, message in enumerate(messages)
        ]
        documents = [tool.model_dump(exclude_unset=True) for tool in tools] or None
        if documents and not template.reads_tools:
            chat, documents = describe_tools(chat, documents), None
        text = template.render(
            chat,
            tools=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        ids = self.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens, param="messages")
        return TokenizedPrompt(text=text, token_ids=tuple(ids))

    def check_length(self, num_chars: int, param: str) -> None:
        """Refuse a text that is longer than `--max-prompt-chars`.

        Raises:
            InvalidParameterError: naming `param`.
        """
        if num_chars > self.settings.max_prompt_chars:
            raise InvalidParameterError(
                f"{num_chars:,} characters, at most {self.settings.max_prompt_chars:,} are read", param=param
            )

    def check_answers(self, num_prompts: int, n: int) -> None:
        """Refuse more answers than could ever wait together: coming back later would not help.

        Raises:
            InvalidParameterError: naming `n`.
        """
        if num_prompts * n > max(MAX_CHOICES, self.settings.max_waiting):
            raise InvalidParameterError(
                f"{num_prompts:,} prompts with {n:,} answers each are too many",
                param="n" if num_prompts == 1 else "prompt",
                because=f"at most {self.settings.max_waiting:,} may wait",
                hints=("send them in parts",),
            )


def num_chars_of(messages: Sequence[ChatMessage]) -> int:
    """Return how long a chat's texts are together."""
    return sum(len(message.content or "") for message in messages)


def salt_of(request: Request, asked: str | None) -> str | None:
    """Return the salt of a request's blocks: its caller's, and the one it asked for. Neither can imitate the other."""
    tenant = getattr(request.state, "tenant", None)
    parts = ([f"key:{tenant}"] if tenant else []) + ([f"asked:{asked}"] if asked else [])
    return " ".join(parts) or None


def served_name(model: str) -> str:
    """Return the name of a model that was given none: as it was asked for, a path without its folder."""
    path = Path(model)
    if not path.exists():
        return model
    name = path.resolve().name
    return name.removesuffix(".gguf") or model


def _fingerprint(llm: AsyncLLM) -> str:
    """Name what decides an answer's bits besides the request, for `system_fingerprint`."""
    resolved = llm.resolved
    parts = (__version__, resolved.model, resolved.runner, resolved.weight_dtype, resolved.kv_cache_dtype)
    return "fp_" + hashlib.blake2b(repr(parts).encode(), digest_size=5).hexdigest()
