"""AsyncRig: an AsyncLLM over a fake runner that a test lets through step by step.

    async with AsyncRig(CoreSetup(num_blocks=12)) as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("a", [1, 2, 3]))
        await rig.runner.reached()          # a step is being computed, and stays so
        stream.close()
        rig.runner.release()
        await rig.at_rest()                 # nothing runs, no block is held, every gauge is 0

No model and no tokenizer file: a token spells its own number. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, cast

from octavo.config.resolved import ResolvedConfig
from octavo.core.events import Event, EventLog, RequestFinished, StepScheduled
from octavo.core.invariants import check_idle, check_scheduler
from octavo.core.sampling import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.llm.answer_stream import AnswerStream
from octavo.llm.assemble import Assembled
from octavo.llm.async_llm import AsyncLLM
from octavo.testing.engine_rig import HandClock
from octavo.testing.factories import CoreSetup, make_request, make_runner, make_scheduler, solo_output

WAIT_S = 30.0


class NumberSpeller:
    """Token 7 spells "7 "."""

    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id

    def is_special(self, token_id: int) -> bool:
        return False


class HeldRunner:
    """A FakeRunner that can be held in the middle of a step, and told to fail.

    Args:
        setup: Shape of its shadow cache.
    """

    def __init__(self, setup: CoreSetup) -> None:
        self._inner = make_runner(setup)
        self._changed = threading.Condition()
        self._num_permits: int | None = None
        self._is_in_step = False
        self.failures: list[BaseException] = []
        self.num_steps = 0

    def hold(self) -> None:
        """Stop in the middle of the next step."""
        with self._changed:
            self._num_permits = 0

    def release(self, num_steps: int | None = None) -> None:
        """Let so many steps through, or all."""
        with self._changed:
            self._num_permits = num_steps
            self._changed.notify_all()

    async def reached(self) -> None:
        """Wait until a step is held."""

        def wait() -> None:
            with self._changed:
                held = self._changed.wait_for(lambda: self._is_in_step and self._num_permits == 0, WAIT_S)
                assert held, "no step was begun"

        await asyncio.to_thread(wait)

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def execute(self, plan: StepPlan) -> StepResult:
        with self._changed:
            self._is_in_step = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_permits != 0, WAIT_S), "nobody released the step"
            if self._num_permits is not None:
                self._num_permits -= 1
            self._is_in_step = False
        self.num_steps += 1
        if self.failures:
            raise self.failures.pop(0)
        return self._inner.execute(plan)


class AsyncRig:
    """An AsyncLLM and everything in it; a context that starts and stops it.

    Args:
        setup: Shape of the core.
        clock: Tells the time to engine and thread; a `HandClock` unless given.
        options: For `AsyncLLM.from_parts`.
    """

    def __init__(self, setup: CoreSetup | None = None, *, clock: Any = None, **options: Any) -> None:
        self.setup = setup or CoreSetup()
        self.clock = clock or HandClock()
        self.runner = HeldRunner(self.setup)
        events = EventLog()
        self.scheduler = make_scheduler(self.setup, events)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            events=events,
            clock=self.clock,
            vocab_size=self.setup.vocab_size,
            tokenizer=NumberSpeller(),
            seed=7,
        )
        parts = Assembled(
            engine=self.engine,
            tokenizer=cast("Any", NumberSpeller()),
            model=cast("Any", None),
            resolved=make_resolved(self.setup),
            card=cast("Any", None),
        )
        self.llm = AsyncLLM.from_parts(parts, clock=self.clock, **options)
        self.events: list[Event] = []
        self.engine.subscribe(self.events.extend)

    async def __aenter__(self) -> Self:
        self.llm.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.runner.release()
        await self.llm.stop()

    async def at_rest(self) -> None:
        """Check that nothing runs and nothing is held, after whatever has been asked so far."""
        await asyncio.wait_for(self.llm.call(self._check_at_rest), WAIT_S)
        health = self.llm.health
        assert (health.num_running, health.num_waiting, health.last_step_age_s) == (0, 0, 0.0)

    async def submit_in_a_step(self, messages: Sequence[EngineRequest]) -> list[AnswerStream]:
        """Submit while a step is held, let it end, and return once the next one is held."""
        await self.runner.reached()
        num_before = self.llm.health.num_running + self.llm.health.num_waiting
        tasks = [asyncio.create_task(self.llm.submit(one)) for one in messages]
        num_answers = sum(one.params.n for one in messages)
        await until(lambda: self.llm.health.num_running + self.llm.health.num_waiting == num_before + num_answers)
        self.runner.release(1)
        streams = await asyncio.gather(*tasks)
        await self.runner.reached()
        return streams

    async def answer(self, message: EngineRequest) -> dict[int, tuple[list[int], str, str]]:
        """Return, for each answer, its tokens, its text and why it ended."""
        tokens: dict[int, list[int]] = {index: [] for index in range(message.params.n)}
        texts: dict[int, str] = dict.fromkeys(tokens, "")
        reasons: dict[int, str] = {}
        async for delta in self.llm.generate(message):
            take(delta, tokens, texts, reasons)
        return {index: (tokens[index], texts[index], reasons[index]) for index in tokens}

    def alone(self, message: EngineRequest) -> dict[int, tuple[list[int], str, str]]:
        """Return what `answer` must return: computed from the prompt, with no engine at all."""
        answers = {}
        for index in range(message.params.n):
            request = make_request(message.prompt_token_ids, seed=(message.params.seed or 0) + index)
            request.params = message.params
            tokens, reason = solo_output(request, self.setup)
            answers[index] = (tokens, "".join(f"{token} " for token in tokens), reason)
        return answers

    def reasons(self) -> dict[str, int]:
        """Return how many answers have ended, by reason."""
        counts: dict[str, int] = {}
        for event in self.events:
            if isinstance(event, RequestFinished):
                counts[event.reason] = counts.get(event.reason, 0) + 1
        return counts

    def num_steps(self) -> int:
        return sum(isinstance(event, StepScheduled) for event in self.events)

    def _check_at_rest(self, engine: Engine) -> None:
        assert not self.scheduler.has_unfinished
        check_scheduler(self.scheduler)
        check_idle(self.scheduler.kv_cache)
        assert engine.snapshot().num_used_blocks == 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds that another thread changes."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it is no task of this loop that could set an event
            await asyncio.sleep(0.001)


def message(request_id: str, prompt: Iterable[int] | int = 5, **params: Any) -> EngineRequest:
    """Return a request; `params` go to `SamplingParams` (8 tokens, seed 0 unless they say otherwise)."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(prompt) if isinstance(prompt, int) else prompt),
        params=SamplingParams(**{"max_tokens": 8, "seed": 0, **params}),
    )


def take(delta: OutputDelta, tokens: dict[int, list[int]], texts: dict[int, str], reasons: dict[int, str]) -> None:
    """Add a delta to what has been read of each answer."""
    assert delta.index not in reasons, "a delta came after the end"
    tokens[delta.index].extend(delta.token_ids)
    texts[delta.index] += delta.text
    if delta.finish_reason is not None:
        reasons[delta.index] = delta.finish_reason


def make_resolved(setup: CoreSetup) -> ResolvedConfig:
    """Return the config of an engine of this shape."""
    return ResolvedConfig(
        model="fake",
        runner="reference",
        threads=1,
        seed=None,
        weight_dtype="stored",
        kv_cache_dtype="f16",
        kv_allocator=setup.allocator,
        kv_prefault=False,
        block_size=setup.block_size,
        num_blocks=setup.num_blocks,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        enable_prefix_caching=setup.is_caching,
        scheduling_policy=setup.policy,
        available_bytes=0,
        weight_bytes=0,
        activation_bytes=0,
        overhead_bytes=0,
        block_bytes=1024,
        kv_pool_bytes=1024 * (setup.num_blocks + 1),
        max_request_blocks=setup.max_model_len // setup.block_size,
        reasons={},
    )
