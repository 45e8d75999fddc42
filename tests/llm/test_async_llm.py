"""AsyncLLM: every request gets its answer or an error, whoever leaves, fails or is slow, and the books end at zero.

The runner is a fake that a test lets through step by step, so that each race is staged and not hoped for.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from octavo.config.sources import ask, keyword_source
from octavo.core.events import RequestArrived, RequestFinished
from octavo.engine.advice import PoolFacts
from octavo.engine.messages import OutputDelta
from octavo.errors import EngineStoppedError, InvalidParameterError, QueueFullError, RequestTooLongError
from octavo.llm.answer_stream import AnswerStream
from octavo.llm.async_llm import AsyncLLM
from octavo.testing.async_rig import AsyncRig, message, take, until
from octavo.testing.factories import CoreSetup
from octavo.testing.tiny_models import TinyModel, write_hf_model

DEADLINE_S = 60.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own, within a deadline."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), DEADLINE_S))

    return run


async def read(stream: AnswerStream) -> list[OutputDelta]:
    return [delta async for delta in stream]


# ---- answers ----


@on_a_loop
async def test_many_at_once_get_the_answers_they_get_alone() -> None:
    """A pool that is too small for all of them, so that some are preempted on the way."""
    rng = random.Random(1)
    messages = [
        message(
            f"r{index}",
            [rng.randrange(3) for _ in range(rng.randrange(1, 30))],
            n=rng.choice([1, 1, 1, 3]),
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randrange(1, 20),
            seed=index,
        )
        for index in range(60)
    ]
    async with AsyncRig(CoreSetup(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=16)) as rig:
        answers = await asyncio.gather(*map(rig.answer, messages))
        await rig.at_rest()

    assert answers == [rig.alone(one) for one in messages]
    assert any(isinstance(event, RequestFinished) and event.num_preemptions for event in rig.events)
    assert set(rig.reasons()) == {"length"}


@on_a_loop
async def test_requests_can_wait_for_the_start() -> None:
    rig = AsyncRig()
    task = asyncio.create_task(rig.answer(message("early")))
    await until(lambda: rig.llm.health.num_waiting == 1)
    assert not rig.llm.health.is_alive

    async with rig:
        assert await task == rig.alone(message("early"))


@on_a_loop
async def test_an_idle_engine_sleeps_and_wakes_at_once() -> None:
    async with AsyncRig() as rig:
        turns = 0
        collect = rig.engine.collect

        def count() -> list[OutputDelta]:
            nonlocal turns
            turns += 1
            return collect()

        rig.engine.collect = count  # type: ignore[method-assign]
        await rig.answer(message("a"))
        await rig.at_rest()
        before = turns
        await asyncio.sleep(0.2)
        await rig.at_rest()

        assert turns - before <= 3, "the engine's thread went on while there was nothing to do"


@on_a_loop
async def test_two_loops_share_one_engine() -> None:
    async with AsyncRig() as rig:
        here = asyncio.create_task(rig.answer(message("here", [1, 2], max_tokens=30)))
        there = await asyncio.to_thread(lambda: asyncio.run(rig.answer(message("there", [3, 4], max_tokens=30))))

        assert await here == rig.alone(message("here", [1, 2], max_tokens=30))
        assert there == rig.alone(message("there", [3, 4], max_tokens=30))
        await rig.at_rest()


@on_a_loop
async def test_a_step_wakes_a_loop_once_however_many_read() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        streams = [await rig.llm.submit(message("first", max_tokens=9))]
        streams += await rig.submit_in_a_step([message(f"r{index}", [index], max_tokens=5) for index in range(7)])
        loop = asyncio.get_running_loop()
        wake_ups: list[object] = []
        call_soon = loop.call_soon_threadsafe

        def count(callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
            if "Bell" in getattr(callback, "__qualname__", ""):
                wake_ups.append(callback)
            return call_soon(callback, *args, **kwargs)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        rig.runner.release()
        await asyncio.gather(*map(read, streams))
        num_steps = rig.num_steps()

        assert len(wake_ups) <= num_steps
        assert num_steps < 8 * 5


# ---- slow readers ----


@on_a_loop
async def test_a_slow_reader_finds_its_deltas_joined_and_delays_nobody() -> None:
    async with AsyncRig() as rig:
        slow_message = message("slow", [1, 2, 3], n=2, temperature=1.0, max_tokens=50, logprobs=0)
        slow = await rig.llm.submit(slow_message)
        fast = [await rig.answer(message(f"fast{index}", [index], max_tokens=60)) for index in range(3)]
        assert all(answer[0][2] == "length" for answer in fast)
        await rig.at_rest()

        deltas = await read(slow)

        assert len(deltas) == 2, "one delta per answer, whatever the number of steps"
        tokens: dict[int, list[int]] = {0: [], 1: []}
        texts = {0: "", 1: ""}
        reasons: dict[int, str] = {}
        for delta in deltas:
            take(delta, tokens, texts, reasons)
            assert len(delta.logprobs) == len(delta.token_ids) == 50
        assert {index: (tokens[index], texts[index], reasons[index]) for index in (0, 1)} == rig.alone(slow_message)


@on_a_loop
async def test_a_wait_for_a_delta_can_be_given_up_and_done_again() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("a"))
        got: list[OutputDelta] = []
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            rig.runner.release(1)
            got.append(await anext(stream))
        rig.runner.release()
        got += await read(stream)

        assert [token for delta in got for token in delta.token_ids] == rig.alone(message("a"))[0][0]
        stream.close()
        await rig.at_rest()


# ---- leaving, in every phase ----


async def leave_by_closing(stream: AnswerStream) -> None:
    stream.close()


async def leave_by_cancelling(stream: AnswerStream) -> None:
    """The way a server's request task dies: in the middle of a wait."""

    async def serve() -> None:
        try:
            await read(stream)
        finally:
            stream.close()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancelling])
@on_a_loop
async def test_a_hundred_clients_that_leave_while_they_are_queued_cost_no_step(leave: Callable[..., Any]) -> None:
    async with AsyncRig(CoreSetup(max_num_seqs=1)) as rig:
        rig.runner.hold()
        first = await rig.llm.submit(message("first", max_tokens=100))
        streams = await rig.submit_in_a_step([message(f"r{index}", [index]) for index in range(100)])
        num_steps = rig.num_steps()
        for stream in (*streams, first):
            await leave(stream)
        rig.runner.release()
        await rig.at_rest()

        assert rig.num_steps() == num_steps
        assert rig.reasons() == {"abort": 101}
        assert not any(event.num_output_tokens for event in rig.events if isinstance(event, RequestFinished)
                       and event.request_id != "first")  # fmt: skip


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancelling])
@on_a_loop
async def test_a_client_that_leaves_during_a_long_prompt_ends_it_with_that_step(leave: Callable[..., Any]) -> None:
    """200 tokens in chunks of 8: 25 steps, of which one is computed."""
    async with AsyncRig(CoreSetup(max_num_batched_tokens=8)) as rig:
        for index in range(20):
            rig.runner.hold()
            stream = await rig.llm.submit(message(f"r{index}", [index, *range(199)]))
            await rig.runner.reached()
            num_steps = rig.num_steps()
            await leave(stream)
            rig.runner.release()
            await rig.at_rest()
            assert rig.num_steps() == num_steps, "a step was computed for nobody"

        assert rig.reasons() == {"abort": 20}


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancelling])
@on_a_loop
async def test_a_hundred_clients_that_leave_in_mid_stream_end_within_a_step(leave: Callable[..., Any]) -> None:
    async with AsyncRig(CoreSetup(num_blocks=400, max_num_seqs=100, max_num_batched_tokens=200)) as rig:
        rig.runner.hold()
        streams = [await rig.llm.submit(message("first", max_tokens=200))]
        streams += await rig.submit_in_a_step(
            [message(f"r{index}", [index], n=1 + index % 2, max_tokens=200) for index in range(65)]
        )
        rig.runner.release(3)
        for stream in streams:
            await anext(stream)
        await rig.runner.reached()
        num_steps = rig.num_steps()
        for stream in streams:
            await leave(stream)
        rig.runner.release()
        await rig.at_rest()

        assert rig.num_steps() == num_steps
        assert rig.reasons() == {"abort": 98}
        arrived = [event for event in rig.events if isinstance(event, RequestArrived)]
        assert len(arrived) == 98
        ended = [event for event in rig.events if isinstance(event, RequestFinished)]
        assert rig.engine.metrics.num_output_tokens == sum(event.num_output_tokens for event in ended) > 0


@on_a_loop
async def test_a_generator_that_is_left_ends_its_request() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        never_begun = rig.llm.generate(message("never begun"))
        await never_begun.aclose()
        begun = rig.llm.generate(message("begun", max_tokens=200))
        rig.runner.release(1)
        await anext(begun)
        await rig.runner.reached()
        await begun.aclose()
        rig.runner.release()
        await rig.at_rest()

        assert rig.reasons() == {"abort": 1}, "what was never begun was never sent"


@on_a_loop
async def test_a_call_that_is_cancelled_before_the_engine_has_taken_it_leaves_nothing() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        busy = await rig.llm.submit(message("busy"))
        await rig.runner.reached()
        task = asyncio.create_task(rig.llm.submit(message("late")))
        await until(lambda: rig.llm.health.num_running + rig.llm.health.num_waiting == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rig.runner.release()
        await read(busy)
        await rig.at_rest()

        assert rig.reasons() == {"length": 1, "abort": 1}


@on_a_loop
async def test_a_stream_that_is_forgotten_ends_its_request() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("forgotten", max_tokens=200))
        await rig.runner.reached()
        del stream
        gc.collect()
        await asyncio.sleep(0)
        rig.runner.release()
        await rig.at_rest()

        assert rig.reasons() == {"abort": 1}


@on_a_loop
async def test_a_closed_loop_takes_its_requests_along() -> None:
    async with AsyncRig() as rig:

        async def begin() -> AnswerStream:
            stream = await rig.llm.submit(message("orphan", max_tokens=240))
            await anext(stream)
            return stream

        rig.runner.release(2)
        loop = asyncio.new_event_loop()
        stream = await asyncio.to_thread(loop.run_until_complete, begin())
        await rig.runner.reached()
        loop.close()
        rig.runner.release()
        await until(lambda: rig.llm.health.num_running + rig.llm.health.num_waiting == 0)
        await rig.at_rest()

        assert rig.reasons() == {"abort": 1}
        stream.close()


@on_a_loop
async def test_abort_from_any_thread_gives_the_reader_an_end() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("a", n=2, max_tokens=200))
        await rig.runner.reached()
        thread = threading.Thread(target=rig.llm.abort, args=("a",))
        thread.start()
        thread.join()
        rig.runner.release()
        deltas = await read(stream)
        rig.llm.abort("a")
        rig.llm.abort("never seen")
        await rig.at_rest()

        assert sorted(delta.index for delta in deltas if delta.finish_reason == "abort") == [0, 1]


@on_a_loop
async def test_an_old_stream_cannot_end_the_new_request_of_its_id() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        old = await rig.llm.submit(message("same", max_tokens=200))
        await rig.runner.reached()
        rig.llm.abort("same")
        new = asyncio.create_task(rig.answer(message("same", [4, 5])))
        await asyncio.sleep(0)
        old.close()
        rig.runner.release()

        assert await new == rig.alone(message("same", [4, 5]))
        assert rig.reasons() == {"abort": 1, "length": 1}


# ---- refusals ----


@on_a_loop
async def test_what_cannot_be_taken_is_refused_before_the_first_delta() -> None:
    async with AsyncRig(CoreSetup(max_model_len=50)) as rig:
        rig.runner.hold()
        first = await rig.llm.submit(message("a", max_tokens=40))
        with pytest.raises(InvalidParameterError, match="in use"):
            await rig.submit_in_a_step([message("a", [9])])
        with pytest.raises(RequestTooLongError):
            await rig.submit_in_a_step([message("long", 60)])
        with pytest.raises(InvalidParameterError, match="not a token id"):
            await rig.submit_in_a_step([message("bad", [1000])])
        with pytest.raises(InvalidParameterError, match="prompt"):
            await rig.submit_in_a_step([message("empty", [])])
        rig.runner.release()

        tokens = [token for delta in await read(first) for token in delta.token_ids]
        assert tokens == rig.alone(message("a", max_tokens=40))[0][0], "a request was harmed by one with its id"
        await rig.at_rest()
        assert rig.reasons() == {"length": 1}


@on_a_loop
async def test_a_message_that_breaks_the_engines_own_code_ends_alone() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        good = await rig.llm.submit(message("good", max_tokens=30))
        with pytest.raises(TypeError):
            await rig.submit_in_a_step([message("bad", ["not", "ids"])])  # type: ignore[list-item]
        rig.runner.release()

        assert len([delta for delta in await read(good) if delta.finish_reason == "length"]) == 1
        assert rig.llm.health.is_alive
        await rig.at_rest()


@on_a_loop
async def test_overload_answers_everybody_and_says_when_to_come_back() -> None:
    """Ten times as many as may wait, all at once; whoever is refused comes back until it is taken."""
    async with AsyncRig(CoreSetup(max_num_seqs=2, num_blocks=16), max_waiting=4) as rig:
        messages = [message(f"r{index}", [index % 7, 1], seed=index, max_tokens=4) for index in range(60)]
        num_refused = 0

        async def insist(one: Any) -> Any:
            nonlocal num_refused
            while True:
                try:
                    return await rig.answer(one)
                except QueueFullError as refusal:
                    num_refused += 1
                    assert 1 <= refusal.retry_after_s <= 60
                    await asyncio.sleep(0)

        rig.runner.hold()
        tasks = [asyncio.create_task(insist(one)) for one in messages]
        await until(lambda: num_refused >= 60 - 6)
        assert rig.llm.health.num_running + rig.llm.health.num_waiting == 6
        rig.runner.release()
        answers = await asyncio.gather(*tasks)
        await rig.at_rest()

        assert answers == [rig.alone(one) for one in messages]


@on_a_loop
async def test_a_request_with_more_answers_than_places_is_taken_when_it_is_alone() -> None:
    async with AsyncRig(CoreSetup(max_num_seqs=2), max_waiting=0) as rig:
        many = message("many", n=5, temperature=1.0)
        assert await rig.answer(many) == rig.alone(many)

        rig.runner.hold()
        stream = await rig.llm.submit(message("one"))
        with pytest.raises(QueueFullError):
            await rig.llm.submit(many)
        rig.runner.release()
        await read(stream)


@on_a_loop
async def test_retry_after_follows_the_rate_at_which_requests_end() -> None:
    async with AsyncRig(CoreSetup(max_num_seqs=1), max_waiting=30) as rig:
        for index in range(20):
            await rig.answer(message(f"done{index}", max_tokens=1))
        rig.clock.time_s += 10
        rig.runner.hold()
        streams = [asyncio.create_task(rig.llm.submit(message(f"r{index}"))) for index in range(31)]
        await until(lambda: (rig.llm.health.num_running, rig.llm.health.num_waiting) == (1, 30))

        with pytest.raises(QueueFullError) as caught:
            await rig.llm.submit(message("one more"))
        rig.runner.release()
        for stream in streams:
            (await stream).close()

        assert caught.value.retry_after_s == 15, "30 wait, and 2 end per second"


# ---- failures ----


@on_a_loop
async def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    async with AsyncRig(CoreSetup(max_num_seqs=1)) as rig:
        rig.runner.hold()
        doomed = await rig.llm.submit(message("doomed"))
        await rig.runner.reached()
        waiting = asyncio.create_task(rig.answer(message("waiting")))
        rig.runner.failures.append(RuntimeError("the fault"))
        rig.runner.release()

        assert [delta.finish_reason for delta in await read(doomed)] == ["error"]
        assert await waiting == rig.alone(message("waiting"))
        assert rig.llm.health.is_alive
        await rig.at_rest()


@on_a_loop
async def test_failed_steps_that_are_not_in_a_row_are_survived() -> None:
    async with AsyncRig() as rig:
        for index in range(5):
            rig.runner.failures.append(RuntimeError("the fault"))
            assert (await rig.answer(message(f"bad{index}")))[0][2] == "error"
            assert await rig.answer(message(f"good{index}")) == rig.alone(message(f"good{index}"))
        assert rig.llm.health.is_alive


@on_a_loop
async def test_three_failed_steps_in_a_row_end_the_engine_and_answer_everybody() -> None:
    async with AsyncRig(CoreSetup(max_num_seqs=1)) as rig:
        rig.runner.hold()
        streams = [asyncio.create_task(rig.answer(message(f"r{index}"))) for index in range(8)]
        await rig.runner.reached()
        draining = asyncio.create_task(rig.llm.drain(DEADLINE_S))
        await asyncio.sleep(0)
        rig.runner.failures += [RuntimeError("the fault")] * 3
        rig.runner.release()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)

        assert outcomes[:2] == [{0: ([], "", "error")}] * 2
        assert all(isinstance(outcome, EngineStoppedError) for outcome in outcomes[2:])
        health = rig.llm.health
        assert (health.is_alive, health.failure) == (False, "RuntimeError: the fault")
        assert (health.num_running, health.num_waiting) == (0, 0)
        await draining
        with pytest.raises(EngineStoppedError, match="failed"):
            await rig.answer(message("late"))
        with pytest.raises(EngineStoppedError, match="failed"):
            await rig.llm.call(lambda _engine: None)
        assert rig.engine.snapshot().num_used_blocks == 0
    assert rig.llm.explain("r7") is not None


@on_a_loop
async def test_a_failure_outside_a_step_is_fatal_and_leaves_nobody_waiting() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("running"))
        await rig.runner.reached()
        rig.llm.subscribe(lambda _events: None)
        rig.llm._thread.post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        behind = [
            asyncio.create_task(rig.llm.call(lambda _engine: None)),
            asyncio.create_task(rig.answer(message("x"))),
        ]
        await asyncio.sleep(0)
        rig.runner.release()

        with pytest.raises(EngineStoppedError):
            await read(stream)
        outcomes = await asyncio.gather(*behind, return_exceptions=True)
        assert all(isinstance(outcome, EngineStoppedError) for outcome in outcomes)
        assert "ZeroDivisionError" in str(rig.llm.health.failure)


@on_a_loop
async def test_books_that_are_out_of_order_are_fatal_at_once() -> None:
    """A result that does not belong to the plan: the scheduler cannot take it in."""
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("a"))
        await rig.runner.reached()
        rig.scheduler.commit = lambda plan, result: 1 / 0  # type: ignore[method-assign, assignment]
        rig.runner.release()

        with pytest.raises(EngineStoppedError):
            await read(stream)
        assert not rig.llm.health.is_alive


@on_a_loop
async def test_what_a_called_function_raises_is_its_callers() -> None:
    async with AsyncRig() as rig:
        with pytest.raises(ZeroDivisionError):
            await rig.llm.call(lambda _engine: 1 / 0)

        assert await rig.llm.call(lambda engine: engine.vocab_size) == 1000
        assert rig.llm.health.is_alive


@on_a_loop
async def test_a_stalled_step_shows_in_health_and_an_idle_engine_never_does() -> None:
    async with AsyncRig(stall_s=10.0) as rig:
        rig.clock.time_s += 1000
        assert not rig.llm.health.is_stalled
        rig.runner.hold()
        stream = await rig.llm.submit(message("a"))
        await rig.runner.reached()
        rig.clock.time_s += 9
        assert not rig.llm.health.is_stalled
        rig.clock.time_s += 2
        health = rig.llm.health
        assert (health.is_stalled, health.is_alive, health.last_step_age_s) == (True, True, 11.0)
        assert (health.num_running, health.num_waiting) == (1, 0), "it is computed, however long that takes"
        rig.runner.release()
        await read(stream)
        await rig.at_rest()
        assert not rig.llm.health.is_stalled


# ---- the end ----


@on_a_loop
async def test_drain_waits_for_what_runs_and_refuses_what_comes() -> None:
    async with AsyncRig(CoreSetup(max_num_seqs=2), max_waiting=3) as rig:
        rig.runner.hold()
        tasks = [asyncio.create_task(rig.answer(message(f"r{index}"))) for index in range(5)]
        await rig.runner.reached()
        with pytest.raises(QueueFullError):
            await rig.answer(message("too many"))
        draining = asyncio.create_task(rig.llm.drain(DEADLINE_S))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="no new requests"):
            await rig.answer(message("late"))
        assert rig.llm.health.is_draining
        rig.runner.release()
        await draining

        assert [await task for task in tasks] == [rig.alone(message(f"r{index}")) for index in range(5)]
        await rig.at_rest()


@on_a_loop
async def test_drain_ends_what_is_left_when_its_time_is_up() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("a", max_tokens=200))
        await rig.runner.reached()
        await rig.llm.drain(0.01)
        rig.runner.release()

        assert [delta.finish_reason for delta in await read(stream)][-1] == "abort"
        await rig.at_rest()


@on_a_loop
async def test_stop_ends_every_stream_and_the_thread() -> None:
    rig = AsyncRig(CoreSetup(max_num_seqs=1))
    async with rig:
        rig.runner.hold()
        running = await rig.llm.submit(message("running", max_tokens=200))
        await rig.runner.reached()
        taken_late = asyncio.create_task(rig.answer(message("late")))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(rig.llm.stop())
        await asyncio.sleep(0)
        rig.runner.release()
        await stopping

        assert [delta.finish_reason for delta in await read(running)][-1] == "abort"
        assert await taken_late == {0: ([], "", "abort")}
        assert not rig.llm.health.is_alive
        assert rig.engine.snapshot().num_used_blocks == 0
        with pytest.raises(EngineStoppedError, match="stopped"):
            await rig.answer(message("after"))
        await rig.llm.stop()


@on_a_loop
async def test_a_step_that_never_ends_does_not_hold_up_the_stop() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("stuck"))
        await rig.runner.reached()
        await rig.llm.stop(timeout_s=0.01)

        with pytest.raises(EngineStoppedError):
            await read(stream)


@on_a_loop
async def test_stop_without_a_start_answers_what_was_queued() -> None:
    rig = AsyncRig()
    task = asyncio.create_task(rig.answer(message("a")))
    await asyncio.sleep(0)
    await rig.llm.stop()

    with pytest.raises(EngineStoppedError):
        await task


# ---- chance ----


@pytest.mark.parametrize("seed", range(4))
@on_a_loop
async def test_whatever_clients_do_everybody_is_answered_and_nothing_is_left(seed: int) -> None:
    """Clients that read, leave, are cancelled or aborted at random moments, and a step that fails in between."""
    rng = random.Random(seed)
    async with AsyncRig(CoreSetup(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=12), max_waiting=60) as rig:
        clients = [asyncio.create_task(client(rig, index, random.Random(rng.random()))) for index in range(150)]
        await clients[75]
        rig.runner.failures.append(RuntimeError("the fault"))
        outcomes = await asyncio.gather(*clients)
        await rig.answer(message("last"))
        await rig.at_rest()

        assert {"length", "left", "refused"} <= set(outcomes) <= {"length", "left", "refused", "abort", "error"}
        arrived = [event for event in rig.events if isinstance(event, RequestArrived)]
        assert sum(rig.reasons().values()) == len(arrived)
        assert rig.reasons()["error"] > 0
        assert rig.llm.health.is_alive


async def client(rig: AsyncRig, index: int, rng: random.Random) -> str:
    """Ask for something and do something with it; return how it went."""
    prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
    one = message(f"r{index}", prompt, n=rng.choice([1, 1, 2]), max_tokens=rng.randrange(1, 30), seed=index)
    fate = rng.choice(["read", "read", "abort", leave_by_closing, leave_by_cancelling])
    for _ in range(rng.randrange(30)):
        await asyncio.sleep(0)
    try:
        if fate == "read":
            answer = await rig.answer(one)
            reasons = {reason for _, _, reason in answer.values()}
            assert reasons != {"length"} or answer == rig.alone(one)
            return reasons.pop()
        stream = await rig.llm.submit(one)
    except QueueFullError:
        return "refused"
    for _ in range(rng.randrange(3)):
        await anext(stream, None)
    if callable(fate):
        await fate(stream)
        return "left"
    rig.llm.abort(one.request_id)
    await read(stream)
    return "abort"


# ---- watching ----


@on_a_loop
async def test_a_listener_that_fails_is_heard_of_once_and_hurts_nobody() -> None:
    async with AsyncRig() as rig:
        calls: list[int] = []
        heard: list[object] = []

        def fail(events: object) -> None:
            calls.append(1)
            raise RuntimeError("the fault")

        rig.llm.subscribe(fail)
        rig.llm.subscribe(heard.extend)
        assert await rig.answer(message("a")) == rig.alone(message("a"))
        await rig.at_rest()

        assert len(calls) == 1
        assert [event for event in heard if isinstance(event, RequestFinished)]
        assert rig.llm.health.is_alive


@on_a_loop
async def test_a_request_can_be_explained_and_the_pool_be_looked_at_while_it_runs() -> None:
    async with AsyncRig() as rig:
        rig.runner.hold()
        stream = await rig.llm.submit(message("a", 9))
        await rig.runner.reached()
        explanation = rig.llm.explain("a")
        looking = asyncio.create_task(rig.llm.look())
        await asyncio.sleep(0)
        rig.runner.release(1)
        document = await looking
        rig.runner.release()
        await read(stream)

        assert explanation is not None and explanation.as_dict()["status"] == "running"
        assert [request["id"] for request in document["requests"]] == ["a"]
        assert document["totals"]["referenced_blocks"] == 3
        assert (document["model"], document["block_bytes"]) == ("fake", 1024)
        assert rig.llm.explain("b") is None


@on_a_loop
async def test_records_and_times_of_finished_requests_do_not_pile_up() -> None:
    async with AsyncRig() as rig:
        for index in range(1100):
            (await rig.llm.submit(message(f"r{index}", [1], max_tokens=1))).close()
        await rig.at_rest()

        assert len(rig.llm._explanations) == 1000
        assert len(rig.engine.request_times) <= 1
        assert not rig.llm._thread._queues and not rig.llm._thread._inbox


def test_advice_knows_how_many_blocks_a_narrower_cache_would_have(tmp_path: Path) -> None:
    """Asked of the planner, and then of an engine made that way."""
    folder = str(write_hf_model(TinyModel(), tmp_path))
    sized = {"model": folder, "kv_cache_memory": "100KiB", "max_model_len": 64, "threads": 1}

    def facts(**options: object) -> PoolFacts:
        return AsyncLLM(ask(keyword_source(options)).config).live._facts

    wide = facts(**sized)
    assert wide.narrower is not None
    dtype, num_blocks = wide.narrower
    assert facts(**sized, kv_cache_dtype=dtype).num_blocks == num_blocks > wide.num_blocks
    assert facts(**sized, kv_cache_dtype="int8").narrower is None
    del sized["kv_cache_memory"]
    assert facts(**sized, num_blocks=20).narrower is None
