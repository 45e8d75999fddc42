"""What counts as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from octavo.errors import InvalidParameterError

if TYPE_CHECKING:
    from octavo.runtime.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt given as token ids; they are used as they are, nothing is added."""

    prompt_token_ids: Sequence[int]


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str


Prompt = str | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; `text` is `None` if it came as ids."""

    text: str | None
    token_ids: tuple[int, ...]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list."""
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def tokenize(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> TokenizedPrompt:
    """Turn a prompt into token ids.

    Raises:
        InvalidParameterError: not one of the accepted forms, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        return TokenizedPrompt(text=prompt, token_ids=tuple(tokenizer.encode(prompt)))
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
        return tokenize(prompt["prompt"], tokenizer, vocab_size)  # type: ignore[typeddict-item]
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
        return TokenizedPrompt(text=None, token_ids=_checked_ids(prompt["prompt_token_ids"], vocab_size))  # type: ignore[typeddict-item]
    raise InvalidParameterError(
        f"{type(prompt).__name__} is not a prompt",
        param="prompt",
        because='a prompt is text, {"prompt": text} or {"prompt_token_ids": [ids]}',
    )


def _checked_ids(token_ids: object, vocab_size: int) -> tuple[int, ...]:
    param = "prompt_token_ids"
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise InvalidParameterError(f"{type(token_ids).__name__} is not a list of token ids", param=param)
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidParameterError(
                f"{token_id!r} is not a token id",
                param=param,
                because=f"the model's vocabulary has ids 0 to {vocab_size - 1:,}",
            )
    return tuple(token_ids)
