"""Order of waiting, choice of victim, and how much room admission leaves."""

import random

import pytest

from octavo.core.events import RequestAdmitted
from octavo.core.policy import POLICIES, FcfsPolicy, PriorityPolicy, WatermarkAdmission
from octavo.testing.factories import CoreSetup, Rig, make_request


def arrivals(*priorities):
    """Make requests that arrived in this order."""
    requests = [make_request(1, f"r{index}", priority=priority) for index, priority in enumerate(priorities)]
    for index, request in enumerate(requests):
        request.arrival = index
    return requests


def drain(queue):
    return [request.request_id for request in iter(queue.pop, None)]


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_queue_pops_nothing(policy):
    queue = POLICIES[policy]().make_queue()

    assert queue.pop() is None
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", ["r0", "r1", "r2", "r3"]), ("priority", ["r1", "r3", "r0", "r2"])]
)
def test_queue_gives_requests_in_the_order_of_its_policy(policy, expected):
    queue = POLICIES[policy]().make_queue()
    requests = arrivals(5, 0, 7, 0)
    for index in (2, 0, 3, 1):
        queue.push(requests[index])

    assert len(queue) == 4
    assert drain(queue) == expected


def test_request_that_comes_back_stands_where_it_stood():
    queue = FcfsPolicy().make_queue()
    requests = arrivals(0, 0, 0)
    for request in requests:
        queue.push(request)

    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)

    assert drain(queue) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_queue_equals_a_sorted_list_under_random_use(policy):
    rng = random.Random(3)
    queue = POLICIES[policy]().make_queue()
    waiting = []
    outside = arrivals(*(rng.randrange(4) for _ in range(300)))
    rng.shuffle(outside)

    def rank(request):
        return (request.priority, request.arrival) if policy == "priority" else (request.arrival,)

    for _ in range(3_000):
        action = rng.random()
        if action < 0.4 and outside:
            request = outside.pop(rng.randrange(len(outside)))
            queue.push(request)
            waiting.append(request)
        elif action < 0.7 and waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(request)
        elif action < 0.9:
            request = queue.pop()
            assert request is (min(waiting, key=rank) if waiting else None)
            if request is not None:
                waiting.remove(request)
                outside.append(request)
        assert len(queue) == len(waiting)


def test_queue_forgets_removed_requests():
    """Lazy deletion must not become a leak: 1,000 are removed, and nothing of them is left to be held on to."""
    queue = FcfsPolicy().make_queue()
    requests = arrivals(*[0] * 1_001)
    for request in requests:
        queue.push(request)

    for request in requests[:1_000]:
        queue.remove(request)

    assert len(queue) == 1
    assert len(queue._heap) <= 2 * len(queue) + 64
    assert queue.pop() is requests[1_000]


def test_same_id_may_wait_again_after_its_removal():
    """The dead entry of the first must not bring the second up early."""
    queue = FcfsPolicy().make_queue()
    first, other, second = arrivals(0, 0, 0)
    second.request_id = first.request_id
    queue.push(first)
    queue.push(other)
    queue.remove(first)
    queue.push(second)

    assert [queue.pop(), queue.pop(), queue.pop()] == [other, second, None]


def test_fcfs_victim_is_the_last_arrival():
    requests = arrivals(9, 0, 3)

    assert FcfsPolicy().victim(requests) is requests[2]
    assert not FcfsPolicy().yields_seat_to(requests[0], requests[1])


def test_priority_victim_is_the_least_urgent_and_of_several_the_last():
    requests = arrivals(1, 5, 0, 5, 2)

    assert PriorityPolicy().victim(requests) is requests[3]


def test_only_a_more_urgent_request_takes_a_seat():
    urgent, normal, equal = arrivals(0, 1, 1)

    assert PriorityPolicy().yields_seat_to(normal, urgent)
    assert not PriorityPolicy().yields_seat_to(normal, equal)
    assert not PriorityPolicy().yields_seat_to(urgent, normal)


@pytest.mark.parametrize(
    ("ratio", "usable", "outstanding", "expected"),
    [(0.0, 1_000, 0, 0), (0.01, 1_000, 0, 10), (0.01, 99, 0, 0), (0.01, 1_000, 7, 17), (0.5, 3, 2, 3)],
)
def test_watermark_leaves_a_share_and_what_running_prompts_need(ratio, usable, outstanding, expected):
    assert WatermarkAdmission(ratio).num_reserved_blocks(usable, outstanding) == expected


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_watermark_is_a_share_below_one(ratio):
    with pytest.raises(AssertionError):
        WatermarkAdmission(ratio)


def test_fork_whose_lead_is_aborted_does_not_jump_the_queue():
    """Found by the state machine: the second answer of an aborted pair was put before everybody who waited longer."""
    rig = Rig(CoreSetup(max_num_seqs=1))
    rig.add(4, "running")
    rig.step()
    rig.add([7, 8], "early")
    lead, fork = rig.add_answers([9, 9], 2, "pair")
    rig.finish(lead)
    rig.run_to_end()

    admitted = [event.request_id for event in rig.of(RequestAdmitted)]

    assert admitted == ["running", "early", fork.request_id]
