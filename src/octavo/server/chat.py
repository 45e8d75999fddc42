"""`/v1/chat/completions`: a conversation becomes an engine request, its deltas become messages, whole or in chunks.

As in `completions.py`, one fold makes the pieces of an answer, so that a stream and a whole answer say the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from octavo.core.sampling import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.llm.prompts import TokenizedPrompt
from octavo.runtime.tokenizer import Tokenizer
from octavo.server.answers import Answers, Usage
from octavo.server.logprobs import TokenSpelling, aside_if_many, chat_logprobs, count_scores, prompt_logprobs
from octavo.server.protocol_chat import ChatRequest
from octavo.server.score_limits import count_output_scores, count_prompt_scores
from octavo.server.service import Service
from octavo.server.stream import DONE, event
from octavo.server.tool_calls import CallList, SaidAsCalls
from octavo.server.tool_parsers.deltas import ContentDelta, ToolDelta


@dataclass(slots=True, kw_only=True)
class Piece:
    """What a delta adds to a message: content, or an entry of `tool_calls`. The end is a piece of its own."""

    content: str = ""
    tool_call: dict[str, Any] | None = None
    logprobs: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Choice:
    """One answer, as pieces."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, tool_format: str) -> None:
        # What the template wrote comes before the answer, so that its first space separates the two and stays.
        self._spelling = TokenSpelling(tokenizer, skips_special=body.skip_special_tokens, strips_space=False)
        self._has_logprobs = body.logprobs
        self._said = SaidAsCalls(body, tool_format)
        self._calls = CallList()
        self.has_begun = False

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self._calls.calls

    def push(self, delta: OutputDelta) -> list[Piece]:
        pieces = self._pieces(self._said.push(delta.text))
        ends = []
        if delta.finish_reason is not None:
            held, reason = self._said.finish(delta.finish_reason)
            pieces += self._pieces(held)
            ends.append(Piece(finish_reason=reason, stop_reason=delta.stop_reason))
        if self._has_logprobs and delta.logprobs:
            # Scores belong to tokens, whose text may come later, or as a call.
            pieces = pieces or [Piece()]
            pieces[0].logprobs = chat_logprobs(delta.logprobs, self._spelling)
        return pieces + ends

    def _pieces(self, deltas: Sequence[ToolDelta]) -> list[Piece]:
        return [
            Piece(content=delta.text) if isinstance(delta, ContentDelta) else Piece(tool_call=self._calls.chunk(delta))
            for delta in deltas
        ]


@dataclass(slots=True)
class _Whole:
    """A choice, put together."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.content)
        self.logprobs.extend(piece.logprobs or ())
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason

    def message(self, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        content = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if tool_calls:
            message |= {"content": content or None, "tool_calls": tool_calls}
        return message


class Chat:
    """One call of `/v1/chat/completions`, whose conversation has been read."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        model: str,
        cache_salt: str | None,
    ) -> None:
        self._service = service
        self._body = body
        length, longest_tokens = len(prompt.token_ids), service.llm.longest_request_tokens
        asked_by = "top_logprobs" if body.top_logprobs else "logprobs"
        self.num_scores = count_prompt_scores(params, length, param="prompt_logprobs")
        self.num_scores += count_output_scores(params, [length], longest_tokens=longest_tokens, param=asked_by)
        head = {"id": request_id, "created": int(time.time()), "model": model}
        self._head = {**head, "system_fingerprint": service.fingerprint}
        self.messages = [
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                params=params,
                priority=body.priority,
                cache_salt=cache_salt,
            )
        ]
        self._choices = [_Choice(body, service.llm.tokenizer, service.tool_format) for _ in range(body.n)]
        self._usage = Usage(len(prompt.token_ids))

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [_Whole() for _ in self._choices]
        scores: list[TokenLogprobs] = []
        try:
            async for _, delta in answers:
                self._usage.take(0, delta)
                scores += delta.prompt_logprobs
                push = partial(self._choices[delta.index].push, delta)
                for piece in await aside_if_many(count_scores(delta.logprobs), push):
                    choices[delta.index].add(piece)
        finally:
            answers.close()
        made = [
            {
                "index": index,
                "message": choice.message(self._choices[index].tool_calls),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer = {**self._head, "object": "chat.completion", "choices": made, "usage": self._usage.body()}
        if self._body.prompt_logprobs is not None:
            tokenizer = self._service.llm.tokenizer
            answer["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, scores, tokenizer)
        return answer

    async def chunks(self, answers: Answers) -> AsyncGenerator[str, None]:
        """Yield the answer as events."""
        head = {**self._head, "object": "chat.completion.chunk"}
        usage = {"usage": None} if self._body.includes_usage else {}
        try:
            async for _, delta in answers:
                self._usage.take(0, delta)
                events = await aside_if_many(
                    count_scores(delta.logprobs), partial(self._events, delta, {**head, **usage})
                )
                if events:
                    yield events
            if self._body.includes_usage:
                yield event({**head, "choices": [], "usage": self._usage.body()})
            yield DONE
        finally:
            answers.close()

    def _events(self, delta: OutputDelta, around: Mapping[str, Any]) -> str:
        choice = self._choices[delta.index]
        made = [] if choice.has_begun else [_chunk_choice(delta.index, {"role": "assistant", "content": ""})]
        choice.has_begun = True
        made += [_piece_choice(delta.index, piece) for piece in choice.push(delta)]
        return "".join(event({**around, "choices": [each]}) for each in made)


def _piece_choice(index: int, piece: Piece) -> dict[str, Any]:
    if piece.finish_reason is not None:
        return _chunk_choice(index, {}, finish_reason=piece.finish_reason) | {"stop_reason": piece.stop_reason}
    made = _chunk_choice(index, {"tool_calls": [piece.tool_call]} if piece.tool_call else {"content": piece.content})
    if piece.logprobs is not None:
        made["logprobs"] = {"content": piece.logprobs, "refusal": None}
    return made


def _chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
