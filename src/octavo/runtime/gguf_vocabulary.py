"""GgufVocabulary: the tokenizer fields of a GGUF file, read and checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from octavo.errors import ModelFileError
from octavo.models.fields import Fields
from octavo.runtime.tokenizer import ChatTemplateSource, SpecialTokens

PREFIX = "tokenizer.ggml."

_CHAT_TEMPLATE = "tokenizer.chat_template"
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
"""Control tokens that end a turn under any model; files often name only one end, and a missed one never stops."""


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufVocabulary:
    """Tokens and what the file says about each.

    Args:
        fields: The file's metadata.

    Attributes:
        tokens: Token of each id.
        control: Ids of control tokens, which are read from text only on request and left out of answers.
        added: Ids of user-defined tokens, always read from text.

    Raises:
        ModelFileError: a field is missing, or contradicts another.
    """

    __slots__ = ("_types", "added", "control", "fields", "tokens")

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.tokens = self.texts("tokens")
        self._types = self._token_types()
        self.control = self.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        self.added = self.ids_of(TokenType.USER_DEFINED)

    def ids_of(self, *types: TokenType) -> list[int]:
        """Return the ids of all tokens of some types."""
        wanted = frozenset(types)
        return [i for i, kind in enumerate(self._types) if kind in wanted]

    def id_of(self, name: str) -> int | None:
        """Return the token id in a field such as `bos_token_id`; `None` where absent."""
        return next(iter(self.fields.token_ids(PREFIX + name, len(self.tokens))), None)

    def by_text(self, ids: Sequence[int]) -> dict[str, int]:
        """Return token to id of the tokens that have a text, which no two may share."""
        by_text: dict[str, int] = {}
        for i in ids:
            token = self.tokens[i]
            if token and by_text.setdefault(token, i) != i:
                raise self.error("tokens", f"has {token!r} twice, as {by_text[token]} and {i}")
        return by_text

    def special_tokens(self, *, adds_bos: bool) -> SpecialTokens:
        """Return the tokens with a meaning; `adds_bos` counts where the file does not say."""
        bos = self.id_of("bos_token_id")
        ends = [end for name in _END_FIELDS if (end := self.id_of(name)) is not None]
        ends += [i for i in self.control if self.tokens[i] in _TURN_ENDS]
        roles = {role: i for role, name in _ROLES.items() if (i := self.id_of(name)) is not None}
        return SpecialTokens(
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            control_ids=frozenset([*self.control, *ends, *(() if bos is None else (bos,))]),
            prefix_ids=self._around("add_bos_token", "bos_token_id", default=adds_bos and bos is not None),
            suffix_ids=self._around("add_eos_token", "eos_token_id", default=False),
            roles={role: self.tokens[i] for role, i in roles.items()},
        )

    def chat_templates(self) -> dict[str, ChatTemplateSource]:
        """Return the chat templates: the default one, and named ones as `tokenizer.chat_template.<name>`."""
        dotted = f"{_CHAT_TEMPLATE}."
        names = {name: name.removeprefix(dotted) for name in self.fields.names if name.startswith(dotted)}
        names[_CHAT_TEMPLATE] = "default"
        return {
            short: ChatTemplateSource(text=self.fields.text(name), where=f"{self.fields.where}: {name}")
            for name, short in names.items()
            if name in self.fields
        }

    def texts(self, name: str) -> list[str]:
        """Return an array of strings."""
        values = self._array(name)
        if not all(isinstance(value, str) for value in values):
            raise self.error(name, "is not an array of strings")
        return [str(value) for value in values]

    def numbers(self, name: str) -> list[float]:
        """Return an array of numbers with an entry for each token."""
        values = self._array(name)
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) != len(values):
            raise self.error(name, "is not an array of numbers")
        if len(numbers) < len(self.tokens):
            raise self.error(name, f"has {len(numbers):,} entries for {len(self.tokens):,} tokens")
        return numbers

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs that merge, first to last."""
        pairs: list[tuple[str, str]] = []
        for i, merge in enumerate(self.texts("merges")):
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise self.error(f"merges[{i}]", f"is {merge!r}, two tokens with a space between were expected")
            pairs.append((left, right))
        return pairs

    def error(self, name: str, complaint: str) -> ModelFileError:
        """Return an error about one of the fields, to be raised by the caller."""
        return self.fields.error(PREFIX + name, complaint)

    def _array(self, name: str) -> Sequence[object]:
        values = self.fields.raw(PREFIX + name)
        if values is None:
            raise self.error(name, "is missing")
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise self.error(name, "is not an array")
        return values

    def _token_types(self) -> Sequence[float]:
        if PREFIX + "token_type" not in self.fields:
            return [TokenType.NORMAL] * len(self.tokens)
        return self.numbers("token_type")[: len(self.tokens)]

    def _around(self, flag: str, name: str, *, default: bool) -> tuple[int, ...]:
        """Return the id that goes before or behind a prompt, if any."""
        if not self.fields.flag(PREFIX + flag, default=default):
            return ()
        token_id = self.id_of(name)
        if token_id is None:
            raise self.error(flag, f"is true, but {PREFIX}{name} is missing")
        return (token_id,)
