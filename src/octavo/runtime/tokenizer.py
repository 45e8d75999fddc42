"""Tokenizer: text to token ids and back, whatever file the vocabulary came from.

    tokenizer = load_tokenizer(open_model(path))
    ids = tokenizer.encode("Hello")                       # prompt as a user types it: BOS added if the model wants one
    ids = tokenizer.encode(chat, add_special_tokens=False)  # a rendered chat: the template wrote its own BOS
    tokenizer.decode(ids)

What this does not do: decode step by step (`octavo.engine.detokenize`), or format chats (`chat_template.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from octavo.errors import InvalidParameterError
from octavo.runtime.vocabulary import Vocabulary


class TextEncoder(Protocol):
    """Turns text into ids, adding nothing at either end. Safe to call from several threads."""

    def encode(self, text: str, *, parse_special: bool, param: str) -> list[int]:
        """Return the ids of a text; with `parse_special`, control tokens written in it become their ids.

        Raises:
            InvalidParameterError: naming `param`, where the vocabulary cannot write a character.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Tokens with a meaning beyond their text.

    Args:
        bos_token_id: Beginning of a text; `None` if the vocabulary has none.
        eos_token_ids: Every id that ends an answer: the union of what the files name, in order of first mention.
        control_ids: Ids left out of text when special tokens are skipped.
        prefix_ids: Put before a prompt by `add_special_tokens`.
        suffix_ids: Put behind it.
        roles: Names that chat templates use (`bos_token`, `eos_token`, ...) to the tokens' texts.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    control_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateSource:
    """A chat template as a model file has it; `where` names file and field in error messages."""

    text: str = field(repr=False)
    where: str


class Tokenizer:
    """Text to token ids and back. Immutable; shared by all requests and threads.

    Args:
        encoder: Does the splitting and merging.
        vocabulary: What each id spells.
        special: Tokens with a meaning beyond their text.
        strips_leading_space: The encoder puts a space before a text, so decoding takes one from its start.
        chat_templates: By name; `default` is used unless tools are given and there is a `tool_use`.
    """

    __slots__ = ("_encoder", "_vocabulary", "chat_templates", "special", "strips_leading_space")

    def __init__(
        self,
        *,
        encoder: TextEncoder,
        vocabulary: Vocabulary,
        special: SpecialTokens,
        strips_leading_space: bool = False,
        chat_templates: Mapping[str, ChatTemplateSource] | None = None,
    ) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self.special = special
        self.strips_leading_space = strips_leading_space
        self.chat_templates: Mapping[str, ChatTemplateSource] = dict(chat_templates or {})

    @property
    def vocab_size(self) -> int:
        """Number of ids, gaps included: at least the rows of the model's output layer."""
        return self._vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        return self.special.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.special.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """The default chat template's text; `None` if the model has none."""
        source = self.chat_templates.get("default")
        return source.text if source else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text.

        A text that already starts with the beginning-of-sequence token gets no second one: a pasted, rendered chat
        must not shift every position by one.

        Args:
            add_special_tokens: Add what the model wants around a prompt (often BOS). Off for rendered chats.
            parse_special: Control tokens written in the text become their ids; off reads them as plain text.
            param: Name of the argument in error messages.

        Raises:
            InvalidParameterError: half a surrogate pair, or a byte that the vocabulary cannot write.
        """
        check_text(text, param)
        ids = self._encoder.encode(text, parse_special=parse_special, param=param)
        if not add_special_tokens:
            return ids
        prefix, suffix = list(self.special.prefix_ids), list(self.special.suffix_ids)
        has_prefix = bool(prefix) and ids[: len(prefix)] == prefix
        return [*(() if has_prefix else prefix), *ids, *suffix]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD; nothing else is changed.

        Raises:
            InvalidParameterError: an id outside the vocabulary.
        """
        ids = list(token_ids)
        self.check_ids(ids, param="token_id")
        hidden = self.special.control_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self._vocabulary.spell(token_id) for token_id in ids if token_id not in hidden])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, in the middle of one; maybe a part of a character.

        Raises:
            InvalidParameterError: an id outside the vocabulary.
        """
        return self._vocabulary.spell(token_id)

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token is left out of text when special tokens are skipped."""
        return token_id in self.special.control_ids

    def token(self, token_id: int) -> str | None:
        """Return the token as the file writes it (`Ġthe`, `▁the`); `None` for a gap."""
        return self._vocabulary.token(token_id)

    def check_ids(self, token_ids: Iterable[int], *, param: str = "prompt_token_ids") -> None:
        """Refuse ids that are not of this vocabulary.

        Raises:
            InvalidParameterError: naming the first such id and the size of the vocabulary.
        """
        for token_id in token_ids:
            self._vocabulary.check_id(token_id, param=param)


def check_text(text: str, param: str) -> None:
    """Refuse what is not text.

    Raises:
        InvalidParameterError: not a string, or half a surrogate pair in it, as JSON escapes can make.
    """
    if not isinstance(text, str):
        raise InvalidParameterError(f"{type(text).__name__} is not text", param=param)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start:,}",
            param=param,
            because="only whole Unicode characters have a UTF-8 form",
        ) from error
