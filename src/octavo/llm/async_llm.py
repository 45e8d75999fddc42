"""AsyncLLM: an engine on a thread of its own, asyncio in front of it. What a server is built on.

    llm = AsyncLLM(config)             # loads; blocks
    llm.start()
    async for delta in llm.generate(EngineRequest(request_id="1", prompt_token_ids=ids, params=SamplingParams())):
        print(delta.text, end="")
    await llm.drain(30.0)
    await llm.stop()

Every request gets an answer: its deltas up to one with a `finish_reason` per answer, or an error. "abort" ends what
somebody aborted (also a drain whose time was up, and `stop`), "error" what was in a step that failed; a stream raises
`EngineStoppedError` if the engine itself is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.config.engine import EngineConfig, KVDtype
from octavo.config.resolved import ResolvedConfig
from octavo.core.events import Event
from octavo.core.ports import Clock, Grammar
from octavo.engine.advice import PoolFacts
from octavo.engine.clock import MonotonicClock
from octavo.engine.engine import Engine, EventListener
from octavo.engine.explain import ExplainLog, Explanation
from octavo.engine.live_view import LiveView
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.errors import EngineStoppedError, OctavoError
from octavo.llm.answer_stream import AnswerStream
from octavo.llm.assemble import Assembled, assemble
from octavo.llm.engine_thread import EngineThread
from octavo.llm.health import Health
from octavo.llm.output_queue import Bell, OutputQueue
from octavo.models.download import Progress
from octavo.planner.card import Card
from octavo.planner.memory import kv_shape
from octavo.planner.pool import usable_blocks
from octavo.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.runtime.chat_template import ChatTemplate

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

DEFAULT_MAX_WAITING = 1024
DEFAULT_STALL_S = 10.0
STOP_TIMEOUT_S = 10.0


class AsyncLLM:
    """A model, ready to answer many at a time.

    Made by a blocking call; everything `async` belongs to an event loop, and several loops may share one engine.
    Requests may be queued before `start`.

    Args:
        config: What is asked of the engine.
        max_waiting: Answers that may wait beyond the seats of a step (`max_num_seqs`); more are refused.
        stall_s: Seconds without a finished step, while work is pending, after which `health.is_stalled`.
        progress, on_card: As for `LLM`.

    Raises:
        OctavoError: see `octavo.errors`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_waiting: int = DEFAULT_MAX_WAITING,
        stall_s: float = DEFAULT_STALL_S,
        progress: Progress | None = None,
        on_card: Callable[[Card], None] | None = None,
    ) -> None:
        parts = assemble(config, purpose="serving", progress=progress, on_card=on_card)
        self._set_up(parts, max_waiting, stall_s, MonotonicClock())

    @classmethod
    def from_parts(
        cls,
        parts: Assembled,
        *,
        max_waiting: int = DEFAULT_MAX_WAITING,
        stall_s: float = DEFAULT_STALL_S,
        clock: Clock | None = None,
    ) -> AsyncLLM:
        """Put a thread around an engine that is there already; nobody else may touch it any more."""
        llm = cls.__new__(cls)
        llm._set_up(parts, max_waiting, stall_s, clock or MonotonicClock())  # noqa: SLF001 - its own class
        return llm

    def _set_up(self, parts: Assembled, max_waiting: int, stall_s: float, clock: Clock) -> None:
        self._parts = parts
        self._bells: dict[asyncio.AbstractEventLoop, Bell] = {}
        self._bells_lock = threading.Lock()
        # A pool of its own: a queue of slow schemas must not keep other work of the loop from a thread.
        self._compilers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="octavo-grammar")
        parts.engine.start_metrics(keeps_finished=False)
        self._explanations = ExplainLog(parts.engine)
        self.live = LiveView(
            parts.engine,
            model=parts.resolved.model,
            block_bytes=parts.resolved.block_bytes,
            facts=_pool_facts(parts),
        )
        for listener in (self._explanations.listen, self.live.listen):
            parts.engine.subscribe(_unless_it_fails(listener))
        self._refusal_listeners: list[Callable[[OctavoError], None]] = []
        self._thread = EngineThread(parts.engine, max_waiting=max_waiting, stall_s=stall_s, clock=clock)

    # ---- facts ----

    @property
    def card(self) -> Card:
        """Where the memory goes, and why each value is what it is."""
        return self._parts.card

    @property
    def resolved(self) -> ResolvedConfig:
        return self._parts.resolved

    @property
    def model_name(self) -> str:
        """The model as it was asked for."""
        return self._parts.resolved.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; compiled when it is first asked for.

        Raises:
            InvalidParameterError: the model has none.
        """
        from octavo.runtime.chat_template import ChatTemplate  # noqa: PLC0415 - the template engine takes 0.2 s

        return ChatTemplate(self._parts.tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._parts.engine.vocab_size

    @property
    def longest_request_tokens(self) -> int:
        """Most prompt + output tokens one request can have."""
        return self._parts.engine.longest_request_tokens

    @property
    def health(self) -> Health:
        return self._thread.health

    # ---- life ----

    def start(self) -> None:
        """Begin to answer. Once."""
        self._thread.start()

    async def drain(self, deadline_s: float) -> None:
        """Take no new requests, wait until none is left, and abort what is left after `deadline_s` seconds."""
        idle = asyncio.wrap_future(self._thread.drain())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(idle, deadline_s)
        self._thread.abort_all()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Abort everything and end the thread; a step that does not end in time is left behind."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.stop, timeout_s)

    # ---- requests ----

    async def generate(self, message: EngineRequest) -> AsyncGenerator[OutputDelta, None]:
        """Answer a prompt; leaving the generator in any way ends the request within one step.

        A wait for a delta that is cancelled leaves the generator, too; see `submit` where that is not wanted.

        Raises:
            As `submit`, before the first delta.
        """
        stream = await self.submit(message)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def submit(self, message: EngineRequest) -> AnswerStream:
        """Queue a prompt and return its answers to come, as soon as the engine has taken it: within one step.

        Raises:
            InvalidParameterError: a bad token id, an empty prompt, an id in use, a bad schema or expression.
            RequestTooLongError: it could never fit.
            QueueFullError: too many wait; `retry_after_s` says when to come back.
            EngineStoppedError: the engine drains, has been stopped, or has failed.
        """
        loop = asyncio.get_running_loop()
        grammar = await self._compile_grammar(message)
        queue = OutputQueue(message.request_id, message.params.n, self._bell(loop))
        try:
            self._thread.submit(message, queue, grammar)
        except OctavoError as refusal:
            for listener in self._refusal_listeners:
                listener(refusal)
            raise
        stream = AnswerStream(self._thread, queue, loop, num_answers=message.params.n)
        try:
            await queue.accepted()
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets the end of every answer. From any thread; an unknown id is nothing."""
        self._thread.abort(request_id)

    # ---- looking in ----

    def explain(self, request_id: str) -> Explanation | None:
        """Return why a request takes, or took, what it does; `None` if it is unknown or long over. At once."""
        return self._explanations.find(request_id)

    async def look(self) -> dict[str, Any]:
        """Return the pool, its requests and the last minute: `octavo.kv/1`, as `octavo.engine.live_frame` describes it.

        The engine's thread copies, another one packs.

        Raises:
            EngineStoppedError: the engine has stopped.
        """
        frame = await self.call(lambda engine: self.live.freeze(engine.snapshot()))
        return await asyncio.to_thread(frame.as_dict)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread between two steps, and return what it returns.

        Raises:
            EngineStoppedError: the engine has stopped.
            BaseException: what the function raised.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    def subscribe(self, listener: EventListener) -> None:
        """Call `listener` with the events of every step and arrival from now on, on the engine's thread.

        One that raises is not called again: whoever watches must not end what is watched.
        """
        self.watch(lambda _engine: listener)

    def watch(self, make_listener: Callable[[Engine], EventListener]) -> None:
        """As `subscribe`, for a listener that looks at the engine, too: made and called on the engine's thread."""
        engine = self._parts.engine
        self._thread.post(lambda: engine.subscribe(_unless_it_fails(make_listener(engine))))

    def subscribe_refusals(self, listener: Callable[[OctavoError], None]) -> None:
        """Call `listener` with the error of every request that was refused before the engine saw it, where it was."""
        self._refusal_listeners.append(listener)

    # ---- inside ----

    async def _compile_grammar(self, message: EngineRequest) -> Grammar | None:
        """Compile what the answers' text has to be, beside engine and event loop: it may take long."""
        if message.params.structured is None:
            return None
        compile_grammar = self._parts.engine.compile_grammar
        try:
            compiling = asyncio.get_running_loop().run_in_executor(self._compilers, compile_grammar, message.params)
        except RuntimeError as error:
            raise EngineStoppedError("the engine has been stopped") from error
        return await compiling

    def _bell(self, loop: asyncio.AbstractEventLoop) -> Bell:
        with self._bells_lock:
            for known in [known for known in self._bells if known.is_closed()]:
                del self._bells[known]
            return self._bells.setdefault(loop, Bell(loop))


def _unless_it_fails(listener: EventListener) -> EventListener:
    """Wrap a listener: what it raises is logged once, and it hears no more."""
    has_failed = False

    def listen(events: Sequence[Event]) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            listener(events)
        except Exception:  # noqa: BLE001 - whoever watches must not end what is watched
            has_failed = True
            _LOG.exception("A listener has failed and hears no more")

    return listen


_NARROWER: dict[KVDtype, KVDtype] = {"f32": "f16", "f16": "int8", "bf16": "int8"}
"""What advice may recommend; 4 bits cost too much accuracy for that."""


def _pool_facts(parts: Assembled) -> PoolFacts:
    resolved = parts.resolved
    return PoolFacts(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        is_reserved=resolved.kv_allocator == "reserved",
        narrower=_narrower_pool(parts),
    )


def _narrower_pool(parts: Assembled) -> tuple[str, int] | None:
    resolved = parts.resolved
    dtype = _NARROWER.get(resolved.kv_cache_dtype)
    # A pool that was asked for in blocks has as many in any form.
    if dtype is None or "num_blocks" not in resolved.reasons:
        return None
    shape = kv_shape(parts.model.spec, kv_dtype=dtype, block_size=resolved.block_size)
    return dtype, usable_blocks(resolved.kv_pool_bytes, shape.block_bytes)
