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

_FORMS = 'a prompt is text, {"prompt": text} or {"prompt_token_ids": [ids]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; `text` is `None` if it came as ids."""

    text: str | None
    token_ids: tuple[int, ...]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list.

    Raises:
        InvalidParameterError: neither a prompt nor a sequence.
    """
    if not isinstance(prompts, str | Mapping | Sequence) or isinstance(prompts, bytes):
        raise InvalidParameterError(f"{type(prompts).__name__} is not a prompt", param="prompt", because=_FORMS)
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
        because=_FORMS,
    )


def check_salt(cache_salt: object) -> None:
    """Refuse a salt that is no text; an empty one would look like none and be one of its own.

    Raises:
        InvalidParameterError: naming what it is.
    """
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise InvalidParameterError(
            f"{cache_salt!r} is not a non-empty text", param="cache_salt", hints=("leave it out to share with all",)
        )


def check_priorities(priority: object, num_prompts: int) -> None:
    """Refuse priorities that are not one whole number per prompt.

    Raises:
        InvalidParameterError: the wrong number of them, or the wrong kind.
    """
    if priority is None:
        return
    is_list = isinstance(priority, Sequence) and all(type(value) is int for value in priority)
    if not is_list or len(priority) != num_prompts:  # type: ignore[arg-type]
        raise InvalidParameterError(f"not a list of {num_prompts} whole numbers", param="priority")


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
