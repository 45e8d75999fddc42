"""The engine's loop: arrivals, text, endings, failures; with a scripted runner, so that every token is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from octavo.core.events import Event, EventLog, RequestArrived, RequestFinished
from octavo.core.invariants import check_idle, check_scheduler
from octavo.core.kv_cache import GroupSpec
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.sampling import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.errors import InvalidParameterError, RequestTooLongError
from octavo.testing.fake_runner import FakeRunner

EOS = 0


class ByteSpeller:
    """Token id i spells byte i; 0 and 1 are special."""

    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id < 2


class StepClock:
    """One second passes each time somebody asks."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s


class Bench:
    """An engine whose model says a fixed text, whatever it is asked."""

    def __init__(self, script: bytes = b"", *, num_blocks: int = 64, max_num_seqs: int = 8, runner=None) -> None:
        self.events = EventLog()
        self.kv_cache = PagedKVCache(num_blocks, 4, groups=[GroupSpec()], max_chunk_tokens=64, events=self.events)
        limits = Limits(max_model_len=100, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
        self.scheduler = Scheduler(self.kv_cache, limits, events=self.events)
        prompt_lengths: dict[str, int] = {}

        def say(row, history: Sequence[int]) -> int:
            at = len(history) - prompt_lengths[row.request_id.split("/")[0]]
            return script[at] if at < len(script) else ord("x")

        self._prompt_lengths = prompt_lengths
        self.runner = runner or FakeRunner(num_blocks=num_blocks, block_size=4, choose=say)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            events=self.events,
            clock=StepClock(),
            vocab_size=256,
            eos_token_ids=(EOS,),
            tokenizer=ByteSpeller(),
            seed=5,
        )
        self.published: list[Event] = []
        self.engine.subscribe(self.published.extend)

    def add(self, request_id: str = "a", prompt: Sequence[int] = (7, 8, 9), **params) -> None:
        self._prompt_lengths[request_id] = len(prompt)
        one = SamplingParams(**{"temperature": 0.0, **params})
        self.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=one))

    def finish(self, on_step: Callable[[list[OutputDelta]], None] | None = None) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        for _ in range(500):
            if not self.engine.has_unfinished:
                check_idle(self.kv_cache)
                return deltas
            new = self.engine.step()
            check_scheduler(self.scheduler)
            deltas += new
            if on_step is not None:
                on_step(new)
        raise AssertionError("the engine does not come to an end")


def text_of(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_an_answer_ends_at_max_tokens_with_reason_length() -> None:
    bench = Bench(b"hello world")
    bench.add(max_tokens=5)

    deltas = bench.finish()

    assert text_of(deltas) == "hello"
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]


def test_an_end_of_sequence_token_ends_an_answer_and_is_not_text() -> None:
    bench = Bench(b"hi\0never")
    bench.add(max_tokens=20)

    deltas = bench.finish()

    assert text_of(deltas) == "hi"
    assert [token for delta in deltas for token in delta.token_ids] == [*b"hi\0"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_and_a_stop_token_id_still_ends() -> None:
    bench = Bench(b"hi\0on\1ward")
    bench.add(max_tokens=20, ignore_eos=True, stop_token_ids=[1])

    deltas = bench.finish()

    assert text_of(deltas) == "hion"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", 1)


def test_min_tokens_bans_every_ending_token_until_it_is_reached() -> None:
    bench = Bench(b"abcdef")
    bench.add(max_tokens=6, min_tokens=3, stop_token_ids=[1])
    banned: list[tuple[int, ...]] = []
    bench.engine.subscribe_plans(lambda plan: banned.extend(row.banned_token_ids for row in plan.samples))

    bench.finish()

    assert banned == [(EOS, 1)] * 3 + [()] * 3


def test_a_stop_string_cuts_the_text_and_frees_the_request() -> None:
    bench = Bench(b"one two STOP three")
    bench.add(max_tokens=50, stop=["STOP"])

    deltas = bench.finish()

    assert text_of(deltas) == "one two "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")
    assert sum(len(delta.token_ids) for delta in deltas) == len("one two STOP")


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop_not_a_length() -> None:
    bench = Bench(b"go END")
    bench.add(max_tokens=6, stop=["END"])

    deltas = bench.finish()

    assert text_of(deltas) == "go "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")


def test_a_beginning_of_a_stop_string_is_delivered_when_the_answer_ends_without_it() -> None:
    bench = Bench(b"an EN")
    bench.add(max_tokens=5, stop=["END"])

    deltas = bench.finish()

    assert text_of(deltas) == "an EN"
    assert deltas[-1].finish_reason == "length"


def test_a_stop_string_before_min_tokens_does_not_end_the_answer() -> None:
    bench = Bench(b"END and END")
    bench.add(max_tokens=30, min_tokens=5, stop=["END"])

    deltas = bench.finish()

    assert text_of(deltas) == "END and "
    assert deltas[-1].stop_reason == "END"


def test_each_of_n_answers_ends_once_and_prompt_tokens_count_once_each() -> None:
    bench = Bench(b"abc")
    bench.add(max_tokens=3, n=3, temperature=1.0, seed=1)

    deltas = bench.finish()

    ends = [delta.index for delta in deltas if delta.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert {text_of([d for d in deltas if d.index == index]) for index in range(3)} == {"abc"}


def test_abort_ends_all_answers_in_every_state_and_leaves_nothing() -> None:
    for num_steps in range(6):
        bench = Bench(b"abcdefgh", max_num_seqs=2)
        bench.add("a", max_tokens=8, n=4)
        bench.add("b", max_tokens=8)
        for _ in range(num_steps):
            bench.engine.step()

        assert bench.engine.abort("a")
        assert not bench.engine.abort("a")

        deltas = bench.finish()
        ends = [(delta.index, delta.finish_reason) for delta in deltas if delta.request_id == "a"]
        assert sorted(ends) == [(index, "abort") for index in range(4)]
        reasons = [event.reason for event in bench.published if isinstance(event, RequestFinished)]
        assert len(reasons) == 5 and reasons.count("abort") == 4


def test_every_arrival_ends_exactly_once_in_the_events() -> None:
    bench = Bench(b"abcdefgh", num_blocks=8)
    for index in range(6):
        bench.add(str(index), prompt=range(10, 20), max_tokens=8)

    bench.finish()

    arrived = [event.request_id for event in bench.published if isinstance(event, RequestArrived)]
    finished = [event.request_id for event in bench.published if isinstance(event, RequestFinished)]
    assert sorted(arrived) == sorted(finished) == [str(index) for index in range(6)]


def test_a_refused_request_leaves_nothing_and_its_id_is_free() -> None:
    bench = Bench(b"ok")
    with pytest.raises(RequestTooLongError):
        bench.add("a", prompt=[5] * 90, max_tokens=50)

    assert not bench.engine.has_unfinished
    bench.add("a", max_tokens=2)
    assert text_of(bench.finish()) == "ok"


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("prompt_token_ids", {"prompt": [3, 256]}),
        ("prompt_token_ids", {"prompt": [-1]}),
        ("logit_bias", {"logit_bias": {300: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": [999]}),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(field: str, params: dict) -> None:
    bench = Bench()
    with pytest.raises(InvalidParameterError, match=r"0 to 255") as refused:
        bench.add("a", max_tokens=1, **params)
    assert refused.value.param == field


def test_two_requests_with_one_id_do_not_mix() -> None:
    bench = Bench(b"abc")
    bench.add("a", max_tokens=3)
    with pytest.raises(InvalidParameterError, match="in use"):
        bench.add("a", max_tokens=3)

    assert text_of(bench.finish()) == "abc"


class FailingRunner(FakeRunner):
    """Fails the steps whose numbers are listed."""

    failing_steps: frozenset[int] = frozenset()

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step in self.failing_steps:
            raise RuntimeError("out of luck")
        return super().execute(plan)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    runner = FailingRunner(num_blocks=64, block_size=4, choose=lambda row, history: ord("x"))
    runner.failing_steps = frozenset({1})
    bench = Bench(runner=runner, max_num_seqs=1)
    bench.add("a", max_tokens=4)
    bench.add("b", max_tokens=4)
    bench.engine.step()

    with pytest.raises(RuntimeError, match="out of luck"):
        bench.engine.step()
    check_scheduler(bench.scheduler)
    deltas = bench.finish()

    assert [delta.finish_reason for delta in deltas if delta.request_id == "a"] == ["error"]
    assert text_of([delta for delta in deltas if delta.request_id == "b"]) == "xxxx"
    reasons = {e.request_id: e.reason for e in bench.published if isinstance(e, RequestFinished)}
    assert reasons == {"a": "error", "b": "length"}


def test_unseeded_requests_draw_different_seeds_and_repeat_with_the_engine_seed() -> None:
    def seeds() -> list[int]:
        bench = Bench(b"a")
        drawn: list[int] = []
        bench.engine.subscribe_plans(lambda plan: drawn.extend(row.seed for row in plan.samples))
        for index in range(8):
            bench.add(str(index), max_tokens=1, temperature=1.0)
        bench.finish()
        return drawn

    assert len(set(seeds())) == 8
    assert seeds() == seeds()


def test_metrics_count_what_happened() -> None:
    bench = Bench(b"abcd", num_blocks=6)
    for index in range(4):
        bench.add(str(index), prompt=range(10 * index + 2, 10 * index + 12), max_tokens=10)

    bench.finish()
    metrics = bench.engine.metrics

    assert metrics.num_prompt_tokens == 40 and metrics.num_output_tokens == 40
    assert metrics.num_preemptions > 0 and metrics.num_recomputed_tokens > 0
    # Every token but each request's last was computed once, and some again after preemption.
    assert metrics.num_computed_tokens + metrics.num_hit_tokens == 4 * 19 + metrics.num_recomputed_tokens
    assert 0 < metrics.kv_token_utilization_ratio <= 1 and 0 < metrics.peak_kv_usage_ratio <= 1
    for times in metrics.times.values():
        assert times.ttft_s is not None and times.ttft_s > 0
        assert len(times.itl_s) == 9 and times.e2e_s == pytest.approx(times.ttft_s + sum(times.itl_s), abs=1)


def test_a_listener_that_raises_loses_no_token_and_wedges_nothing() -> None:
    bench = Bench(b"abcdef")
    bench.add("a", max_tokens=6)
    bench.engine.subscribe(_raise_once())
    with pytest.raises(ZeroDivisionError):
        bench.engine.step()

    assert text_of(bench.finish()) == "abcdef"


def test_a_plan_listener_that_raises_fails_that_step_only() -> None:
    bench = Bench(b"abcdef", max_num_seqs=1)
    bench.add("a", max_tokens=6)
    bench.add("b", max_tokens=6)
    bench.engine.subscribe_plans(_raise_once())
    with pytest.raises(ZeroDivisionError):
        bench.engine.step()

    deltas = bench.finish()
    assert [delta.finish_reason for delta in deltas if delta.request_id == "a"] == ["error"]
    assert text_of([delta for delta in deltas if delta.request_id == "b"]) == "abcdef"


def test_a_listener_that_raises_at_arrival_leaves_the_request_running() -> None:
    bench = Bench(b"abc")
    bench.engine.subscribe(_raise_once())
    with pytest.raises(ZeroDivisionError):
        bench.add("a", max_tokens=3)

    assert text_of(bench.finish()) == "abc"


def _raise_once() -> Callable[[object], None]:
    calls = iter([ZeroDivisionError("a listener failed")])

    def listener(_: object) -> None:
        error = next(calls, None)
        if error is not None:
            raise error

    return listener


def test_an_answer_that_cannot_be_spelled_ends_alone() -> None:
    """A token that the speller knows nothing of, as where a model has more rows than its tokenizer has ids."""
    bench = Bench(b"abcdef")
    bench.add("a", max_tokens=6)
    bench.add("b", max_tokens=6)
    bench.engine._answers["a"].detokenizer = object()  # type: ignore[assignment]
    deltas = bench.finish()

    assert [delta.finish_reason for delta in deltas if delta.request_id == "a"] == ["error"]
    assert text_of([delta for delta in deltas if delta.request_id == "b"]) == "abcdef"
    assert bench.engine.is_sound
    check_idle(bench.kv_cache)


def test_a_prompt_beyond_every_length_is_refused_unread() -> None:
    """Its ids are no ids at all: nobody looked."""
    bench = Bench()
    with pytest.raises(RequestTooLongError):
        bench.add(prompt=["x"] * 101, n=3)  # type: ignore[list-item]

    assert [type(event).__name__ for event in bench.published] == ["RequestRejected"]
    bench.add("a", max_tokens=1)
    bench.finish()


def test_a_message_that_fails_on_the_way_in_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.engine._make_detokenizer = lambda _message: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        bench.add("a", n=2)

    assert not bench.engine.has_unfinished and not bench.published


def test_who_was_admitted_is_told_before_the_step_is_computed() -> None:
    bench = Bench()
    seen: list[str] = []
    bench.engine.subscribe_plans(lambda _plan: seen.extend(type(event).__name__ for event in bench.published))
    bench.add("a", max_tokens=1)
    bench.engine.step()

    assert seen[:2] == ["RequestArrived", "RequestAdmitted"] and "StepScheduled" in seen


def test_times_of_finished_requests_are_kept_for_a_run_and_dropped_by_a_server() -> None:
    for keeps_finished, num_kept in ((True, 5), (False, 1)):
        bench = Bench()
        bench.engine.start_metrics(keeps_finished=keeps_finished)
        for index in range(5):
            bench.add(f"r{index}", max_tokens=2)
            bench.finish()
            # Whoever hears of the end can still read when it was.
            assert bench.engine.request_times[f"r{index}"].e2e_s is not None  # type: ignore[index]

        assert len(bench.engine.request_times) == num_kept
        assert bench.engine.metrics.num_output_tokens == 10
