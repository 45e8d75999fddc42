"""LLM: answers prompts from Python, in one process.

llm = LLM("smollm2-135m", kv_cache_dtype="f16", max_model_len=4096)
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=64)):
    print(output.outputs[0].text, output.num_cached_tokens)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from octavo.config.engine import EngineConfig
from octavo.config.sources import ask, environment_source, keyword_source
from octavo.core.sampling import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.errors import InvalidParameterError
from octavo.llm.assemble import assemble
from octavo.llm.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.llm.prompts import Prompt, TokenizedPrompt, as_list, check_priorities, check_salt, tokenize
from octavo.models.download import Progress
from octavo.planner.card import Card

if TYPE_CHECKING:
    from octavo.runtime.chat_template import ChatTemplate

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stream:
    """Answers as they come: iterate over it for the deltas.

    Args:
        prompts: The prompts as the engine got them, in the order of `request_id`.
    """

    prompts: tuple[TokenizedPrompt, ...]
    deltas: Generator[OutputDelta, None, None]

    def __iter__(self) -> Iterator[OutputDelta]:
        return self.deltas

    def close(self) -> None:
        """Abort what is unfinished."""
        self.deltas.close()


class LLM:
    """A model, ready to answer.

    Args:
        model: An alias, a folder with safetensors, a .gguf file, or a hub id; or a complete config, and then nothing
            else is asked.
        progress: Called with what is being done, units done and units in all, while fetching and loading.
        on_card: Called with the memory plan before anything large is loaded.
        options: Engine options, named as in `EngineConfig`; what is not given comes from `OCTAVO_*` variables, then
            from defaults.

    Raises:
        OctavoError: see `octavo.errors`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        on_card: Callable[[Card], None] | None = None,
        **options: object,
    ) -> None:
        if isinstance(model, EngineConfig):
            assert not options, "a complete config leaves nothing open"
            config = model
        else:
            name = None if model is None else os.fspath(model)
            config = ask(keyword_source({"model": name, **options}), environment_source(os.environ)).config
        self._parts = assemble(config, progress=progress, on_card=on_card)
        self._num_calls = 0
        self._inboxes: dict[str, deque[OutputDelta]] = {}
        self._lock = threading.RLock()

    @property
    def engine(self) -> Engine:
        """The engine underneath: its metrics, its snapshot, its events."""
        return self._parts.engine

    @property
    def card(self) -> Card:
        """Where the memory goes, and why each value is what it is."""
        return self._parts.card

    def config_document(self) -> dict[str, Any]:
        """Return every decided value, JSON-ready."""
        return self._parts.resolved.as_dict()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._parts.model.spec.vocab_size

    @property
    def tokenizer(self) -> Any:
        return self._parts.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, as many at a time as fit, and return the outputs in the prompts' order.

        Args:
            prompts: Text, `{"prompt_token_ids": [...]}`, or a list of either.
            sampling_params: For all prompts, or one per prompt.
            priority: One value per prompt; lower runs first under `scheduling_policy="priority"`.
            cache_salt: Requests with different salts share no blocks.

        Raises:
            RequestTooLongError: a prompt can never fit; nothing has been computed then.
            InvalidParameterError: a bad prompt or parameter.
        """
        tokenized = [self._tokenize(prompt) for prompt in as_list(prompts)]
        check_salt(cache_salt)
        check_priorities(priority, len(tokenized))
        return self._run(tokenized, self._spread_params(sampling_params, len(tokenized)), priority, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat, or several, formatted by the model's own template.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a list of such lists.

        Raises:
            As `generate`; and where the model has no chat template, or it refuses the messages.
        """
        tokenized = [self._render(chat) for chat in _as_chats(messages)]
        check_salt(cache_salt)
        return self._run(tokenized, self._spread_params(sampling_params, len(tokenized)), None, cache_salt)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Stream:
        """Answer prompts and yield each step's new text; `request_id` is the prompt's place in the list.

        Closing the iterator early aborts what is unfinished.
        """
        tokenized = [self._tokenize(prompt) for prompt in as_list(prompts)]
        params = self._spread_params(sampling_params, len(tokenized))
        return Stream(prompts=tuple(tokenized), deltas=self._stream(tokenized, params))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Stream:
        """Answer one chat, or several, and yield each step's new text."""
        tokenized = [self._render(chat) for chat in _as_chats(messages)]
        params = self._spread_params(sampling_params, len(tokenized))
        return Stream(prompts=tuple(tokenized), deltas=self._stream(tokenized, params))

    # ---- prompts and params ----

    def _tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        return tokenize(prompt, self._parts.tokenizer, self._parts.model.spec.vocab_size)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        # Compiled once, and only for those who chat: the template engine takes 0.2 s to import.
        from octavo.runtime.chat_template import ChatTemplate  # noqa: PLC0415

        return ChatTemplate(self._parts.tokenizer)

    def _render(self, messages: Sequence[Message]) -> TokenizedPrompt:
        rendered = self._chat_template.render(messages, add_generation_prompt=True)
        token_ids = self._parts.tokenizer.encode(rendered, add_special_tokens=False)
        return TokenizedPrompt(text=rendered, token_ids=tuple(token_ids))

    @staticmethod
    def _spread_params(
        params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * num_prompts
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidParameterError("not SamplingParams, nor a list of them", param="sampling_params")
        if len(params) != num_prompts:
            raise InvalidParameterError(
                f"{len(params)} sampling params for {num_prompts} prompts",
                param="sampling_params",
                hints=("give one for all, or one per prompt",),
            )
        return params

    # ---- running ----

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        cache_salt: str | None,
    ) -> list[RequestOutput]:
        outputs = [
            RequestOutput(
                request_id=str(index),
                prompt=prompt.text,
                prompt_token_ids=list(prompt.token_ids),
                outputs=[
                    CompletionOutput(index=choice, logprobs=[] if one.logprobs is not None else None)
                    for choice in range(one.n)
                ],
                prompt_logprobs=[None] if one.prompt_logprobs is not None else None,
            )
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        for delta in self._stream(prompts, params, priority, cache_salt):
            self._collect(outputs[int(delta.request_id)], delta)
        return outputs

    def _stream(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> Generator[OutputDelta, None, None]:
        """Queue all prompts, or none if one is refused; then step until they are done.

        Calls may overlap: streams read in turns, or threads. Whoever wants a delta steps the engine for all, and
        leaves what belongs to other calls in their inboxes.
        """
        with self._lock:
            call = str(self._num_calls)
            self._num_calls += 1
            self._inboxes[call] = deque()
        request_ids = [f"{call}-{index}" for index in range(len(prompts))]
        try:
            with self._lock:
                for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                    self._parts.engine.add(
                        EngineRequest(
                            request_id=request_ids[index],
                            prompt_token_ids=prompt.token_ids,
                            params=one,
                            priority=priority[index] if priority is not None else 0,
                            cache_salt=cache_salt,
                        )
                    )
            num_left = sum(one.n for one in params)
            while num_left:
                delta = self._next_delta(call)
                num_left -= delta.finish_reason is not None
                yield replace(delta, request_id=delta.request_id.removeprefix(f"{call}-"))
        finally:
            with self._lock:
                for request_id in request_ids:
                    self._parts.engine.abort(request_id)
                del self._inboxes[call]
                self._sort(self._parts.engine.collect())

    def _next_delta(self, call: str) -> OutputDelta:
        with self._lock:
            while not self._inboxes[call]:
                assert self._parts.engine.has_unfinished, "an answer has no end"
                self._sort(self._parts.engine.step())
            return self._inboxes[call].popleft()

    def _sort(self, deltas: Sequence[OutputDelta]) -> None:
        """Put deltas into the inboxes of their calls; those of a call that has been left are dropped."""
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id.partition("-")[0])
            if inbox is not None:
                inbox.append(delta)

    def _collect(self, output: RequestOutput, delta: OutputDelta) -> None:
        answer = output.outputs[delta.index]
        answer.text += delta.text
        answer.token_ids.extend(delta.token_ids)
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        answer.stop_reason = delta.stop_reason if delta.stop_reason is not None else answer.stop_reason
        output.num_cached_tokens = delta.num_cached_tokens
        if answer.logprobs is not None:
            answer.logprobs.extend(self.candidates(entry) for entry in delta.logprobs)
        if output.prompt_logprobs is not None:
            output.prompt_logprobs.extend(self.candidates(entry) for entry in delta.prompt_logprobs)

    def candidates(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Return what could have stood at one place, by token id, the chosen token first."""
        places = [(entry.token_id, entry.logprob, entry.rank)]
        places += [
            (token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
            if token_id != entry.token_id
        ]
        spell = self._parts.tokenizer.token_bytes
        return {
            int(token_id): Logprob(
                logprob=logprob, rank=rank, decoded_token=spell(token_id).decode("utf-8", errors="replace")
            )
            for token_id, logprob, rank in places
        }


def _as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidParameterError(
            f"{type(messages).__name__} is not a list of messages",
            param="messages",
            hints=('write [{"role": "user", "content": "..."}]',),
        )
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]
