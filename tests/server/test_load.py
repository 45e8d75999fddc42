"""Load on a real server: no request is lost, no block leaks, and every answer is the one computed alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from octavo.llm.offline import LLM
from octavo.testing.known_load import (
    KnownAnswer,
    KnownRequest,
    check_load,
    compute_alone,
    random_requests,
)
from octavo.testing.load_client import Ask, poisson, send_all
from octavo.testing.server_process import ServerProcess
from octavo.testing.server_rest import total, wait_for_rest

OPTIONS = ("--threads", "1", "--num-blocks", "48", "--max-model-len", "256", "--enable-operator")
NUM_SOME = 90


@pytest.fixture(scope="module")
def requests() -> list[KnownRequest]:
    return random_requests(
        200, seed=5, vocab=range(60, 400), max_prompt_tokens=60, max_output_tokens=24, num_shared_tokens=40
    )


@pytest.fixture(scope="module")
def alone(tiny_model: str, requests: list[KnownRequest]) -> list[KnownAnswer]:
    llm = LLM(tiny_model, num_blocks=32, max_model_len=256, threads=1, enable_prefix_caching=False)
    return compute_alone(llm, requests)


@pytest.fixture(scope="module")
def small_server(tiny_model: str) -> Iterator[ServerProcess]:
    """Its pool is filled by a few of the requests, so that others are preempted."""
    with ServerProcess(tiny_model, *OPTIONS) as running:
        yield running


class Load:
    """What came of a load on a server, once it is at rest again; counts are of this load alone."""

    def __init__(self, server: ServerProcess, asks: Sequence[Ask]) -> None:
        asyncio.run(self._run(server.url, asks))

    async def _run(self, url: str, asks: Sequence[Ask]) -> None:
        before = await wait_for_rest(url)
        self.heard = await send_all(url, asks)
        after = await wait_for_rest(url)
        self.counts = {name: after[name] - before.get(name, 0.0) for name in after}


def test_two_hundred_streams_at_once_in_a_small_pool_are_all_answered(
    small_server: ServerProcess, requests: list[KnownRequest], alone: list[KnownAnswer]
):
    load = Load(small_server, [request.ask() for request in requests])

    assert check_load(load.heard, alone) == {"answered": len(requests)}
    assert total(load.counts, "octavo_preemptions_total") > 0, "the pool was never short"
    assert total(load.counts, "octavo_prefix_hit_tokens_total") > 0
    assert total(load.counts, "octavo_requests_finished_total") == len(requests)


def test_a_third_of_the_clients_leaves_and_the_others_get_their_answers(
    small_server: ServerProcess, tiny_model: str, requests: list[KnownRequest]
):
    # Those who leave ask for long answers and leave by pieces of text, not by seconds: a fast machine must not have
    # answered before they go.
    mixed = [replace(each, max_tokens=150) if i % 3 == 0 else each for i, each in enumerate(requests[:NUM_SOME])]
    llm = LLM(tiny_model, num_blocks=32, max_model_len=256, threads=1, enable_prefix_caching=False)
    alone = compute_alone(llm, mixed)
    asks = [
        replace(each.ask(due_s=due_s), leaves_after_pieces=1 + i % 2 if i % 3 == 0 else None)
        for i, (each, due_s) in enumerate(zip(mixed, poisson(NUM_SOME, rate_per_s=100, seed=1), strict=True))
    ]
    load = Load(small_server, asks)

    fates = check_load(load.heard, alone)
    assert fates["left"] > NUM_SOME // 10, "hardly anybody left before the end"
    assert fates["answered"] >= NUM_SOME * 2 // 3
    assert fates["answered"] + fates["left"] == NUM_SOME
    assert load.counts['octavo_requests_finished_total{reason="abort"}'] > 0


def test_requests_that_are_refused_leave_nothing_behind(small_server: ServerProcess, requests: list[KnownRequest]):
    wrong = [{"max_tokens": 10_000}, {"no_such_field": 1}, {"prompt": [10**6]}, {"temperature": -1.0}, {"prompt": []}]
    load = Load(small_server, [Ask(body={**requests[i].ask().body, **wrong[i % len(wrong)]}) for i in range(25)])

    assert {(one.fate, one.status) for one in load.heard} == {("refused", 400)}
    assert total(load.counts, "octavo_requests_finished_total") == 0


def test_more_than_may_wait_are_refused_and_told_when_to_come_back(
    tiny_model: str, requests: list[KnownRequest], alone: list[KnownAnswer]
):
    with ServerProcess(tiny_model, *OPTIONS, "--max-waiting", "12", "--max-num-seqs", "4") as server:
        load = Load(server, [request.ask() for request in requests[:NUM_SOME]])

    fates = check_load(load.heard, alone[:NUM_SOME])
    assert {one.status for one in load.heard if one.fate == "refused"} == {429}
    assert fates["answered"] + fates["refused"] == NUM_SOME
    assert fates["answered"] >= 16
    assert load.counts['octavo_requests_rejected_total{reason="queue_full"}'] == fates["refused"] > 0
