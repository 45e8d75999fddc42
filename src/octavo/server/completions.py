"""`/v1/completions`: a body becomes engine requests, their deltas become choices, whole or in chunks.

One fold makes the pieces of an answer; a stream sends each as a chunk, and a whole answer is their sum. So both say the
same by construction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from octavo.core.sampling import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.llm.prompts import TokenizedPrompt
from octavo.runtime.tokenizer import Tokenizer
from octavo.server.answers import Answers, Usage
from octavo.server.logprobs import (
    TokenSpelling,
    aside_if_many,
    completion_logprobs,
    count_scores,
    prompt_logprobs,
)
from octavo.server.protocol_completions import CompletionRequest
from octavo.server.score_limits import count_output_scores, count_prompt_scores
from octavo.server.service import Service
from octavo.server.stream import DONE, event


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a delta adds to a choice. The end is a piece of its own, without text."""

    text: str = ""
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _PromptScores:
    """Scores of one prompt's tokens; they come with the first answer's deltas and belong to all."""

    def __init__(self, num_prompt_tokens: int, *, is_wanted: bool) -> None:
        self.entries: list[TokenLogprobs] = []
        self._num_missing = num_prompt_tokens - 1 if is_wanted else 0

    def take(self, delta: OutputDelta) -> None:
        self.entries.extend(delta.prompt_logprobs)

    @property
    def are_complete(self) -> bool:
        return len(self.entries) >= self._num_missing


class _Choice:
    """One answer, as pieces."""

    def __init__(
        self,
        body: CompletionRequest,
        prompt: TokenizedPrompt,
        tokenizer: Tokenizer,
        scores: _PromptScores,
        *,
        is_first: bool,
    ) -> None:
        self._body = body
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._scores = scores
        self._held: list[OutputDelta] = []
        self.has_echoed = not body.echo
        self._spelling = TokenSpelling(
            tokenizer,
            skips_special=body.skip_special_tokens,
            strips_space=tokenizer.strips_leading_space and (body.echo or is_first),
            written=(prompt.text or "") if body.echo else "",
        )

    def push(self, delta: OutputDelta) -> list[Piece]:
        """Take a delta; the pieces that it makes certain come back, after an echo of the prompt."""
        self._held.append(delta)
        return self.release()

    def release(self) -> list[Piece]:
        """Return what has been held back, once the prompt's scores are complete."""
        if not self._held or (not self.has_echoed and not self._scores.are_complete):
            return []  # an echo tells the scores of the whole prompt, and they come in parts
        pieces = [] if self.has_echoed else [self._echo()]
        self.has_echoed = True
        for held in self._held:
            pieces += self._pieces(held)
        self._held = []
        return pieces

    def _echo(self) -> Piece:
        ids = self._prompt.token_ids
        text = self._prompt.text
        if text is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens)
        if self._body.logprobs is None:
            return Piece(text=text)
        num_top = self._body.logprobs
        entries = [_cut(entry, num_top) for entry in self._scores.entries]
        return Piece(text=text, logprobs=completion_logprobs([ids[0], *entries], self._spelling))

    def _pieces(self, delta: OutputDelta) -> list[Piece]:
        pieces = []
        logprobs = None
        if self._body.logprobs is not None and delta.logprobs:
            logprobs = completion_logprobs(delta.logprobs, self._spelling)
        if delta.text or logprobs is not None:
            pieces.append(Piece(text=delta.text, logprobs=logprobs))
        if delta.finish_reason is not None:
            pieces.append(Piece(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason))
        return pieces


def _cut(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """Return an entry with fewer alternatives; `prompt_logprobs` may have asked for more than the echo shows."""
    return TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, top=entry.top[:num_top])


@dataclass(slots=True)
class _Whole:
    """A choice, put together."""

    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs = self.logprobs or {name: [] for name in piece.logprobs}
            for name, values in piece.logprobs.items():
                self.logprobs[name].extend(values)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason


class Completion:
    """One call of `/v1/completions`, whose prompts have been read.

    Args:
        params: `body.sampling_params()`, which may take long.
        request_id: Of the call; its prompts' requests are called after it.
        model: The name it was asked under.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        *,
        request_id: str,
        model: str,
        cache_salt: str | None,
    ) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._id = request_id
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.fingerprint,
        }
        lengths = [len(prompt.token_ids) for prompt in prompts]
        asked_by = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        self.num_scores = count_prompt_scores(params, sum(lengths), param=asked_by, num_listed=body.n)
        longest_tokens = service.llm.longest_request_tokens
        self.num_scores += count_output_scores(params, lengths, longest_tokens=longest_tokens, param="logprobs")
        self.messages = [
            EngineRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                priority=body.priority,
                cache_salt=cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]
        wants_scores = params.prompt_logprobs is not None
        self._scores = [_PromptScores(len(prompt.token_ids), is_wanted=wants_scores) for prompt in prompts]
        tokenizer = service.llm.tokenizer
        self._choices = [
            _Choice(body, prompt, tokenizer, scores, is_first=is_first)
            for prompt, scores in zip(prompts, self._scores, strict=True)
            for is_first in [tokenizer.strips_leading_space and not self._has_text(prompt)]
            for _ in range(body.n)
        ]
        self._usage = Usage(sum(lengths))

    def _has_text(self, prompt: TokenizedPrompt) -> bool:
        spelling = TokenSpelling(
            self._service.llm.tokenizer, skips_special=self._body.skip_special_tokens, strips_space=False
        )
        # What is longer will be refused; it shall not be gone through before.
        read = islice(prompt.token_ids, self._service.llm.longest_request_tokens)
        return any(map(spelling.bytes_of, read))

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [_Whole() for _ in self._choices]
        try:
            async for prompt_index, delta in answers:
                for index, piece in await aside_if_many(
                    self._num_scores(prompt_index, delta), partial(self._push, prompt_index, delta)
                ):
                    choices[index].add(piece)
        finally:
            answers.close()
        made: list[dict[str, Any]] = [
            {
                "index": index,
                "text": "".join(choice.texts),
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        if self._body.prompt_logprobs is not None:
            tokenizer = self._service.llm.tokenizer
            scores = [await asyncio.to_thread(prompt_logprobs, each.entries, tokenizer) for each in self._scores]
            for choice in made:
                choice["prompt_logprobs"] = scores[choice["index"] // self._body.n]
        return {**self._head, "choices": made, "usage": self._usage.body()}

    async def chunks(self, answers: Answers) -> AsyncGenerator[str, None]:
        """Yield the answer as events."""
        usage = {"usage": None} if self._body.includes_usage else {}
        try:
            async for prompt_index, delta in answers:
                events = await aside_if_many(
                    self._num_scores(prompt_index, delta), partial(self._events, prompt_index, delta, usage)
                )
                if events:
                    yield events
            if self._body.includes_usage:
                yield event({**self._head, "choices": [], "usage": self._usage.body()})
            yield DONE
        finally:
            answers.close()

    def _events(self, prompt_index: int, delta: OutputDelta, usage: Mapping[str, None]) -> str:
        return "".join(
            event({**self._head, "choices": [_chunk_choice(index, piece)], **usage})
            for index, piece in self._push(prompt_index, delta)
        )

    def _num_scores(self, prompt_index: int, delta: OutputDelta) -> int:
        """Return how many scores `_push` may have to write."""
        num_scores = count_scores(delta.logprobs)
        if self._body.logprobs is not None and not self._choices[prompt_index * self._body.n + delta.index].has_echoed:
            num_scores += self._body.n * (
                count_scores(self._scores[prompt_index].entries) + count_scores(delta.prompt_logprobs)
            )
        return num_scores

    def _push(self, prompt_index: int, delta: OutputDelta) -> list[tuple[int, Piece]]:
        """Take a delta; what it adds to which choice comes back, further answers that waited for scores included."""
        self._usage.take(prompt_index, delta)
        if delta.index == 0:  # where nothing is generated, every answer's delta has them
            self._scores[prompt_index].take(delta)
        first = prompt_index * self._body.n
        index = first + delta.index
        pieces = [(index, piece) for piece in self._choices[index].push(delta)]
        if delta.prompt_logprobs and self._scores[prompt_index].are_complete:
            for other in range(first, first + self._body.n):
                if other != index:
                    pieces += [(other, piece) for piece in self._choices[other].release()]
        return pieces


def _chunk_choice(index: int, piece: Piece) -> dict[str, Any]:
    return {
        "index": index,
        "text": piece.text,
        "logprobs": piece.logprobs,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }
