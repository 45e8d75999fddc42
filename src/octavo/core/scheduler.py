"""Scheduler: decides, step by step, which tokens of which requests are computed.

One rule: every request has known and computed tokens, and a step hands out tokens under a budget until computed catches
up with known. Chunked prefill, prefix hits, resuming after preemption and decoding are all that rule.

    plan = scheduler.schedule()            1 decoding requests: one token each, so a long prompt never stalls them
    result = runner.execute(plan)          2 prompts being computed: equal shares of what is left
    scheduler.commit(plan, result)         3 waiting ones are admitted (never in a step that ran out of blocks)
                                           4 what is left of the budget goes to prompts

When a block is missing in 1 or 2, a victim gives its blocks back and waits again. The scheduler is pure bookkeeping: no
clock, no tensors, no input or output; the same calls give the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.budget import StepBudget
from octavo.core.events import (
    EventLog,
    FinishReason,
    PreemptReason,
    PrefixDiverged,
    RequestAdmitted,
    RequestArrived,
    RequestDelayed,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    RequestRejected,
    StepScheduled,
    WaitReason,
)
from octavo.core.kv_cache import KVCache, Match
from octavo.core.limits import Limits, check_fits, longest_request_tokens
from octavo.core.plan_builder import build_plan
from octavo.core.policy import AdmissionPolicy, FcfsPolicy, SchedulingPolicy, WatermarkAdmission
from octavo.core.request import Request, RequestStatus
from octavo.core.snapshot import Snapshot, take_snapshot
from octavo.core.step import StepPlan, StepResult
from octavo.core.updates import RequestUpdate
from octavo.errors import InvalidParameterError, RequestTooLongError
from octavo.units import RequestId


class _Step:
    """What `schedule` has decided so far; dropped when the plan is sealed."""

    __slots__ = ("budget", "chunks", "num_outstanding_blocks", "ran_out_of_blocks")

    def __init__(self, max_tokens: int) -> None:
        self.budget = StepBudget(max_tokens)
        self.chunks: dict[RequestId, int] = {}
        self.num_outstanding_blocks = 0
        self.ran_out_of_blocks = False


class Scheduler:
    """Owns every unfinished request and the order in which they wait and run.

    `add`, `schedule`, `commit`, `fail_step`, `finish` and `reset_prefix_cache` change state; everything else asks.
    A step costs O(scheduled requests + their tokens / block size); adding, aborting and finishing cost O(own blocks).
    """

    def __init__(
        self,
        kv_cache: KVCache,
        limits: Limits,
        *,
        events: EventLog,
        policy: SchedulingPolicy | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self._kv = kv_cache
        self._limits = limits
        self._events = events
        self._policy = policy or FcfsPolicy()
        self._admission = admission or WatermarkAdmission()
        self._requests: dict[RequestId, Request] = {}
        self._waiting = self._policy.make_queue()
        self._running: dict[RequestId, Request] = {}
        self._leads: dict[RequestId, Request] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._in_flight: StepPlan | None = None
        self._deferred: list[tuple[RequestId, FinishReason]] = []

    # ---- questions ----

    @property
    def kv_cache(self) -> KVCache:
        return self._kv

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Sequence[Request]:
        return tuple(self._running.values())

    @property
    def requests(self) -> Sequence[Request]:
        """Every unfinished request; for reading only."""
        return tuple(self._requests.values())

    @property
    def longest_request_tokens(self) -> int:
        """Most prompt + output tokens one request can have: the last output token needs no place in the cache."""
        return longest_request_tokens(self._limits, self._kv.longest_tokens)

    def snapshot(self) -> Snapshot:
        """Return who holds which block right now. Cost: O(all blocks)."""
        return take_snapshot(self._kv, self._requests.values())

    # ---- commands ----

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queue a request.

        Args:
            request: New request; its content is the prompt.
            forks: Further answers to the same prompt (`n > 1`). They wait until the first answer's prompt has been
                computed, then share its blocks.

        Raises:
            RequestTooLongError: it could never fit, even alone; nothing is queued.
            InvalidParameterError: empty prompt, or an id that is in use.
        """
        taken = set[RequestId]()
        for one in (request, *forks):
            if one.request_id in self._requests or one.request_id in taken:
                raise InvalidParameterError(f"{one.request_id!r} is in use", param="request_id")
            taken.add(one.request_id)
        self._check_fits(request)
        for one in (request, *forks):
            one.max_total_tokens = self._max_total_tokens(one)
            one.arrival = self._num_arrived
            self._num_arrived += 1
            self._requests[one.request_id] = one
            self._events.emit(
                RequestArrived(
                    request_id=one.request_id,
                    num_prompt_tokens=one.num_prompt_tokens,
                    max_total_tokens=one.max_total_tokens,
                    priority=one.priority,
                )
            )
        for fork in forks:
            fork.status = RequestStatus.FORKING
        self._set_forks(request, tuple(forks))
        self._waiting.push(request)

    def schedule(self) -> StepPlan:
        """Decide the next step. It must be committed (or failed) before the next call."""
        assert self._in_flight is None, "the step before has not been committed"
        self._kv.begin_step(self._num_steps)
        step = _Step(self._limits.max_num_batched_tokens)
        self._grow_decoding(step)
        self._grow_prompts(step)
        if not step.ran_out_of_blocks:
            self._admit(step)
            self._top_up(step)
        return self._seal(step)

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what a step computed: tokens, blocks that can be found from now on, requests that are done."""
        assert plan is self._in_flight and result.step == plan.step, "commit belongs to the step in flight"
        self._in_flight = None
        for index, request_id in enumerate(plan.request_ids):
            request = self._running[request_id]
            request.num_computed_tokens += plan.query_offsets[index + 1] - plan.query_offsets[index]
            self._kv.commit(request)
        updates = self._take_prompt_scores(plan, result)
        self._fork_first_samples(plan)
        for row, sampled in zip(plan.samples, result.samples, strict=True):
            request = self._requests[row.request_id]
            reason = request.append(sampled.token_id)
            updates.append(
                RequestUpdate(
                    request_id=request.request_id,
                    token_id=sampled.token_id,
                    logprobs=sampled.logprobs,
                    finish_reason=reason,
                )
            )
            if reason is not None:
                self._end(request, reason)
        self._apply_deferred()
        return updates

    def fail_step(self, plan: StepPlan) -> list[RequestId]:
        """End every request of a step whose execution failed; what they computed in it is not trusted."""
        assert plan is self._in_flight
        self._in_flight = None
        failed = [RequestId(request_id) for request_id in plan.request_ids]
        for request_id in failed:
            self._end(self._requests[request_id], "error", keep_cached=False)
        self._apply_deferred()
        return failed

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """End a request early, in whatever state it is; `False` if there is no such request.

        While a step is in flight the blocks stay until it is committed, since it may be writing to them.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if self._in_flight is None:
            self._end(request, reason)
        else:
            self._deferred.append((request_id, reason))
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; `False`, and no change, while requests hold any."""
        return self._kv.reset()

    # ---- at the door ----

    def _check_fits(self, request: Request) -> None:
        try:
            check_fits(request, self._limits, self._kv.longest_tokens)
        except RequestTooLongError as refusal:
            self._events.emit(
                RequestRejected(
                    request_id=request.request_id,
                    num_prompt_tokens=refusal.num_prompt_tokens,
                    longest_tokens=refusal.longest_tokens,
                )
            )
            raise

    def _max_total_tokens(self, request: Request) -> int:
        max_tokens = request.params.max_tokens
        return self.longest_request_tokens if max_tokens is None else request.num_prompt_tokens + max_tokens

    # ---- phases of schedule ----

    def _grow_decoding(self, step: _Step) -> None:
        """Give each request that lacks one token that token."""
        for request in self.running:
            if request.num_uncomputed_tokens == 1:
                self._hand_out(request, 1, step)

    def _grow_prompts(self, step: _Step) -> None:
        """Share the budget among prompts being computed, and leave a share for whoever is admitted next.

        Equal shares rather than first come: a prompt of 6,000 tokens would otherwise keep the next one waiting for as
        many steps as it has chunks.
        """
        prompts = [request for request in self.running if request.num_uncomputed_tokens > 1]
        has_newcomer = len(self._waiting) > 0 and len(self._running) < self._limits.max_num_seqs
        for index, request in enumerate(prompts):
            # At least 1: there are as many tokens as seats, and decoding requests took one each.
            share = step.budget.num_tokens_left // (len(prompts) - index + has_newcomer)
            self._hand_out(request, min(share, request.num_uncomputed_tokens), step)

    def _admit(self, step: _Step) -> None:
        """Admit waiting requests in order until one does not fit.

        Requests whose prefix is being computed right now step aside without holding up those behind them; at most
        `max_num_seqs` are looked at in vain, so that a long queue of equal prompts costs no more than a short one.
        """
        if len(self._waiting) == 0:
            return
        step.num_outstanding_blocks = sum(map(self._num_outstanding_blocks, self._running.values()))
        passed_over: list[Request] = []
        while len(passed_over) < self._limits.max_num_seqs:
            request = self._waiting.pop()
            if request is None:
                break
            reason = self._try_admit(request, step)
            if reason is None:
                continue
            passed_over.append(request)
            if request.wait_reason != reason:
                request.wait_reason = reason
                self._events.emit(RequestDelayed(request_id=request.request_id, reason=reason))
            if reason != "prefix":
                break
        for request in passed_over:
            self._waiting.push(request)

    def _top_up(self, step: _Step) -> None:
        """Give what is left of the budget to prompts, as far as blocks are free; nobody is preempted for it."""
        for request in self.running:
            chunk = step.chunks.get(request.request_id, 0)
            num_tokens = min(request.num_uncomputed_tokens - chunk, step.budget.num_tokens_left)
            start = request.num_computed_tokens + chunk
            if num_tokens and self._kv.grow(request, start, start + num_tokens):
                step.chunks[request.request_id] = chunk + num_tokens
                step.budget.spend(num_tokens)

    def _seal(self, step: _Step) -> StepPlan:
        scheduled = [(self._running[request_id], chunk) for request_id, chunk in step.chunks.items()]
        assert scheduled or not self._requests, "a step must make progress while requests are unfinished"
        self._in_flight = build_plan(self._num_steps, scheduled, self._kv)
        self._events.emit(
            StepScheduled(
                step=self._num_steps,
                num_tokens=self._in_flight.num_tokens,
                num_scheduled=len(scheduled),
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_free_blocks=self._kv.num_free_blocks,
                num_usable_blocks=self._kv.num_usable_blocks,
                num_filled_places=self._num_filled_places(step),
            )
        )
        self._num_steps += 1
        return self._in_flight

    # ---- parts of the phases ----

    def _hand_out(self, request: Request, num_tokens: int, step: _Step) -> None:
        """Schedule tokens of a running request, preempting others (or itself) while blocks are missing."""
        if request.status is not RequestStatus.RUNNING:
            return  # it was a victim earlier in this step
        start = request.num_computed_tokens
        while not self._kv.grow(request, start, start + num_tokens):
            step.ran_out_of_blocks = True
            victim = self._policy.victim(self._running.values())
            self._preempt(victim, request, "blocks", step)
            if victim is request:
                return
        step.chunks[request.request_id] = num_tokens
        step.budget.spend(num_tokens)

    def _try_admit(self, request: Request, step: _Step) -> WaitReason | None:
        """Admit one request, or say why not and change nothing."""
        victim = None
        if len(self._running) >= self._limits.max_num_seqs:
            victim = self._policy.victim(self._running.values())
            if not self._policy.yields_seat_to(victim, request):
                return "seats"
        # What the victim was handed in this step comes back with its seat.
        if not step.budget.num_tokens_left and (victim is None or victim.request_id not in step.chunks):
            return "tokens"
        match = self._kv.match(request)
        if match.is_next_block_in_flight:
            return "prefix"
        num_dropped = 0 if victim is None else self._num_outstanding_blocks(victim)
        num_reserved = 0
        if len(self._running) > (victim is not None):
            num_reserved = self._admission.num_reserved_blocks(
                self._kv.num_usable_blocks, step.num_outstanding_blocks - num_dropped
            )
        if not self._kv.can_admit(request, match, num_reserved, leaving=victim):
            match = match.without_copy()
            if not self._kv.can_admit(request, match, num_reserved, leaving=victim):
                return "blocks"
        if victim is not None:
            step.num_outstanding_blocks -= num_dropped
            self._preempt(victim, request, "priority", step)
        self._start(request, match, step)
        return None

    def _start(self, request: Request, match: Match, step: _Step) -> None:
        self._kv.admit(request, match)
        request.set_status(RequestStatus.RUNNING)
        request.wait_reason = None
        request.num_computed_tokens = match.num_tokens
        is_resumed = request.num_hit_tokens is not None
        if request.num_hit_tokens is None:
            request.num_hit_tokens = match.num_tokens
        self._running[request.request_id] = request
        self._events.emit(
            RequestAdmitted(
                request_id=request.request_id,
                num_known_tokens=request.num_known_tokens,
                hit_block_ids=match.block_ids,
                num_block_hit_tokens=match.num_block_tokens,
                num_copied_hit_tokens=match.num_copied_tokens,
                is_resumed=is_resumed,
            )
        )
        if match.divergence is not None:
            self._events.emit(
                PrefixDiverged(
                    request_id=request.request_id,
                    position=match.divergence.position,
                    block_id=match.divergence.block_id,
                    token_id=match.divergence.token_id,
                    cached_token_id=match.divergence.cached_token_id,
                )
            )
        num_tokens = min(request.num_uncomputed_tokens, step.budget.num_tokens_left)
        start = request.num_computed_tokens
        has_grown = self._kv.grow(request, start, start + num_tokens)
        assert has_grown, "can_admit has counted these blocks"
        step.chunks[request.request_id] = num_tokens
        step.budget.spend(num_tokens)
        step.num_outstanding_blocks += self._num_outstanding_blocks(request)

    def _preempt(self, victim: Request, for_request: Request, reason: PreemptReason, step: _Step) -> None:
        """Take all blocks of a running request and let it wait where its rank says: at the head, as a rule.

        Its full blocks stay findable, so resuming costs only what is evicted in the meantime.
        """
        step.budget.refund(step.chunks.pop(victim.request_id, 0))
        self._events.emit(
            RequestPreempted(
                request_id=victim.request_id,
                reason=reason,
                for_request_id=for_request.request_id,
                num_computed_tokens=victim.num_computed_tokens,
                num_blocks=self._kv.num_held_blocks(victim),
            )
        )
        self._kv.free(victim, keep_cached=True)
        del self._running[victim.request_id]
        victim.set_status(RequestStatus.WAITING)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._waiting.push(victim)

    def _num_outstanding_blocks(self, request: Request) -> int:
        """Return the blocks a running request still needs for tokens it already knows."""
        return max(0, self._kv.num_blocks(request.num_known_tokens) - self._kv.num_held_blocks(request))

    def _num_filled_places(self, step: _Step) -> int:
        """Return the token places of blocks in use that hold K/V once the step is done; shared places count once."""
        block_size = self._kv.block_size
        num_places = (self._kv.num_usable_blocks - self._kv.num_free_blocks) * block_size
        num_places -= self._kv.num_unfilled_source_places()
        for request in self._running.values():
            num_tokens = request.num_computed_tokens + step.chunks.get(request.request_id, 0)
            num_places -= sum(len(table) * block_size - num_tokens for table in self._kv.tables(request))
        return num_places

    # ---- parts of commit ----

    def _take_prompt_scores(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        updates = []
        for rows, scores in zip(plan.prompt_logprobs, result.prompt_logprobs, strict=True):
            request = self._requests[rows.request_id]
            request.num_scored_tokens += len(scores)
            updates.append(RequestUpdate(request_id=rows.request_id, prompt_logprobs=scores))
        for request_id in plan.request_ids:
            request = self._requests[request_id]
            if request.params.max_tokens == 0 and request.num_uncomputed_tokens == 0:
                updates.append(RequestUpdate(request_id=request_id, finish_reason="length"))
                self._end(request, "length")
        return updates

    def _fork_first_samples(self, plan: StepPlan) -> None:
        """Turn answers that waited for their first one's prompt into requests of their own.

        Done before any of them gets its token or ends, while the first answer still holds the prompt's blocks. One
        that finds no seat waits like a preempted request: it finds its prompt in the prefix cache when it is admitted.
        """
        for row in plan.samples:
            child = self._requests[row.request_id]
            if child.status is not RequestStatus.FORKING:
                continue
            lead = self._leads.pop(child.request_id)
            lead.forks = ()
            child.num_hit_tokens = lead.num_hit_tokens
            child.num_scored_tokens = lead.num_scored_tokens
            if len(self._running) < self._limits.max_num_seqs and self._kv.fork(lead, child):
                child.set_status(RequestStatus.RUNNING)
                child.num_computed_tokens = lead.num_computed_tokens
                self._running[child.request_id] = child
                self._events.emit(
                    RequestForked(
                        request_id=child.request_id,
                        parent_id=lead.request_id,
                        num_shared_tokens=lead.num_computed_tokens,
                    )
                )
            else:
                child.set_status(RequestStatus.WAITING)
                self._waiting.push(child)

    def _end(self, request: Request, reason: FinishReason, *, keep_cached: bool = True) -> None:
        if request.status is RequestStatus.RUNNING:
            self._kv.free(request, keep_cached=keep_cached)
            del self._running[request.request_id]
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            lead = self._leads.pop(request.request_id)
            lead.forks = tuple(fork for fork in lead.forks if fork is not request)
        self._promote_forks(request)
        request.set_status(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._events.emit(
            RequestFinished(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_hit_tokens=request.num_hit_tokens or 0,
                num_preemptions=request.num_preemptions,
            )
        )

    def _promote_forks(self, lead: Request) -> None:
        """Let the first of the answers that waited for `lead` take its place."""
        if lead.forks:
            first, *others = lead.forks
            lead.forks = ()
            del self._leads[first.request_id]
            first.set_status(RequestStatus.WAITING)
            self._set_forks(first, tuple(others))
            self._waiting.push(first)

    def _set_forks(self, lead: Request, forks: tuple[Request, ...]) -> None:
        lead.forks = forks
        for fork in forks:
            self._leads[fork.request_id] = lead

    def _apply_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for request_id, reason in deferred:
            self.finish(request_id, reason)
