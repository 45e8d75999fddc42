"""Explanations: each figure against what is known to have happened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.events import RequestFinished
from octavo.core.kv_cache import GroupSpec
from octavo.engine.explain import MAX_PREEMPTIONS, ExplainLog, Explanation
from octavo.testing.engine_rig import EngineRig
from octavo.testing.factories import CoreSetup


def explained_rig(setup: CoreSetup | None = None, *, max_finished: int = 1000) -> tuple[EngineRig, ExplainLog]:
    rig = EngineRig(setup)
    log = ExplainLog(rig.engine, max_finished=max_finished)
    rig.engine.subscribe(log.listen)
    return rig, log


def found(log: ExplainLog, request_id: str) -> Explanation:
    explanation = log.find(request_id)
    assert explanation is not None
    return explanation


def document(log: ExplainLog, request_id: str, **how: Any) -> dict[str, Any]:
    whole = found(log, request_id).as_dict(**how)
    read: dict[str, Any] = json.loads(json.dumps(whole))
    assert read == whole, "every value is what JSON makes of it"
    return read


def test_hits_name_their_blocks_and_the_near_miss_names_the_first_differing_token() -> None:
    rig, log = explained_rig()
    rig.add("first", range(14), max_tokens=1)
    rig.run_to_end()
    tables = [event for event in rig.events if type(event).__name__ == "BlocksAllocated"]
    rig.add("second", [*range(10), 77, 78, 79], max_tokens=3)
    rig.run_to_end()

    hits = document(log, "second")["hits"]
    assert hits == {
        "num_block_tokens": 8,
        "num_copied_tokens": 2,
        "num_missed_tokens": 3,
        "block_ids": [list(tables[0].block_ids[:2])],  # type: ignore[union-attr]
        "copied_from": [tables[0].block_ids[2]],  # type: ignore[union-attr]
    }
    near_miss = {"position": 10, "block_id": hits["copied_from"][0]}
    assert document(log, "second")["near_miss"] == near_miss, "token ids are for those who may see the prompt"
    assert document(log, "second", shows_tokens=True)["near_miss"] == {
        **near_miss,
        "token_id": 77,
        "cached_token_id": 10,
    }
    first = document(log, "first")
    assert first["near_miss"] is None and first["hits"]["num_missed_tokens"] == 14
    assert document(log, "second")["num_copies"] == 1


def test_hits_of_a_window_group_leave_out_what_is_out_of_sight() -> None:
    rig, log = explained_rig(CoreSetup(groups=(GroupSpec(), GroupSpec(window=5))))
    rig.add("first", 16, max_tokens=2)
    rig.run_to_end()
    rig.add("second", [*range(16), 99], max_tokens=1)
    rig.run_to_end()

    [full, windowed] = document(log, "second")["hits"]["block_ids"]
    assert len(full) == len(windowed) == 4 and 0 not in full
    assert windowed[:3] == [0, 0, 0] and windowed[3] != 0


def test_waits_add_up_to_the_time_in_the_queue_by_reason() -> None:
    """One seat: the second request waits for it while the first answers, then for the step that admits it."""
    rig, log = explained_rig(CoreSetup(max_num_seqs=1))
    rig.add("first", 3, max_tokens=4)
    rig.clock.time_s += 2
    rig.add("second", [9, 9], max_tokens=2)
    rig.step(each_s=1)
    rig.step(each_s=1)

    running, waiting = document(log, "first"), document(log, "second")
    assert (running["status"], waiting["status"]) == ("running", "waiting")
    assert running["waits"] == [{"reason": "arrival", "seconds": 3.0}]
    assert waiting["waits"] == [{"reason": "arrival", "seconds": 1.0}, {"reason": "seats", "seconds": 1.0}]
    rig.run_to_end(each_s=1)
    second = document(log, "second")
    assert (second["status"], second["finish_reason"], second["num_output_tokens"]) == ("finished", "length", 2)
    assert sum(wait["seconds"] for wait in second["waits"]) == second["times"]["queue_s"] == 5.0
    assert second["times"] == {"queue_s": 5.0, "ttft_s": 5.0, "prefill_s": 0.0, "decode_s": 1.0, "e2e_s": 6.0}


def test_preemptions_tell_their_cause_and_what_was_computed_again() -> None:
    rig, log = explained_rig(CoreSetup(num_blocks=6, max_num_seqs=2))
    rig.add("first", [1] * 6, max_tokens=14)
    rig.add("second", [2] * 6, max_tokens=14)
    rig.run_to_end(each_s=1)

    second = document(log, "second")
    assert second["num_preemptions"] == len(second["preemptions"]) == 1
    [preemption] = second["preemptions"]
    assert (preemption["reason"], preemption["for_request_id"]) == ("blocks", "first")
    assert preemption["num_blocks"] > 0
    assert 0 < preemption["num_recomputed_tokens"] <= preemption["num_computed_tokens"]
    assert preemption["num_recomputed_tokens"] == second["num_recomputed_tokens"]
    assert rig.engine.metrics.num_recomputed_tokens == second["num_recomputed_tokens"]
    assert second["times"]["e2e_s"] >= second["times"]["decode_s"] > 14
    assert {wait["reason"] for wait in second["waits"]} >= {"arrival", "preempted"}
    assert document(log, "first")["preemptions"] == []


def test_how_busy_it_was_is_told_by_the_others_that_ran_in_its_steps() -> None:
    """The first runs two steps alone, then three beside the second, which waits for nobody and runs on alone."""
    rig, log = explained_rig()
    rig.add("first", 3, max_tokens=5)
    assert document(log, "first")["mean_others_running"] is None
    rig.step(each_s=1)
    rig.step(each_s=1)
    rig.add("second", [9, 9], max_tokens=6)
    rig.run_to_end(each_s=1)

    first, second = document(log, "first"), document(log, "second")
    assert (first["num_steps"], first["mean_others_running"]) == (5, 0.6)
    assert (second["num_steps"], second["mean_others_running"]) == (6, 0.5)


def test_the_last_in_rank_gives_its_blocks_back_for_itself() -> None:
    rig, log = explained_rig(CoreSetup(num_blocks=6, max_num_seqs=2))
    rig.add("first", [1] * 5, max_tokens=14)
    rig.add("second", [2] * 6, max_tokens=14)
    rig.run_to_end(each_s=1)

    assert [each["for_request_id"] for each in document(log, "second")["preemptions"]] == ["second"]


def test_peak_blocks_are_the_most_a_request_has_held() -> None:
    """Counted by the events against the tables themselves, through hits, copies, forks, windows and preemption."""
    rig, log = explained_rig(
        CoreSetup(num_blocks=14, groups=(GroupSpec(), GroupSpec(window=6)), max_num_seqs=5, max_num_batched_tokens=12)
    )
    peaks: dict[str, int] = {}

    def note(_events: object) -> None:
        for request in rig.scheduler.running:
            held = rig.scheduler.kv_cache.num_held_blocks(request)
            peaks[request.request_id] = max(peaks.get(request.request_id, 0), held)

    rig.engine.subscribe(note)
    rig.add("a", 9, max_tokens=9)
    rig.add("n", [*range(7), 50, 51], n=3, temperature=1.0, seed=1, max_tokens=6)
    rig.step(3)
    rig.add("b", [*range(9), 60, 61], max_tokens=12)
    rig.add("c", [*range(6), 70], max_tokens=12)
    rig.run_to_end()

    ended = [event for event in rig.events if isinstance(event, RequestFinished)]
    assert len(ended) == 6 and any(event.num_preemptions for event in ended), "no pressure, no test"
    answers = [found(log, "n"), *found(log, "n").further_answers]
    assert sum(answer.num_copies for answer in answers) > found(log, "n").num_copies, "no copy-on-write, no test"
    explained = {each.request_id: each.peak_blocks for each in (*answers, *(found(log, name) for name in "abc"))}
    assert explained == peaks


def test_answers_of_one_prompt_are_told_together() -> None:
    rig, log = explained_rig()
    rig.add("many", 6, n=3, temperature=1.0, seed=1, max_tokens=2)
    rig.run_to_end()

    many = document(log, "many")
    assert many["request_id"] == "many/0"
    assert [answer["request_id"] for answer in many["further_answers"]] == ["many/1", "many/2"]
    assert [answer["hits"]["num_missed_tokens"] for answer in many["further_answers"]] == [0, 0]
    assert document(log, "many/2")["further_answers"] == []


def test_an_id_used_again_is_explained_by_its_latest_request() -> None:
    rig, log = explained_rig()
    rig.add("same", 6, max_tokens=2)
    rig.run_to_end()
    rig.add("same", 9, max_tokens=2)

    assert (document(log, "same")["status"], document(log, "same")["num_prompt_tokens"]) == ("waiting", 9)
    rig.run_to_end()
    assert document(log, "same")["num_prompt_tokens"] == 9
    assert len(log) == 1


def test_an_aborted_request_and_a_refused_one_are_told_apart() -> None:
    rig, log = explained_rig(CoreSetup(max_model_len=20))
    rig.add("aborted", 6)
    rig.step()
    rig.engine.abort("aborted")
    with pytest.raises(Exception, match="the most one request can have"):
        rig.add("refused", 30)

    assert document(log, "aborted")["finish_reason"] == "abort"
    assert log.find("refused") is None
    assert log.find("never seen") is None


def test_the_log_levels_off() -> None:
    rig, log = explained_rig(max_finished=10)
    sizes = []
    for index in range(200):
        rig.add(f"r{index}", [index % 7] * 5, n=1 + index % 2, max_tokens=2)
        rig.run_to_end()
        sizes.append(len(log))

    assert max(sizes) == sizes[-1] == 10
    assert log.find("r0") is None and log.find("r199") is not None
    assert not log._unfinished and not log._held._held and not log._held._peaks and not log._held._running


def test_one_request_that_is_preempted_for_ever_does_not_grow_for_ever() -> None:
    rig, log = explained_rig(CoreSetup(policy="priority", max_num_seqs=1))
    rig.add("poor", 4, priority=9, max_tokens=250)
    for index in range(MAX_PREEMPTIONS + 20):
        rig.step()
        rig.add(f"rich{index}", [5], priority=0, max_tokens=1)
        rig.step(2)

    poor = document(log, "poor")
    assert poor["num_preemptions"] > MAX_PREEMPTIONS == len(poor["preemptions"])
    assert poor["preemptions"][0]["reason"] == "priority"
