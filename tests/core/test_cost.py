"""What a call may cost, counted in bytecodes, not in time: the same number on any machine, and loops show."""

import gc
import sys

import pytest

from octavo.core.content import TokenContent
from octavo.core.policy import WaitingHeap
from octavo.core.request import Request
from octavo.testing.factories import CoreSetup, Rig, make_request


def cost(function):
    """Return how many bytecodes a call executes, in all functions it enters."""
    count = 0

    def tally(frame, event, argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += 1
        return tally

    previous, is_collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(tally)
    try:
        function()
    finally:
        sys.settrace(previous)
        if is_collecting:
            gc.enable()
    return count


def quiet_rig(**setup):
    return Rig(CoreSetup(**setup), choose=lambda row, history: 1, is_checking=False)


def running_rig(num_running, num_waiting, **setup):
    """A rig that decodes `num_running` requests while `num_waiting` wait for a seat."""
    rig = quiet_rig(
        **{
            "num_blocks": 64 * num_running,
            "max_num_seqs": num_running,
            "max_num_batched_tokens": 8 * num_running,
            **setup,
        }
    )
    for index in range(num_running):
        rig.add([index] * 6, max_tokens=200)
    rig.run(4)
    first = make_request(6, priority=1)
    for index in range(num_waiting):
        rig.scheduler.add(
            Request(f"w{index}", TokenContent([index % 1_000] * 6), first.params, root=first.root, priority=1)
        )
    rig.run(2)
    return rig


def step_cost(rig):
    """Return the cost of `schedule` and `commit` in an ordinary step, one that opens no block."""
    while any(request.num_computed_tokens % 4 == 0 for request in rig.scheduler.running):
        rig.step()
    plans = []
    of_schedule = cost(lambda: plans.append(rig.scheduler.schedule()))
    result = rig.runner.execute(plans[0])
    return of_schedule + cost(lambda: rig.scheduler.commit(plans[0], result))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_waiting_requests_do_not_slow_a_step(policy):
    """100,000 waiting: a step costs what it costs with 10."""
    few, many = (step_cost(running_rig(8, count, policy=policy)) for count in (10, 100_000))

    assert abs(many - few) <= 0.01 * few


def test_step_costs_what_it_schedules():
    """Twice the running requests, twice the cost."""
    costs = {count: step_cost(running_rig(count, 10)) for count in (16, 32, 64)}

    first, second = costs[32] - costs[16], costs[64] - costs[32]
    assert 1.9 * first <= second <= 2.1 * first
    assert second / 32 < 2_000, "bytecodes per decoding request; 1,672 when written"


@pytest.mark.parametrize("max_model_len", [2_000, 16_000])
def test_decoding_costs_the_same_at_any_length(max_model_len):
    """A request that has 1,900 tokens costs a step no more than one that has 6."""
    costs = []
    for num_prompt in (6, max_model_len - 100):
        rig = quiet_rig(num_blocks=8_000, block_size=16, max_model_len=max_model_len, max_num_batched_tokens=16_000)
        rig.add(num_prompt, max_tokens=50)
        rig.run(2)
        costs.append(step_cost(rig))

    assert abs(costs[1] - costs[0]) <= 0.02 * costs[0]


def test_adding_costs_the_same_however_many_wait():
    costs = []
    for count in (10, 20_000):
        rig = running_rig(2, count)
        request = make_request(6, "late")
        costs.append(cost(lambda rig=rig, request=request: rig.scheduler.add(request)))

    assert abs(costs[1] - costs[0]) <= 0.02 * costs[0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_aborting_a_waiting_request_costs_the_same_however_many_wait(policy):
    """Amortised: removing half of 4,000 costs about as much each as removing half of 400."""
    costs = []
    for count in (400, 4_000):
        rig = running_rig(2, count, policy=policy)
        victims = [request for request in rig.scheduler.requests if request.status.value == "waiting"][::2]

        def abort_all(rig=rig, victims=victims):
            for request in victims:
                rig.scheduler.finish(request.request_id, "abort")

        costs.append(cost(abort_all) / len(victims))

    assert costs[1] <= 1.2 * costs[0]


def test_aborting_a_running_request_costs_its_own_blocks():
    """In company of many and in a pool of many blocks."""
    costs = []
    for num_running, num_blocks in ((2, 100), (64, 20_000)):
        rig = running_rig(num_running, 10, num_blocks=num_blocks)
        victim = rig.scheduler.running[0]
        costs.append(cost(lambda rig=rig, victim=victim: rig.scheduler.finish(victim.request_id, "abort")))

    assert abs(costs[1] - costs[0]) <= 0.02 * costs[0]


def test_free_queue_is_not_searched():
    """Touching a cached block in the middle of the queue costs the same in any pool."""
    costs = set()
    for num_blocks in (100, 20_000):
        rig = quiet_rig(num_blocks=num_blocks)
        rig.add(40, max_tokens=1)
        rig.run_to_end()
        block = next(block for block in rig.paged.pool.blocks if block.key)
        costs.add(cost(lambda rig=rig, block=block: rig.paged.pool.touch(block)))

    assert len(costs) == 1


def test_matching_costs_the_blocks_that_match():
    """Ten times the prefix, ten times the cost: no square in the chain of keys."""
    costs = {}
    for num_tokens in (400, 4_000):
        rig = quiet_rig(num_blocks=2_000, max_model_len=8_000, max_num_batched_tokens=8_000)
        rig.add(num_tokens, max_tokens=1)
        rig.run_to_end()
        request = make_request([*range(num_tokens), 1])
        costs[num_tokens] = cost(lambda rig=rig, request=request: rig.paged.match(request))

    assert costs[4_000] <= 11 * costs[400]


def test_queue_stays_small_when_its_requests_are_removed():
    """Lazy deletion keeps no more dead entries than there are live ones, and a few."""
    queue = WaitingHeap(lambda request: (request.arrival,))
    requests = [make_request(1, f"r{index}") for index in range(2_000)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        queue.push(request)
    for request in requests[:1_900]:
        queue.remove(request)

    assert len(queue._heap) <= 2 * len(queue) + 64
