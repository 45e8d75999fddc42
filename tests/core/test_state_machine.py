"""The whole core under random work: requests come, fork, are preempted, fail and vanish in tiny pools.

After every call each invariant is checked, and a ledger that reads only plans, events and updates keeps its own books.
At the end of each example everything runs out, nothing is held, and each answer equals the one the request gets alone.

    OCTAVO_CAMPAIGN=50 python -m pytest tests/core/test_state_machine.py      fifty times as many, other steps
"""

import os
import random
from collections import Counter
from itertools import count
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from octavo.errors import RequestTooLongError
from octavo.testing.factories import CoreSetup, Rig
from octavo.testing.ledger import Ledger
from octavo.testing.strategies import core_setups, prompts, requests

NUM_TIMES = float(os.environ.get("OCTAVO_CAMPAIGN", "1"))
NUM_STEPS = int(3_500 * NUM_TIMES)
"""Steps of each kind: 7 x 3,500 = 24,500 by default."""

FIRST_SEED = random.randrange(1 << 60) if "OCTAVO_CAMPAIGN" in os.environ else 0
"""What gates a change takes the same steps each time; a campaign takes new ones."""

OF_ALL = {"RequestRejected", "RequestDelayed", "RequestAdmitted", "abort waiting", "failed", "early end"}
OF_PAGED = {"BlockCached", "BlockEvicted", "BlockCopied", "RequestForked", "RequestPreempted"}
KINDS = ("full", "two full", "full+window", "window", "two windows", "sinks", "reserved")


class CoreMachine(RuleBasedStateMachine):
    """Drives a rig; a subclass per kind of allocator counts its steps and events."""

    kind: ClassVar[str]
    num_steps: ClassVar[int]
    counts: ClassVar[Counter[str]]

    def __init__(self):
        super().__init__()
        self.begin(CoreSetup())

    def begin(self, setup):
        self.rig = Rig(setup)
        self.ledger = Ledger(setup)
        self.ended_early = set()
        self.num_read = 0

    # ---- rules ----

    @initialize(data=st.data())
    def start(self, data):
        self.begin(data.draw(core_setups(self.kind)))

    @rule(arrivals=st.lists(st.tuples(prompts(), requests()), min_size=1, max_size=5))
    def arrive(self, arrivals):
        for prompt, how in arrivals:
            self.add(prompt, how)

    def add(self, prompt, how):
        try:
            answers = self.rig.add_answers(prompt, request_id=f"r{len(self.ledger.requests)}", **how)
        except RequestTooLongError as error:
            assert error.num_prompt_tokens + error.max_tokens > error.longest_tokens
        else:
            self.ledger.accept(answers)
        self.read_events()

    @precondition(lambda self: self.ledger.requests)
    @rule(index=st.integers(0, 40), num_kept=st.integers(1, 60), tail=prompts(max_tokens=6), how=requests())
    def follow_up(self, index, num_kept, tail, how):
        """Send what a request holds by now, prompt and answer, and something more."""
        known = list(self.ledger.requests.values())
        content = known[index % len(known)].content
        self.add([*content.token_ids(0, min(num_kept, len(content))), *tail], how)

    @precondition(lambda self: self.rig.scheduler.has_unfinished)
    @rule(num_steps=st.sampled_from([4, 1, 2, 3, 8, 12, 20]))
    def run(self, num_steps):
        for _ in range(num_steps):
            self.commit(self.schedule())

    @precondition(lambda self: self.rig.scheduler.has_unfinished)
    @rule(index=st.integers(0, 40), reason=st.sampled_from(["abort", "stop"]))
    def finish(self, index, reason):
        unfinished = self.rig.scheduler.requests
        if unfinished:
            request = unfinished[index % len(unfinished)]
            self.ended_early.add(request.request_id)
            self.counts[f"{reason} {request.status.value}"] += 1
            assert self.rig.finish(request, reason)
            self.read_events()

    @precondition(lambda self: self.rig.scheduler.has_unfinished)
    @rule(
        indexes=st.lists(st.integers(0, 40), max_size=2),
        late=st.none() | st.tuples(prompts(), requests()),
        is_failing=st.sampled_from([False, False, True]),
    )
    def change_in_flight(self, indexes, late, is_failing):
        """Abort and add while a step is in flight; then commit it, or let it fail."""
        plan = self.schedule()
        for index in indexes:
            self.finish(index, "abort")
        if late is not None:
            self.add(*late)
        assert not self.rig.scheduler.reset_prefix_cache(), "reset while a step is in flight"
        if is_failing:
            failed = self.rig.fail(plan)
            assert failed == list(plan.request_ids)
            self.ended_early.update(failed)
            self.counts["failed"] += 1
            self.read_events()
        else:
            self.commit(plan)

    @precondition(lambda self: self.ledger.requests)
    @rule()
    def reset(self):
        kv_cache = self.rig.scheduler.kv_cache
        assert self.rig.scheduler.reset_prefix_cache() == (kv_cache.num_free_blocks == kv_cache.num_usable_blocks)
        self.read_events()

    def teardown(self):
        self.rig.run_to_end(lambda: self.commit(self.schedule()))
        self.ledger.check_end(self.rig.scheduler, ended_early=self.ended_early)
        self.counts["early end"] += sum(
            request.finish_reason == "stop" and request_id not in self.ended_early
            for request_id, request in self.ledger.requests.items()
        )
        self.counts.update(self.rig.counts())

    # ---- parts ----

    def schedule(self):
        plan = self.rig.schedule()
        self.read_events()
        self.ledger.read_plan(plan, self.rig.scheduler)
        type(self).num_steps += bool(plan.num_tokens)
        return plan

    def commit(self, plan):
        updates = self.rig.commit(plan)
        self.read_events()
        self.ledger.read_commit(plan, updates)

    def read_events(self):
        self.rig.counts()
        self.ledger.read_events(self.rig.events[self.num_read :])
        self.num_read = len(self.rig.events)


@pytest.mark.parametrize("kind", KINDS)
def test_core_keeps_its_promises_under_random_work(kind, capsys):
    machine = type("Machine", (CoreMachine,), {"kind": kind, "num_steps": 0, "counts": Counter()})
    options = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )

    for number in count(FIRST_SEED):
        if machine.num_steps >= NUM_STEPS:
            break
        run_state_machine_as_test(seed(number)(machine), settings=options)

    with capsys.disabled():
        print(
            f"\n{kind}: {machine.num_steps:,} steps; {', '.join(f'{n:,} {name}' for name, n in machine.counts.items())}"
        )
    missing = (OF_ALL if kind == "reserved" else OF_ALL | OF_PAGED) - machine.counts.keys()
    assert not missing, "the pressure did not happen"
