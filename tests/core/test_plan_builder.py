"""The plan of a step: flat arrays, rows that are sampled, rows that are scored."""

import pickle

from octavo.core.kv_cache import GroupSpec
from octavo.core.step import NULL_BLOCK
from octavo.testing.factories import CoreSetup, Rig


def test_rows_of_several_requests_follow_each_other():
    """Example of step.py: three tokens of one request, one of a second, five of a third."""
    rig = Rig(CoreSetup(max_num_seqs=3, num_blocks=40))
    rig.add([40, 41, 42, 43], max_tokens=9)
    rig.step()
    rig.add([50, 51, 52, 53, 54])
    plan = rig.schedule()

    [output] = plan.token_ids[:1]
    assert list(plan.token_ids) == [output, 50, 51, 52, 53, 54]
    assert list(plan.query_offsets) == [0, 1, 6]
    assert list(plan.start_positions) == [4, 0]
    assert list(plan.tables[0].offsets) == [0, 2, 4]
    assert list(plan.tables[0].block_ids) == [1, 2, 3, 4]
    assert plan.new_blocks == (2, 3, 4)
    assert list(plan.selected_rows) == [0, 5]
    assert [(row.request_id, row.logits_row, row.position) for row in plan.samples] == [("r0", 0, 5), ("r1", 1, 5)]
    rig.commit(plan)


def test_answers_to_one_prompt_are_sampled_from_one_row():
    rig = Rig()
    rig.add_answers(5, 3, seed=20, temperature=1.0)
    plan = rig.schedule()

    assert list(plan.selected_rows) == [4]
    assert [(row.logits_row, row.position, row.seed) for row in plan.samples] == [(0, 5, 20), (0, 5, 21), (0, 5, 22)]
    rig.commit(plan)


def test_history_is_sent_only_where_penalties_count_it():
    rig = Rig()
    rig.add([1, 2, 3], frequency_penalty=0.1)
    rig.add([4, 5, 6])
    rig.step()
    plan = rig.schedule()
    with_penalty, without = plan.samples

    assert list(with_penalty.prompt_token_ids) == [1, 2, 3]
    assert list(with_penalty.output_token_ids) == rig.output(rig.scheduler.requests[0])
    assert list(without.prompt_token_ids) == list(without.output_token_ids) == []
    rig.commit(plan)


def test_banned_ids_are_sent_before_min_tokens():
    rig = Rig(CoreSetup(vocab_size=2))
    request = rig.add([0], min_tokens=2, max_tokens=9, eos_token_ids=(0,), stop_token_ids=(1,) * 0)
    rig.run_to_end()

    assert [plan.samples[0].banned_token_ids for plan in rig.plans] == [(0,), (0,)] + [()] * (len(rig.plans) - 2)
    assert request.num_output_tokens >= 2


def test_prompt_rows_are_scored_chunk_by_chunk():
    """Position p scores token p + 1. Ten tokens in chunks of four: 4 + 4 + 1 scores, then the first output token."""
    rig = Rig(CoreSetup(max_num_seqs=1, max_num_batched_tokens=4))
    rig.add(range(10, 20), prompt_logprobs=3, max_tokens=2)
    plans = rig.run(3)

    scored = [
        [(rows.first_logits_row, list(rows.target_token_ids), rows.num_top) for rows in plan.prompt_logprobs]
        for plan in plans
    ]
    assert scored == [[(0, [11, 12, 13, 14], 3)], [(0, [15, 16, 17, 18], 3)], [(0, [19], 3)]]
    assert [list(plan.selected_rows) for plan in plans] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    assert [len(plan.samples) for plan in plans] == [0, 0, 1]
    rig.run_to_end()


def test_scored_rows_of_two_requests_are_counted_on():
    rig = Rig()
    rig.add([1, 2, 3], prompt_logprobs=0, max_tokens=1)
    rig.add([4], max_tokens=1)
    rig.add([5, 6], prompt_logprobs=0, max_tokens=1)
    plan = rig.schedule()

    assert list(plan.selected_rows) == [0, 1, 2, 3, 4, 5]
    assert [rows.first_logits_row for rows in plan.prompt_logprobs] == [0, 4]
    assert [row.logits_row for row in plan.samples] == [2, 3, 5]
    rig.commit(plan)


def test_prompt_of_one_token_has_nothing_to_score():
    rig = Rig()
    request = rig.add([5], prompt_logprobs=0, max_tokens=0)
    plan = rig.schedule()
    assert (plan.prompt_logprobs, plan.samples, list(plan.selected_rows)) == ((), (), [])
    [update] = rig.commit(plan)

    assert (update.request_id, update.finish_reason, update.token_id) == (request.request_id, "length", None)


def test_scoring_alone_samples_nothing():
    rig = Rig(CoreSetup(max_num_seqs=1, max_num_batched_tokens=4))
    request = rig.add(9, prompt_logprobs=0, max_tokens=0)
    rig.run_to_end()

    assert not any(plan.samples for plan in rig.plans)
    assert [len(update.prompt_logprobs) for update in rig.updates] == [4, 4, 0]
    assert (request.finish_reason, request.num_output_tokens) == ("length", 0)


def test_plan_stays_what_was_decided():
    """Tables are copies: blocks that a later step drops or exchanges must not change a plan under its runner."""
    rig = Rig(CoreSetup(groups=(GroupSpec(window=4),), max_num_seqs=1, max_num_batched_tokens=4))
    rig.add(30)
    plan = rig.step()
    before = list(plan.tables[0].block_ids)
    rig.run(5)

    assert list(plan.tables[0].block_ids) == before
    assert NULL_BLOCK in rig.plans[-1].tables[0].block_ids


def test_plan_can_travel_to_another_process():
    rig = Rig()
    rig.add_answers(5, 2, prompt_logprobs=1, stop=["x"])
    plan = rig.schedule()

    assert pickle.loads(pickle.dumps(plan)) == plan
    rig.commit(plan)
