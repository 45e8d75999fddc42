"""The live view: what a page draws, decoded as a page decodes it and compared with the tables themselves."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.kv_cache import GroupSpec
from octavo.core.snapshot import RequestView, Snapshot
from octavo.engine.advice import PoolFacts, advise
from octavo.engine.block_packing import pack_runs
from octavo.engine.live_frame import MAX_REQUESTS, MAX_TABLE_RUNS
from octavo.engine.live_view import LiveView
from octavo.engine.rolling_histogram import RollingHistogram
from octavo.engine.timeline import Second, Timeline
from octavo.testing.engine_rig import EngineRig
from octavo.testing.factories import CoreSetup
from octavo.units import BlockId, RequestId


def watched_rig(setup: CoreSetup | None = None) -> tuple[EngineRig, LiveView]:
    rig = EngineRig(setup)
    setup = rig.setup
    facts = PoolFacts(
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        is_reserved=setup.allocator == "reserved",
    )
    view = LiveView(rig.engine, model="fake", block_bytes=256, facts=facts)
    rig.engine.subscribe(view.listen)
    return rig, view


def document(rig: EngineRig, view: LiveView) -> dict[str, Any]:
    whole = view.take(rig.engine.snapshot())
    read: dict[str, Any] = json.loads(json.dumps(whole))
    assert read == whole, "every value is what JSON makes of it"
    return read


def unpack(text: str, length: int) -> list[int]:
    halves = [half for byte in b64decode(text) for half in (byte & 15, byte >> 4)]
    return halves[:length]


def states(doc: dict[str, Any]) -> dict[int, int]:
    codes = unpack(doc["blocks"]["states"], doc["num_blocks"])
    return dict(enumerate(codes, start=doc["blocks"]["first_id"]))


def holders(doc: dict[str, Any]) -> dict[int, int]:
    shared = [block_id for block_id, code in states(doc).items() if code == 3]
    return {
        block_id: less + 2
        for block_id, less in zip(shared, unpack(doc["blocks"]["num_holders"], len(shared)), strict=True)
    }


def expand(runs: list[int]) -> list[int]:
    table: list[int] = []
    for first, length in zip(runs[::2], runs[1::2], strict=True):
        if first == 0:
            table += [0] * length
        else:
            table += range(first, first + length) if length > 0 else range(first, first + length, -1)
    return table


def tables(doc: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {each["id"]: [expand(runs) for runs in each["tables"]] for each in doc["requests"]}


def test_blocks_and_tables_are_those_of_the_pool_through_a_whole_life() -> None:
    rig, view = watched_rig(
        CoreSetup(num_blocks=15, groups=(GroupSpec(), GroupSpec(window=6)), max_num_seqs=4, max_num_batched_tokens=12)
    )
    rig.add("a", 9, max_tokens=9)
    rig.add("n", [*range(7), 50], n=3, temperature=1.0, seed=1, max_tokens=6)
    rig.add("b", [*range(9), 60, 61], max_tokens=12)
    seen_states: set[int] = set()
    while rig.engine.has_unfinished:
        rig.step()
        doc, snapshot = document(rig, view), rig.engine.snapshot()
        seen_states |= set(states(doc).values())
        assert tables(doc) == {v.request_id: [list(table) for table in v.tables] for v in snapshot.requests}
        check_states(doc, snapshot)
        assert view._held.num_held == sum(bool(each) for v in snapshot.requests for table in v.tables for each in table)
    assert seen_states == {0, 1, 2, 3, 4}, "a state has not been seen"
    last = document(rig, view)
    assert last["requests"] == [] and last["totals"]["referenced_blocks"] == 0
    assert last["totals"]["usage_ratio"] == last["totals"]["fragmentation_ratio"] == 0
    assert (last["totals"]["num_running"], last["totals"]["num_waiting"]) == (0, 0)


def check_states(doc: dict[str, Any], snapshot: Snapshot) -> None:
    counts = snapshot.holders
    for block_id, code in states(doc).items():
        held = counts.get(block_id, 0)  # type: ignore[call-overload]
        if code != 4:
            assert code == (0 if held == 0 and code == 0 else 1 if held == 0 else 2 if held == 1 else 3)
        if code == 3:
            assert holders(doc)[block_id] == held
    totals = doc["totals"]
    assert totals["referenced_blocks"] == len(counts)
    assert sum(totals[f"{kind}_blocks"] for kind in ("referenced", "cached", "never_used")) == doc["num_blocks"]
    assert totals["cached_tokens"] == totals["cached_blocks"] * doc["block_size_tokens"]
    assert totals["cached_bytes"] == totals["cached_blocks"] * 256


def test_many_holders_are_told_up_to_seventeen() -> None:
    rig, view = watched_rig(CoreSetup(num_blocks=100, max_num_seqs=20))
    rig.add("many", 8, n=20, temperature=1.0, seed=1)
    rig.step(3)

    assert set(holders(document(rig, view)).values()) == {17}


def test_copies_of_the_last_step_are_marked_and_then_no_more() -> None:
    rig, view = watched_rig()
    rig.add("first", 6, max_tokens=1)
    rig.run_to_end()
    rig.add("second", [*range(6), 9], max_tokens=3)
    rig.step()
    [source] = [block_id for block_id, code in states(document(rig, view)).items() if code == 4]
    rig.step()

    assert states(document(rig, view))[source] == 1


def test_requests_say_where_they_stand() -> None:
    rig, view = watched_rig(CoreSetup(max_num_seqs=1))
    rig.add("first", 9, max_tokens=9)
    rig.clock.time_s += 5
    rig.add("second", [7, 8])
    rig.step(2)
    [first, second] = document(rig, view)["requests"]

    assert (first["id"], first["status"], first["wait_reason"], first["age_s"]) == ("first", "running", None, 5.0)
    assert (first["num_prompt_tokens"], first["num_output_tokens"], first["num_computed_tokens"]) == (9, 2, 10)
    assert (second["id"], second["status"], second["wait_reason"], second["tables"]) == (
        "second", "waiting", "seats", [],
    )  # fmt: skip


def test_a_long_queue_and_scattered_tables_are_cut_openly() -> None:
    rig, view = watched_rig(CoreSetup(num_blocks=40, max_num_seqs=2))
    for index in range(MAX_REQUESTS + 30):
        rig.add(f"r{index}", [index])
    rig.step()
    doc = document(rig, view)

    assert len(doc["requests"]) == MAX_REQUESTS and doc["num_requests_left_out"] == 30
    assert doc["totals"]["num_waiting"] == MAX_REQUESTS + 28
    assert [each["id"] for each in doc["requests"][:3]] == ["r0", "r1", "r2"]


def test_rates_are_counted_second_by_second() -> None:
    rig, view = watched_rig(CoreSetup(max_num_seqs=4, max_num_batched_tokens=8))
    rig.add("a", 12, max_tokens=3)
    rig.step(each_s=1)  # 8 tokens of the prompt
    rig.step(each_s=1)  # 4 more, and the first token
    rig.step(each_s=1)
    rig.step(each_s=1)
    rig.clock.time_s += 3
    rates = document(rig, view)["rates"]

    assert rates["time_s"] == [1001, 1002, 1003, 1004, 1005, 1006, 1007]
    assert rates["prompt_tokens_per_s"] == [0, 8, 4, 0, 0, 0, 0]
    assert rates["output_tokens_per_s"] == [0, 0, 1, 1, 1, 0, 0]
    assert rates["running"] == [0, 1, 1, 1, 0, 0, 0]
    assert rates["waiting"] == [1, 0, 0, 0, 0, 0, 0]
    assert rates["hit_ratio"] == [None, 0.0, None, None, None, None, None]
    assert rates["usage_ratio"] == [0.0, 0.0312, 0.0469, 0.0625, 0.0, 0.0, 0.0]
    assert document(rig, view)["means"] == {
        "window_s": 7,
        "output_tokens_per_s": round(3 / 7, 2),
        "prompt_tokens_per_s": round(12 / 7, 2),
        "hit_ratio": 0.0,
        "preemptions_per_min": 0.0,
    }


def test_answers_that_end_before_they_had_a_seat_are_counted() -> None:
    """With one token each, all answers end in the step of their prompt, however few seats there are."""
    rig, view = watched_rig(CoreSetup(max_num_seqs=2))
    rig.add("a", 4, n=5, max_tokens=1)
    rig.run_to_end(each_s=1)
    rig.clock.time_s += 1

    assert sum(document(rig, view)["rates"]["output_tokens_per_s"]) == 5


def test_rates_and_percentiles_look_back_a_minute() -> None:
    rig, view = watched_rig()
    rig.add("a", 4, max_tokens=2)
    rig.run_to_end(each_s=1)
    assert document(rig, view)["latency"]["e2e_s"]["p50"] == pytest.approx(2.0, rel=0.07)
    rig.clock.time_s += 200
    doc = document(rig, view)

    assert len(doc["rates"]["time_s"]) == 60 and doc["rates"]["time_s"][-1] == 1202
    assert not any(doc["rates"]["output_tokens_per_s"])
    assert doc["latency"]["e2e_s"] == {"p50": None, "p90": None, "p99": None}


def test_percentiles_are_at_most_a_range_too_high() -> None:
    rig, view = watched_rig(CoreSetup(max_num_seqs=1))
    rig.add("a", 4, max_tokens=11)
    for index in range(11):
        rig.step(each_s=0.1 if index < 9 else 1.0)
    latency = document(rig, view)["latency"]

    assert latency["ttft_s"]["p50"] == pytest.approx(0.1, rel=0.07)
    assert latency["itl_s"]["p50"] == pytest.approx(0.1, rel=0.07)
    assert latency["itl_s"]["p99"] == pytest.approx(1.0, rel=0.07)
    assert latency["queue_s"]["p99"] == pytest.approx(0.1, rel=0.07)
    histogram = RollingHistogram()
    for value in range(1, 101):
        histogram.add(0.0, value / 1000)
    for percent, exact in ((50, 0.050), (90, 0.090), (99, 0.099)):
        [value] = histogram.percentiles(0.0, (percent,))
        assert value is not None and exact <= value <= exact * 1.06


def test_a_view_of_a_long_life_stays_small() -> None:
    rig, view = watched_rig()
    for index in range(300):
        rig.add(f"r{index}", [index % 9] * 4, max_tokens=2)
        rig.run_to_end(each_s=1.5)

    assert not view._num_tokens_seen and not view._held._peaks
    assert len(view._timeline.complete(rig.clock.now_s())) == 60
    assert all(len(each._slots) <= 7 for each in view._latency.values())


def test_a_large_pool_is_a_small_document_however_scattered() -> None:
    """100,000 blocks, every one in some table and most shared, in an order that has no runs."""
    _, view = watched_rig(CoreSetup(num_blocks=100_000))
    rng = random.Random(1)
    block_ids = [BlockId(block_id) for block_id in range(1, 100_001)]
    rng.shuffle(block_ids)
    requests = tuple(
        RequestView(
            request_id=RequestId(f"chatcmpl-{index:032x}"),
            status="running",
            num_prompt_tokens=10_000,
            num_output_tokens=1_000,
            num_computed_tokens=10_999,
            num_hit_tokens=5_000,
            num_preemptions=1,
            max_total_tokens=20_000,
            tables=(tuple(block_ids[500 * index : 500 * (index + 1)]),),
        )
        for index in range(200)
    )
    block_map = bytes(rng.choice([0, 1, 2, 3, 3, 4, 9]) for _ in block_ids)
    snapshot = Snapshot(
        block_size=4, num_usable_blocks=100_000, num_free_blocks=0, requests=requests, block_map=block_map
    )
    doc = view.take(snapshot)

    assert len(json.dumps(doc)) < 150_000 + 200 * 330, "the blocks, the runs, and 330 bytes for a request"
    shown = [each for each in doc["requests"] if each["tables"] is not None]
    assert [expand(shown[0]["tables"][0]), len(doc["requests"])] == [list(requests[0].tables[0]), 200]
    assert 0 < sum(len(runs) // 2 for each in shown for runs in each["tables"]) <= MAX_TABLE_RUNS
    assert len(shown) < 200, "no table was left out, no test"
    assert holders(doc) == {block_id: count - 1 for block_id, count in enumerate(block_map, start=1) if count > 2}


@pytest.mark.parametrize(
    ("table", "runs"),
    [
        ([], []),
        ([7], [7, 1]),
        ([7, 8, 9], [7, 3]),
        ([9, 8, 7], [9, -3]),
        ([0, 0, 0, 4, 5], [0, 3, 4, 2]),
        ([0, 1, 2], [0, 1, 1, 2]),
        ([7, 8, 9, 8, 7], [7, 3, 8, -2]),
        ([5, 5], [5, 1, 5, 1]),
        ([2, 4, 6], [2, 1, 4, 1, 6, 1]),
    ],
)
def test_runs_are_written_as_described(table: list[int], runs: list[int]) -> None:
    assert pack_runs(table, num_blocks=100, max_runs=100) == runs
    assert expand(runs) == table


def test_any_table_is_read_back_from_its_runs() -> None:
    rng = random.Random(3)
    for _ in range(300):
        table: list[int] = []
        for _ in range(rng.randrange(8)):
            first, length = rng.randrange(5), rng.randrange(1, 40)
            table += rng.choice([[0] * length, [*range(first, first + length)], [*range(length, 0, -1)], [first]])
        runs = pack_runs(table, num_blocks=50, max_runs=1000)
        assert runs is not None and expand(runs) == table
        assert pack_runs(table, num_blocks=50, max_runs=len(runs) // 2 - 1) is None or not runs


# ---- advice ----


def advice_of(setup: CoreSetup) -> tuple[list[str], int]:
    """Run one workload under a setup; return the advice at its busiest and the number of preemptions."""
    rig, view = watched_rig(setup)
    for index in range(8):
        rig.add(f"r{index}", [index] * 10, max_tokens=30)
    texts: list[str] = []
    while rig.engine.has_unfinished:
        rig.step(each_s=0.5)
        texts += [text for text in document(rig, view)["advice"] if text not in texts]
    return texts, rig.engine.metrics.num_preemptions


def test_advice_about_preemptions_ends_them() -> None:
    setup = CoreSetup(num_blocks=30, max_num_seqs=6)
    texts, num_preemptions = advice_of(setup)
    assert num_preemptions > 0
    last = texts[-1]
    assert "preemption" in last and "the pool is short by up to" in last

    num_blocks = int(last.partition("`--num-blocks ")[2].partition("`")[0])
    max_num_seqs = int(last.partition("`--max-num-seqs ")[2].partition("`")[0])
    assert advice_of(CoreSetup(num_blocks=num_blocks, max_num_seqs=6))[1] == 0
    assert advice_of(CoreSetup(num_blocks=30, max_num_seqs=max_num_seqs))[1] == 0
    assert max_num_seqs >= 2, "one request at a time is advice that always works"


def test_a_narrower_cache_is_advised_where_it_would_do() -> None:
    seconds = [Second(second=0, num_preemptions=1, max_request_blocks=10, max_wanting=6)] * 10
    texts = [
        next(advise(PoolFacts(num_blocks=40, block_size=16, max_num_seqs=8, narrower=narrower), seconds))
        for narrower in (None, ("int8", 78), ("int8", 59))
    ]

    assert [("`--kv-cache-dtype int8`" in text) for text in texts] == [False, True, False]
    assert texts[1] == (
        "60 preemptions a minute: the pool is short by up to 20 blocks for requests of up to 10; `--num-blocks 60`, "
        "`--max-num-seqs 4` or `--kv-cache-dtype int8` ends it"
    )


def shared_advice_of(setup: CoreSetup, *, num_requests: int, **params: Any) -> tuple[list[str], int]:
    """As `advice_of`, for requests that begin with the same ten blocks and go on with five of their own."""
    rig, view = watched_rig(setup)
    for index in range(num_requests):
        own = [900 + index] if params.get("n") is None else []
        rig.add(f"r{index}", [*range(40), *own], max_tokens=19, **params)
    texts: list[str] = []
    while rig.engine.has_unfinished:
        rig.step(each_s=0.5)
        texts += [text for text in document(rig, view)["advice"] if text not in texts]
    return texts, rig.engine.metrics.num_preemptions


@pytest.mark.parametrize(
    ("num_requests", "params"), [(10, {}), (1, {"n": 10, "temperature": 1.0, "seed": 1})], ids=["a prefix", "n answers"]
)
def test_what_requests_share_is_counted_once(num_requests: int, params: dict[str, Any]) -> None:
    """Ten need 10 + 10 x 5 = 60 blocks together, and one while copies are made; one at a time, 150."""
    setup = CoreSetup(num_blocks=40, max_num_seqs=10)
    texts, num_preemptions = shared_advice_of(setup, num_requests=num_requests, **params)
    assert num_preemptions > 0
    last = texts[-1]
    assert "of up to 15, " in last and "of them shared" in last

    def ended_by(**changed: int) -> bool:
        return shared_advice_of(replace(setup, **changed), num_requests=num_requests, **params)[1] == 0

    num_blocks = int(last.partition("`--num-blocks ")[2].partition("`")[0])
    assert num_blocks < 80, "half of what it would be without sharing"
    assert ended_by(num_blocks=num_blocks)
    max_num_seqs = int(last.partition("`--max-num-seqs ")[2].partition("`")[0])
    assert max_num_seqs > 40 // 15 and ended_by(max_num_seqs=max_num_seqs)


def test_nothing_is_said_when_there_is_nothing_to_say() -> None:
    assert advice_of(CoreSetup(num_blocks=100, max_num_seqs=8)) == ([], 0)


def test_advice_about_seats_names_a_number_that_fits() -> None:
    texts, _ = advice_of(CoreSetup(num_blocks=100, max_num_seqs=2))

    [text] = texts[-1:]
    assert "wait for a seat" in text
    num_seats = int(text.partition("`--max-num-seqs ")[2].partition("`")[0])
    assert num_seats > 2 and advice_of(CoreSetup(num_blocks=100, max_num_seqs=num_seats))[1] == 0


def test_advice_waits_for_figures() -> None:
    busy = Second(second=0, num_preemptions=9, max_request_blocks=5, max_wanting=4)

    assert list(advise(PoolFacts(num_blocks=10, block_size=16, max_num_seqs=4), [busy] * 4)) == []


def test_seconds_without_events_keep_their_gauges() -> None:
    timeline = Timeline(10.0)
    timeline.at(10.5).num_running = 3
    timeline.at(500.0)

    seconds = timeline.complete(500.0)
    assert [second.second for second in seconds] == list(range(440, 500))
    assert {second.num_running for second in seconds} == {3}
