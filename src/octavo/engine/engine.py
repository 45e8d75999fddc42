"""Engine: the loop that drives scheduler and runner, and turns tokens into text.

Knows only protocols: a runner executes plans, a clock tells the time, a text stream spells tokens. Real time with a
real model and virtual time with a cost model are the same code.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from octavo.core.block import BlockKey
from octavo.core.block_content import block_tokens
from octavo.core.block_hash import root_key
from octavo.core.content import TokenContent
from octavo.core.events import Event, EventLog, FinishReason
from octavo.core.limits import Limits
from octavo.core.ports import Clock, Grammar, GrammarCompiler, Runner, TokenMatcher
from octavo.core.request import Request
from octavo.core.sampling import MAX_SEED, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.snapshot import Snapshot
from octavo.core.step import StepPlan
from octavo.core.updates import RequestUpdate
from octavo.engine.detokenize import Detokenizer, TokenSpeller
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.engine.metrics import Metrics, RequestTimes
from octavo.errors import InvalidParameterError, OctavoError
from octavo.units import RequestId

_LOG = logging.getLogger(__name__)

EventListener = Callable[[Sequence[Event]], None]


@dataclass(slots=True, kw_only=True)
class _Answer:
    """Engine-side state of one answer; the scheduler knows it as the request `key`."""

    key: RequestId
    request_id: str
    index: int
    request: Request
    detokenizer: Detokenizer | None
    matcher: TokenMatcher | None = None


class Engine:
    """Runs requests step by step. Not thread-safe: one thread calls it.

    Args:
        scheduler, runner, events: The core and what executes its plans; `events` is the log the core writes to.
        clock: Tells the time of arrivals and tokens.
        vocab_size: Ids of prompts, biases and stop tokens are checked against it.
        eos_token_ids: Ids that end a text.
        fingerprint: Everything that decides the bits of K and V besides the tokens; the root of all block hashes.
        tokenizer: Spells tokens; `None` leaves text out.
        grammars: Compiles structured output; `None` refuses it.
        seed: Seeds the draw of seeds for unseeded requests; `None` draws from the system.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        events: EventLog,
        clock: Clock,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        fingerprint: bytes = b"",
        tokenizer: TokenSpeller | None = None,
        grammars: GrammarCompiler | None = None,
        seed: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._events = events
        self._clock = clock
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._random = Random(seed)
        self._roots: dict[str | None, BlockKey] = {}
        self._answers: dict[RequestId, _Answer] = {}
        self._keys: dict[str, list[RequestId]] = {}
        self._undelivered: list[OutputDelta] = []
        self._listeners: list[EventListener] = []
        self._plan_listeners: list[Callable[[StepPlan], None]] = []
        self._is_sound = True
        self.metrics = Metrics(block_size=scheduler.kv_cache.block_size)

    # ---- questions ----

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to compute or to deliver."""
        return self._scheduler.has_unfinished or bool(self._undelivered)

    @property
    def is_sound(self) -> bool:
        """Whether the books are in order; `False` for good once something outside a runner failed within a step."""
        return self._is_sound

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    @property
    def longest_request_tokens(self) -> int:
        """Most prompt + output tokens one request can have."""
        return self._scheduler.longest_request_tokens

    @property
    def limits(self) -> Limits:
        """What one step can do at most."""
        return self._scheduler.limits

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Answers that do not run: those in the queue, and those whose first answer's prompt is being computed."""
        return self._scheduler.num_unfinished - self._scheduler.num_running

    @property
    def request_times(self) -> Mapping[RequestId, RequestTimes]:
        """When things happened to each unfinished request, and to those whose end is being published; as `metrics`."""
        return self.metrics.times

    def now_s(self) -> float:
        """Return the time by the engine's clock."""
        return self._clock.now_s()

    def snapshot(self) -> Snapshot:
        """Return who holds which block right now."""
        return self._scheduler.snapshot()

    def block_tokens(self, block_id: int) -> Sequence[int]:
        """Return the ids of the tokens whose keys and values lie in a block; see `octavo.core.block_content`."""
        return block_tokens(self._scheduler.kv_cache, self._scheduler.requests, block_id)

    # ---- commands ----

    def start_metrics(self, *, keeps_finished: bool = True) -> Metrics:
        """Begin counting anew, between two runs, and return the new counts; the argument as for `Metrics`."""
        assert not self.has_unfinished, "a request would be counted in halves"
        self.metrics = Metrics(block_size=self._scheduler.kv_cache.block_size, keeps_finished=keeps_finished)
        return self.metrics

    def subscribe(self, listener: EventListener) -> None:
        """Call `listener` with the events of every step and arrival, in order."""
        self._listeners.append(listener)

    def subscribe_plans(self, listener: Callable[[StepPlan], None]) -> None:
        """Call `listener` with every step plan before it is executed."""
        self._plan_listeners.append(listener)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """Compile what the answers' text has to be; `None` if it is free. May take long; safe to call from any thread.

        Raises:
            InvalidParameterError: no valid schema, expression or grammar, beyond the limits, or refused here.
            MachineError: what compiles grammars is not installed.
        """
        if params.structured is None:
            return None
        if self._grammars is None or not self._eos_token_ids:
            raise InvalidParameterError(
                "structured output is not offered here",
                param="structured",
                because="the model names no end-of-sequence token" if self._grammars else "no compiler was given",
            )
        return self._grammars.compile(params.structured)

    def add(self, message: EngineRequest, grammar: Grammar | None = None) -> None:
        """Accept a request, or say why not; a refused one leaves nothing behind.

        Args:
            grammar: What `compile_grammar` returned for its params; compiled here and now if it was not.

        Raises:
            RequestTooLongError: it could never fit.
            InvalidParameterError: a token id outside the vocabulary, an empty prompt, an id in use, a bad grammar.
        """
        if message.request_id in self._keys:
            raise InvalidParameterError(f"{message.request_id!r} is in use", param="request_id")
        if len(message.prompt_token_ids) > self.limits.max_model_len:
            # Refused by its length alone: whoever waits for the next step need not wait until it has been read.
            blank = array("i", bytes(array("i").itemsize * len(message.prompt_token_ids)))
            message = replace(message, prompt_token_ids=blank)  # type: ignore[arg-type] # nothing but its length is read
            self._enter(self._make_requests(replace(message, params=replace(message.params, n=1))))
        self._check_token_ids(message)
        grammar = grammar or self.compile_grammar(message.params)
        # Made before the scheduler knows of them: what fails here leaves nothing behind.
        answers = [
            self._make_answer(message, index, request, grammar)
            for index, request in enumerate(self._make_requests(message))
        ]
        self._enter([answer.request for answer in answers])
        self._answers.update({answer.key: answer for answer in answers})
        self._keys[message.request_id] = [answer.key for answer in answers]
        self._publish()

    def step(self) -> list[OutputDelta]:
        """Do one step of all running requests, and return what it added to answers.

        Without unfinished requests nothing is computed; ends that have not been delivered yet (of an abort) still are.

        Raises:
            Exception: whatever the runner or a listener raised. If that was before the step was computed, its requests
                have ended with the reason "error" and given back their blocks; what was computed comes with the next
                call. Others go on either way.
        """
        if self._scheduler.has_unfinished:
            self._compute()
        return self.collect()

    def collect(self) -> list[OutputDelta]:
        """Return what has not been delivered yet, without computing anything: the ends of aborted answers."""
        delivered, self._undelivered = self._undelivered, []
        return delivered

    def _compute(self) -> None:
        self._is_sound = False
        plan = self._scheduler.schedule()
        listener_error: Exception | None = None
        try:
            # Before the step is computed: who was admitted waits no longer, however long it takes.
            self._publish()
        except Exception as error:  # noqa: BLE001 - raised below; the step must not be lost for it
            listener_error = error
        start_s = self._clock.now_s()
        try:
            for listener in self._plan_listeners:
                listener(plan)
            result = self._runner.execute(plan)
        except BaseException:
            for key in self._scheduler.fail_step(plan):
                self._forget(key, "error")
            self._is_sound = True
            self._publish()
            raise
        now_s = self._clock.now_s()
        updates = self._scheduler.commit(plan, result)
        self.metrics.runner_s += now_s - start_s
        for update in updates:
            if update.token_id is not None:
                self.metrics.take_token(update.request_id, now_s)
            self._undelivered.append(self._take_update_or_fail(update))
        self._is_sound = True
        self._publish()
        if listener_error is not None:
            raise listener_error

    def abort(self, request_id: str) -> bool:
        """End all answers of a request now; `False` if it is unknown or done.

        The next `step` or `collect` returns each answer's end, with the reason "abort".
        """
        keys = self._keys.get(request_id)
        if keys is None:
            return False
        for key in list(keys):
            self._scheduler.finish(key, "abort")
            self._forget(key, "abort")
        self._publish()
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; `False`, and no change, while requests hold any."""
        has_reset = self._scheduler.reset_prefix_cache()
        self._publish()
        return has_reset

    # ---- arrivals ----

    def _enter(self, requests: Sequence[Request]) -> None:
        """Queue the requests of one message, or tell of their refusal."""
        try:
            self._scheduler.add(requests[0], requests[1:])
        except OctavoError:
            self._publish()
            raise

    def _make_answer(self, message: EngineRequest, index: int, request: Request, grammar: Grammar | None) -> _Answer:
        answer = _Answer(
            key=request.request_id,
            request_id=message.request_id,
            index=index,
            request=request,
            detokenizer=self._make_detokenizer(message),
            matcher=None if grammar is None else grammar.start(),
        )
        has_begun = self._mask_next(answer)
        assert has_begun, "a grammar that nothing can begin is refused by its compiler"
        return answer

    def _make_requests(self, message: EngineRequest) -> list[Request]:
        params = message.params
        seed = params.seed if params.seed is not None else self._random.randrange(MAX_SEED)
        root = self._roots.get(message.cache_salt) or root_key(self._fingerprint, message.cache_salt)
        if message.cache_salt is None:
            self._roots[None] = root
        return [
            Request(
                RequestId(message.request_id if params.n == 1 else f"{message.request_id}/{index}"),
                TokenContent(message.prompt_token_ids),
                params,
                root=root,
                seed=_signed_64(seed + index),
                eos_token_ids=self._eos_token_ids,
                priority=message.priority,
            )
            for index in range(params.n)
        ]

    def _check_token_ids(self, message: EngineRequest) -> None:
        params = message.params
        named = {
            "prompt_token_ids": message.prompt_token_ids,
            "logit_bias": tuple(params.logit_bias),
            "stop_token_ids": tuple(params.stop_token_ids),
        }
        if params.min_tokens and len({*self._eos_token_ids, *params.stop_token_ids}) >= self._vocab_size:
            raise InvalidParameterError(
                "every token of the vocabulary would end the answer",
                param="stop_token_ids",
                because=f"none may be chosen before min_tokens={params.min_tokens}",
            )
        for param, token_ids in named.items():
            for token_id in token_ids:
                if not 0 <= token_id < self._vocab_size:
                    raise InvalidParameterError(
                        f"{token_id} is not a token id",
                        param=param,
                        because=f"the model's vocabulary has ids 0 to {self._vocab_size - 1:,}",
                    )

    # ---- outputs ----

    def _make_detokenizer(self, message: EngineRequest) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        params = message.params
        return Detokenizer(
            self._tokenizer,
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            prompt_token_ids=message.prompt_token_ids,
        )

    def _take_update_or_fail(self, update: RequestUpdate) -> OutputDelta:
        """Turn an update into a delta; if that fails (a token that nobody can spell, a matcher), end that answer."""
        answer = self._answers[update.request_id]
        try:
            return self._take_update(answer, update)
        except Exception as error:  # noqa: BLE001 - it is this answer's, and others go on
            _LOG.exception("An answer could not be put together: %s", type(error).__name__)
            self._scheduler.finish(update.request_id, "error")
            self._forget(update.request_id)
            return OutputDelta(
                request_id=answer.request_id,
                index=answer.index,
                finish_reason="error",
                num_cached_tokens=answer.request.num_hit_tokens or 0,
            )

    def _take_update(self, answer: _Answer, update: RequestUpdate) -> OutputDelta:
        if answer.matcher is not None and update.token_id is not None and update.finish_reason is None:
            answer.matcher.accept(update.token_id)
            if not self._mask_next(answer):
                self._scheduler.finish(update.request_id, "error")
                update = replace(update, finish_reason="error")
        text, stop = self._spell(answer, update)
        reason: FinishReason | None = update.finish_reason
        stop_reason: str | int | None = stop
        if stop is not None:
            # The text has ended, whatever the token count says; the scheduler may have ended it in the same step.
            self._scheduler.finish(update.request_id, "stop")
            reason = "stop"
        elif reason == "stop" and update.token_id in answer.request.params.stop_token_ids:
            stop_reason = update.token_id
        if reason is not None:
            self._forget(update.request_id)
        return OutputDelta(
            request_id=answer.request_id,
            index=answer.index,
            text=text,
            token_ids=() if update.token_id is None else (update.token_id,),
            logprobs=() if update.logprobs is None else (update.logprobs,),
            prompt_logprobs=update.prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=answer.request.num_hit_tokens or 0,
        )

    @staticmethod
    def _mask_next(answer: _Answer) -> bool:
        """Limit the next draw of an answer to what its grammar allows; `False` if that is nothing at all.

        Done right after each token rather than when its next step is planned: an answer that cannot go on has ended
        before anybody plans with it.
        """
        if answer.matcher is None:
            return True
        answer.request.allowed_tokens = answer.matcher.allowed_tokens()
        return answer.request.allowed_tokens is not None

    @staticmethod
    def _spell(answer: _Answer, update: RequestUpdate) -> tuple[str, str | None]:
        """Return the text that an update makes certain, and the stop string that ended it."""
        detokenizer, request = answer.detokenizer, answer.request
        if detokenizer is None or update.token_id is None:
            return "", None
        may_stop = request.num_output_tokens >= request.params.min_tokens
        delta = detokenizer.push(update.token_id, may_stop=may_stop)
        if update.finish_reason is None or delta.stopped_by is not None:
            return delta.text, delta.stopped_by
        rest = detokenizer.finish()
        return delta.text + rest.text, rest.stopped_by

    def _forget(self, key: RequestId, reason: FinishReason | None = None) -> None:
        """Drop an answer; with a reason, its end has not been told yet and is delivered by the next step."""
        answer = self._answers.pop(key)
        if reason is not None:
            self._undelivered.append(
                OutputDelta(
                    request_id=answer.request_id,
                    index=answer.index,
                    finish_reason=reason,
                    num_cached_tokens=answer.request.num_hit_tokens or 0,
                )
            )
        keys = self._keys[answer.request_id]
        keys.remove(key)
        if not keys:
            del self._keys[answer.request_id]

    def _publish(self) -> None:
        events = self._events.drain()
        self.metrics.take(events, self._clock.now_s())
        for listener in self._listeners:
            listener(events)


def _signed_64(value: int) -> int:
    """Wrap as 64-bit arithmetic does: the answer after the one with the greatest seed has the least."""
    return (value + 2**63) % 2**64 - 2**63
