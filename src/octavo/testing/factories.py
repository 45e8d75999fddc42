"""Factories for tests of the core: requests, allocators, schedulers, and a rig that runs them with every check on.

    rig = Rig(CoreSetup(num_blocks=12, block_size=4))
    first = rig.add(range(9), max_tokens=3)
    rig.run_to_end()
    assert rig.output(first) == solo_output(first, rig.setup)

A rig checks the plan, the scheduler and the allocator after each call, so a test that only runs one has tested a lot
already. Everything is made fresh; nothing is shared between rigs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from octavo.core.block import BlockHash
from octavo.core.block_hash import HashFunction, chain_hash, root_key
from octavo.core.content import TokenContent
from octavo.core.events import Event, EventLog, FinishReason
from octavo.core.invariants import check_idle, check_plan, check_scheduler
from octavo.core.kv_cache import GroupSpec, KVCache
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.policy import POLICIES, WatermarkAdmission
from octavo.core.request import Request
from octavo.core.reserved_kv_cache import ReservedKVCache
from octavo.core.sampling import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampleRow, StepPlan
from octavo.core.updates import RequestUpdate
from octavo.testing.fake_runner import ChooseToken, FakeRunner, hashed_token
from octavo.units import RequestId, TokenId

FINGERPRINT = b"test model"

EventKind = TypeVar("EventKind")
Prompt = int | Iterable[int]
"""Token ids, or how many different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSetup:
    """All that shapes a scheduler and its allocator. The defaults are roomy: a test states what it makes tight.

    Args:
        vocab_size: The fake runner answers with ids below this.
    """

    num_blocks: int = 64
    block_size: int = 4
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    max_model_len: int = 256
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    is_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    allocator: Literal["paged", "reserved"] = "paged"
    watermark_ratio: float = 0.0
    vocab_size: int = 1000
    hash_function: HashFunction = chain_hash

    @property
    def limits(self) -> Limits:
        return Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


def make_kv_cache(setup: CoreSetup, events: EventLog) -> KVCache:
    """Return the allocator that `setup` asks for."""
    if setup.allocator == "reserved":
        return ReservedKVCache(
            setup.num_blocks, setup.block_size, groups=setup.groups, max_model_len=setup.max_model_len, events=events
        )
    return make_paged_kv_cache(setup, events)


def make_paged_kv_cache(setup: CoreSetup, events: EventLog) -> PagedKVCache:
    """Return a paged allocator, whatever `setup.allocator` says."""
    return PagedKVCache(
        setup.num_blocks,
        setup.block_size,
        groups=setup.groups,
        max_chunk_tokens=setup.max_num_batched_tokens,
        is_caching=setup.is_caching,
        events=events,
        hash_function=setup.hash_function,
    )


def make_scheduler(setup: CoreSetup, events: EventLog) -> Scheduler:
    """Return a scheduler over a fresh allocator."""
    return Scheduler(
        make_kv_cache(setup, events),
        setup.limits,
        events=events,
        policy=POLICIES[setup.policy](),
        admission=WatermarkAdmission(setup.watermark_ratio),
    )


def make_runner(setup: CoreSetup, choose: ChooseToken | None = None) -> FakeRunner:
    """Return a fake runner whose shadow cache has the pool's shape."""
    return FakeRunner(
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        groups=setup.groups,
        choose=choose or hashed_token(setup.vocab_size),
    )


def make_request(
    prompt: Prompt,
    request_id: str = "request",
    *,
    seed: int = 0,
    priority: int = 0,
    salt: str | None = None,
    eos_token_ids: tuple[int, ...] = (),
    hash_function: HashFunction = chain_hash,
    **params: Any,
) -> Request:
    """Return a waiting request; `params` go to `SamplingParams` (8 greedy tokens unless they say otherwise)."""
    return Request(
        RequestId(request_id),
        TokenContent(range(prompt) if isinstance(prompt, int) else prompt),
        SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),
        root=root_key(FINGERPRINT, salt, hash_function),
        seed=seed,
        eos_token_ids=eos_token_ids,
        priority=priority,
    )


class Rig:
    """A scheduler, its allocator and a fake runner that agree, driven step by step.

    Args:
        setup: Shape of everything.
        choose: Picks sampled tokens; by default a hash of all that a row can see.
        is_checking: Whether every invariant is checked after each call; cost tests turn it off.
    """

    def __init__(
        self, setup: CoreSetup | None = None, *, choose: ChooseToken | None = None, is_checking: bool = True
    ) -> None:
        self.setup = setup or CoreSetup()
        self.log = EventLog()
        self.scheduler = make_scheduler(self.setup, self.log)
        self.runner = make_runner(self.setup, choose)
        self.events: list[Event] = []
        self.updates: list[RequestUpdate] = []
        self.plans: list[StepPlan] = []
        self._is_checking = is_checking
        self._num_added = 0

    @property
    def paged(self) -> PagedKVCache:
        """The allocator, which must be the paged one."""
        assert isinstance(self.scheduler.kv_cache, PagedKVCache)
        return self.scheduler.kv_cache

    # ---- commands ----

    def add(self, prompt: Prompt, request_id: str | None = None, **how: Any) -> Request:
        """Queue one request; `how` as in `make_request`. Ids are `r0`, `r1` ... unless given."""
        return self.add_answers(prompt, 1, request_id, **how)[0]

    def add_answers(self, prompt: Prompt, n: int, request_id: str | None = None, **how: Any) -> list[Request]:
        """Queue `n` answers to one prompt: the first answer, then its forks, with seeds one apart."""
        name = request_id or f"r{self._num_added}"
        names = [name] if n == 1 else [f"{name}.{index}" for index in range(n)]
        prompt = prompt if isinstance(prompt, int) else list(prompt)
        seed = how.pop("seed", 0)
        answers = [
            make_request(prompt, one, seed=seed + index, n=n, hash_function=self.setup.hash_function, **how)
            for index, one in enumerate(names)
        ]
        self._num_added += 1
        try:
            self.scheduler.add(answers[0], answers[1:])
        finally:
            self._check()
        return answers

    def schedule(self) -> StepPlan:
        """Decide a step and leave it in flight."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if self._is_checking:
            check_plan(plan, self.scheduler)
        self._check()
        return plan

    def commit(self, plan: StepPlan) -> list[RequestUpdate]:
        """Execute and commit the step in flight."""
        updates = self.scheduler.commit(plan, self.runner.execute(plan))
        self.updates.extend(updates)
        self._check()
        return updates

    def fail(self, plan: StepPlan) -> list[RequestId]:
        """Fail the step in flight; the runner never sees it."""
        failed = self.scheduler.fail_step(plan)
        self._check()
        return failed

    def step(self) -> StepPlan:
        """Do one whole step."""
        plan = self.schedule()
        self.commit(plan)
        return plan

    def run(self, num_steps: int) -> list[StepPlan]:
        return [self.step() for _ in range(num_steps)]

    def run_to_end(self, step: Callable[[], object] | None = None, *, max_steps: int = 10_000) -> int:
        """Step until every request has ended, check that nothing is held, and return the number of steps."""
        step = step or self.step
        for num_steps in range(max_steps):
            if not self.scheduler.has_unfinished:
                check_idle(self.scheduler.kv_cache)
                return num_steps
            step()
        raise AssertionError(f"{len(self.scheduler.requests)} requests are unfinished after {max_steps} steps")

    def finish(self, request: Request, reason: FinishReason = "abort") -> bool:
        has_ended = self.scheduler.finish(request.request_id, reason)
        self._check()
        return has_ended

    # ---- questions ----

    def output(self, request: Request) -> list[int]:
        return list(request.output_token_ids())

    def of(self, kind: type[EventKind]) -> list[EventKind]:
        """Return every event of a kind so far, oldest first."""
        self._collect()
        return [event for event in self.events if isinstance(event, kind)]

    def counts(self) -> Counter[str]:
        """Return how many events of each kind there have been."""
        self._collect()
        return Counter(type(event).__name__ for event in self.events)

    def num_scheduled(self, request: Request) -> list[int]:
        """Return how many tokens of a request each plan so far computed."""
        return [num_scheduled(plan, request) for plan in self.plans]

    def _check(self) -> None:
        if self._is_checking:
            check_scheduler(self.scheduler)

    def _collect(self) -> None:
        self.events.extend(self.log.drain())


def num_scheduled(plan: StepPlan, request: Request) -> int:
    """Return how many tokens of a request a plan computes."""
    if request.request_id not in plan.request_ids:
        return 0
    index = plan.request_ids.index(request.request_id)
    return plan.query_offsets[index + 1] - plan.query_offsets[index]


def solo_output(request: Request, setup: CoreSetup, choose: ChooseToken | None = None) -> tuple[list[int], str]:
    """Return what a request must answer, and why it ends: computed from its prompt alone, with no scheduler at all."""
    choose = choose or hashed_token(setup.vocab_size)
    params = request.params
    prompt = list(request.prompt_token_ids())
    max_tokens = request.max_total_tokens - len(prompt) if params.max_tokens is None else params.max_tokens
    ends = () if params.ignore_eos else request.eos_token_ids
    output: list[int] = []
    while len(output) < max_tokens:
        is_early = len(output) < params.min_tokens
        row = SampleRow(
            request_id=request.request_id,
            logits_row=0,
            position=len(prompt) + len(output),
            params=params,
            seed=request.seed,
            banned_token_ids=(*request.eos_token_ids, *params.stop_token_ids) if is_early else (),
        )
        token = choose(row, visible_history([*prompt, *output], setup.groups))
        output.append(TokenId(token))
        if len(output) >= params.min_tokens and (token in ends or token in params.stop_token_ids):
            return output, "stop"
    return output, "length"


def visible_history(tokens: Sequence[int], groups: Sequence[GroupSpec]) -> Sequence[int]:
    """Return a history as the fake runner's last row sees it: -1 for tokens outside every window and not a sink."""
    query = len(tokens) - 1
    return [
        token
        if any(spec.window is None or place > query - spec.window or place < spec.num_sinks for spec in groups)
        else -1
        for place, token in enumerate(tokens)
    ]


def constant_hash(_parent: bytes, _tokens: bytes) -> BlockHash:
    """Give every block the same hash: whoever trusts a hash serves foreign tokens."""
    return BlockHash(b"same")


def four_bit_hash(parent: bytes, tokens: bytes) -> BlockHash:
    """Give blocks one of sixteen hashes."""
    return BlockHash(bytes([chain_hash(parent, tokens)[0] & 15]))
