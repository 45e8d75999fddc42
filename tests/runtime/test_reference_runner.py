"""The reference runner on hand-made plans: right numbers, and the same bits however the work is cut up.

Every runner here is poisoned: storage, buffers and new blocks start as NaN, so that a wrong read ends the test.
"""

from __future__ import annotations

import pickle
import random
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

from octavo.core.sampling import SamplingParams
from octavo.errors import ModelNumbersError
from octavo.models.spec import Rope
from octavo.runtime import row_matmul
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.testing.dense_model import DenseModel
from octavo.testing.hand_plans import Chunk, make_plan
from octavo.testing.random_weights import make_random_model

VOCAB = 96
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=VOCAB)
FULL = make_random_model()
FULL_AND_WINDOW = make_random_model(windows=(None, 20, None, 20))


def make_runner(model=FULL, *, num_blocks=64, block_size=16, kv_cache_dtype="f32", poison=True):
    return ReferenceRunner(
        model.spec,
        model.program,
        model.weights,
        num_blocks=num_blocks,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        poison=poison,
    )


def make_tokens(num_tokens, seed=0):
    return np.random.default_rng([seed, num_tokens]).integers(0, VOCAB, num_tokens).tolist()


def make_tables(model, num_tokens, block_size, *, seed=0, first=1):
    """Blocks in random order, different ones for each group."""
    num_blocks = -(-num_tokens // block_size)
    ids = list(range(first, first + num_blocks * len(model.spec.kv_groups)))
    random.Random(seed).shuffle(ids)
    return [ids[group * num_blocks : (group + 1) * num_blocks] for group in range(len(model.spec.kv_groups))]


def run_alone(runner, model, tokens, *, chunk=10_000, block_size=16, num_new=0, params=ALL_LOGPROBS, seed=0):
    """Compute a prompt in chunks, then decode; returns one SampledToken per chunk end that a whole run also has."""
    tokens, answers = list(tokens), []
    tables = make_tables(model, len(tokens) + num_new, block_size, seed=seed)
    start = 0
    while start < len(tokens) and len(answers) <= num_new:
        part = tokens[start : start + chunk]
        plan = make_plan([Chunk("r", part, start=start, tables=tables, sample=params)])
        answer = runner.execute(plan).samples[0]
        start += len(part)
        if start == len(tokens):
            answers.append(answer)
            tokens.append(answer.token_id)
    return answers, tables


def logprob_vector(answer):
    return np.array([value for _, value in sorted(answer.logprobs.top)])


# --- numbers ----------------------------------------------------------------------------------------------------------

MODELS = {
    "grouped heads": {},
    "as many KV heads as heads": {"num_heads": 4, "num_kv_heads": 4},
    "one KV head": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 12},
    "untied head": {"tie_embeddings": False},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "norms of q and k": {"qk_norm": True},
    "windows": {"windows": (None, 20, None, 20)},
    "a window and sinks": {"window_and_sinks": (20, 5)},
    "yarn": {"rope": Rope(rotary_dim=8, kind="yarn", factor=4.0, original_max_position=32, attention_factor=1.14)},
    "wide": {"hidden_size": 136, "intermediate_size": 200, "head_dim": 32},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 33, 200])
def test_a_prompt_gives_the_logits_of_a_dense_pass(changes, num_tokens):
    model = make_random_model(**changes)
    tokens = make_tokens(num_tokens)
    logits = DenseModel(SimpleNamespace(spec=model.spec, program=model.program), model.weights).logits(tokens, [-1])[0]
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())

    answers, _ = run_alone(make_runner(model), model, tokens)

    assert np.abs(logprob_vector(answers[0]) - expected).max() < 1e-4 * max(1.0, np.abs(logits).max())
    assert np.ptp(logits) > 3  # the model has an opinion


def test_the_answer_depends_on_the_first_token():
    """Otherwise a broken cache could pass every test here."""
    tokens = make_tokens(100)
    changed = [tokens[0] ^ 1, *tokens[1:]]
    runner = make_runner()

    assert run_alone(runner, FULL, tokens)[0] != run_alone(runner, FULL, changed)[0]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "relative_error"),
    [("f16", 2**-10), ("bf16", 2**-7), ("int8", 2**-6), ("fp8_e4m3", 2**-4), ("int4", 2**-3)],
)
def test_a_rounded_cache_is_close_to_a_full_one(kv_cache_dtype, relative_error):
    tokens = make_tokens(100)
    full, _ = run_alone(make_runner(), FULL, tokens)
    rounded, _ = run_alone(make_runner(kv_cache_dtype=kv_cache_dtype), FULL, tokens)

    error = np.abs(logprob_vector(full[0]) - logprob_vector(rounded[0])).max()
    assert 0 < error < 30 * relative_error


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [FULL, FULL_AND_WINDOW], ids=["full", "full and window"])
@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_and_block_sizes_change_no_bit(model, kv_cache_dtype, chunk, block_size):
    """One block that holds everything is a dense cache: paged equals dense, bit for bit."""
    tokens = make_tokens(75)
    dense = make_runner(model, num_blocks=2, block_size=128, kv_cache_dtype=kv_cache_dtype)
    expected, dense_tables = run_alone(dense, model, tokens, block_size=128, num_new=4)
    paged = make_runner(model, block_size=block_size, kv_cache_dtype=kv_cache_dtype)

    answers, tables = run_alone(paged, model, tokens, chunk=chunk, block_size=block_size, num_new=4, seed=chunk)

    assert answers == expected and len(answers) == 5
    for index, group in enumerate(model.spec.kv_groups):
        for layer in group.layers:
            stored = paged.read_kv(layer, tables[index], 79)
            assert all(map(np.array_equal, stored, dense.read_kv(layer, dense_tables[index], 79)))


@pytest.mark.parametrize("model", [FULL, FULL_AND_WINDOW], ids=["full", "full and window"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_of_any_mixture_of_steps_answer_as_if_alone(model, seed):
    """Four requests, cut at random, in random company and order, in blocks from one shuffled pool."""
    rng = random.Random(seed)
    block_size = rng.choice([5, 8, 16])
    num_groups = len(model.spec.kv_groups)
    lengths = {name: rng.randint(1, 90) for name in "abcd"}
    tokens = {name: make_tokens(length, seed=ord(name)) for name, length in lengths.items()}
    expected = {
        name: {row: run_alone(make_runner(model), model, tokens[name][: row + 1])[0][0] for row in range(length)}
        for name, length in lengths.items()
    }
    pool = list(range(1, 200))
    rng.shuffle(pool)
    tables = {name: [[] for _ in range(num_groups)] for name in lengths}
    runner = make_runner(model, num_blocks=200, block_size=block_size)
    done, num_requests_of_steps = dict.fromkeys(lengths, 0), []

    while any(done[name] < length for name, length in lengths.items()):
        unfinished = [name for name, length in lengths.items() if done[name] < length]
        chunks, new_blocks = [], []
        for name in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            part = tokens[name][done[name] :][: rng.choice([1, 2, 7, 16, 40])]
            for table in tables[name]:
                while len(table) * block_size < done[name] + len(part):
                    table.append(pool.pop())
                    new_blocks.append(table[-1])
            copied = [list(table) for table in tables[name]]
            chunks.append(Chunk(name, part, start=done[name], tables=copied, sample=ALL_LOGPROBS))
        result = runner.execute(make_plan(chunks, new_blocks=new_blocks))
        num_requests_of_steps.append(len(chunks))
        for chunk, answer in zip(chunks, result.samples, strict=True):
            done[chunk.request_id] += len(chunk.token_ids)
            single = expected[chunk.request_id][done[chunk.request_id] - 1]
            assert (answer.token_id, answer.logprobs) == (single.token_id, single.logprobs)

    assert max(num_requests_of_steps) >= 3


def test_many_decoding_requests_equal_each_alone():
    """33 rows in a step: four tiles of eight and one of a single row."""
    runner = make_runner(num_blocks=264, block_size=8)
    prompts = [make_tokens(20 + i, seed=i) for i in range(33)]
    tables = [[list(range(1 + 8 * i, 9 + 8 * i))] for i in range(33)]
    for i, prompt in enumerate(prompts):
        runner.execute(make_plan([Chunk(f"r{i}", prompt[:-1], tables=tables[i], sample=None)]))
    decode = [
        Chunk(f"r{i}", prompt[-1:], start=len(prompt) - 1, tables=tables[i], sample=ALL_LOGPROBS)
        for i, prompt in enumerate(prompts)
    ]

    together = runner.execute(make_plan(decode)).samples
    one_by_one = [runner.execute(make_plan([chunk])).samples[0] for chunk in decode]

    assert list(together) == one_by_one


def test_one_and_two_blas_threads_give_the_same_bits():
    tokens = make_tokens(150)
    answers = []
    for num_threads in (1, 2):
        with threadpoolctl.threadpool_limits(num_threads):
            answers.append(run_alone(make_runner(), FULL, tokens, num_new=2)[0])

    assert answers[0] == answers[1]


def test_a_machine_without_a_usable_blas_is_exact_too(monkeypatch):
    tokens = make_tokens(60)
    usual, _ = run_alone(make_runner(), FULL, tokens)
    monkeypatch.setattr(row_matmul, "lanes_agree", lambda shape, tile_rows: False)
    runner = make_runner()
    assert runner.arithmetic.reason.startswith("sums without BLAS")

    whole, _ = run_alone(runner, FULL, tokens)
    chunked, _ = run_alone(runner, FULL, tokens, chunk=7, seed=1)

    assert whole == chunked
    assert logprob_vector(whole[0]) == pytest.approx(logprob_vector(usual[0]), abs=1e-4)


def test_repeating_a_step_repeats_its_result():
    runner = make_runner()
    plan = make_plan([Chunk("r", make_tokens(40), tables=[[4, 2, 9]], sample=SamplingParams(logprobs=5), seed=3)])

    assert runner.execute(plan) == runner.execute(pickle.loads(pickle.dumps(plan)))


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_a_copied_block_continues_as_the_original_and_apart_from_it():
    """A fork in the middle of block 2: the child's copy gets its own tokens, the parent's block keeps the parent's."""
    prompt, parent_more, child_more = make_tokens(20), make_tokens(9, seed=1), make_tokens(9, seed=2)
    runner = make_runner(block_size=16)
    runner.execute(make_plan([Chunk("parent", prompt, tables=[[1, 2]], sample=None)]))

    result = runner.execute(
        make_plan(
            [
                Chunk("parent", parent_more, start=20, tables=[[1, 2]], sample=ALL_LOGPROBS),
                Chunk("child", child_more, start=20, tables=[[1, 5]], sample=ALL_LOGPROBS),
            ],
            copies=[(2, 5)],
            new_blocks=[5],
        )
    )

    for more, answer in zip((parent_more, child_more), result.samples, strict=True):
        alone, _ = run_alone(make_runner(), FULL, prompt + more)
        assert answer.logprobs == alone[0].logprobs
    assert result.samples[0].logprobs != result.samples[1].logprobs


def test_a_shared_prefix_serves_two_requests_in_one_step():
    prompt = make_tokens(32)
    tails = [make_tokens(5, seed=1), make_tokens(11, seed=2)]
    runner = make_runner(block_size=16)
    runner.execute(make_plan([Chunk("first", prompt, tables=[[7, 3]], sample=None)]))

    chunks = [
        Chunk(str(i), tail, start=32, tables=[[7, 3, 10 + i]], sample=ALL_LOGPROBS) for i, tail in enumerate(tails)
    ]
    result = runner.execute(make_plan(chunks, new_blocks=[10, 11]))

    for tail, answer in zip(tails, result.samples, strict=True):
        assert answer.logprobs == run_alone(make_runner(), FULL, prompt + tail)[0][0].logprobs


def test_blocks_out_of_the_window_may_be_null_and_their_content_anything():
    """Window 20, blocks of 8: at position 60 the blocks of positions 0-39 are free and already someone else's."""
    model = make_random_model(windows=(20, 20))
    tokens = make_tokens(62)
    runner = make_runner(model, block_size=8)
    runner.execute(make_plan([Chunk("r", tokens[:60], tables=[[1, 2, 3, 4, 5, 6, 7, 8]], sample=None)]))

    freed = Chunk("r", tokens[60:], start=60, tables=[[0, 0, 0, 0, 0, 6, 7, 8]], sample=ALL_LOGPROBS)
    other = Chunk("other", make_tokens(30), tables=[[2, 1, 5, 4]], sample=None)
    result = runner.execute(make_plan([other, freed], new_blocks=[1, 2, 4, 5]))

    assert result.samples[0].logprobs == run_alone(make_runner(model), model, tokens)[0][0].logprobs


def test_a_read_of_something_never_written_is_caught_and_names_the_request():
    plan = make_plan([Chunk("guilty", [5], start=4, tables=[[3]])])

    with pytest.raises(ModelNumbersError, match=r"request guilty: .* is nan"):
        make_runner().execute(plan)
    make_runner(poison=False).execute(plan)  # it takes the poison to see it


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "int8", "fp8_e4m3", "int4"])
def test_a_block_handed_out_again_is_poisoned_for_whoever_still_reads_it(kv_cache_dtype):
    runner = make_runner(kv_cache_dtype=kv_cache_dtype)
    tokens = make_tokens(20)
    runner.execute(make_plan([Chunk("old", tokens, tables=[[1, 2]])]))
    new = Chunk("new", [7], tables=[[1]])
    old = Chunk("old", [9], start=20, tables=[[1, 2]])

    with pytest.raises(ModelNumbersError, match=r"request old: .* is nan"):
        runner.execute(make_plan([new, old], new_blocks=[1]))


def test_a_buffer_read_before_it_is_written_is_caught():
    ops = [op for op in FULL.program.ops if type(op).__name__ != "Activate"]
    runner = make_runner(replace(FULL, program=replace(FULL.program, ops=tuple(ops))))

    with pytest.raises(ModelNumbersError, match=r"request r: .* is nan"):
        runner.execute(make_plan([Chunk("r", [1, 2, 3], tables=[[1]])]))


# --- samples and scores -----------------------------------------------------------------------------------------------


def test_answers_that_fork_draw_as_single_requests_with_their_seeds():
    params = SamplingParams(temperature=1.0, logprobs=3)
    tokens = make_tokens(40)
    plan = make_plan([Chunk("r", tokens, tables=[[1, 2, 3]], sample=params, seed=7)])
    rows = tuple(replace(plan.samples[0], seed=7 + i) for i in range(4))

    answers = make_runner().execute(replace(plan, samples=rows)).samples

    for i, answer in enumerate(answers):
        single = make_plan([Chunk("r", tokens, tables=[[3, 1, 2]], sample=params, seed=7 + i)])
        assert answer == make_runner().execute(single).samples[0]
    assert len({answer.token_id for answer in answers}) > 1


def test_prompt_tokens_are_scored_alike_whole_in_chunks_and_beside_others():
    """150 scored rows cross two borders of the 64-row tiles; the last prompt row is sampled, not scored."""
    tokens = make_tokens(151)
    runner = make_runner(num_blocks=64)
    tables = make_tables(FULL, 151, 16)
    whole = runner.execute(make_plan([Chunk("r", tokens, tables=tables, targets=tokens[1:])]))

    scores = []
    for start in range(0, 151, 40):
        part = tokens[start : start + 40]
        chunk = Chunk("r", part, start=start, tables=tables, targets=tokens[start + 1 : start + 41], sample=None)
        other = Chunk("o", make_tokens(9), tables=[[60]], targets=make_tokens(9))
        scores += runner.execute(make_plan([other, chunk])).prompt_logprobs[1]

    assert whole.samples[0].logprobs.top == run_alone(make_runner(), FULL, tokens)[0][0].logprobs.top[:8]
    assert tuple(scores) == whole.prompt_logprobs[0]
    assert [score.token_id for score in scores] == tokens[1:]
    assert all(len(score.top) == 4 for score in scores)


def test_a_score_is_the_logprob_that_the_model_gives_the_next_token():
    tokens = make_tokens(30)
    scores = (
        make_runner()
        .execute(make_plan([Chunk("r", tokens, tables=[[1, 2]], targets=tokens[1:], sample=None)]))
        .prompt_logprobs[0]
    )

    for length in (1, 16, 29):
        answers, _ = run_alone(make_runner(), FULL, tokens[:length])
        assert scores[length - 1].logprob == dict(answers[0].logprobs.top)[tokens[length]]


def test_scoring_a_long_prompt_holds_few_logits_at_a_time():
    """600 rows of 8,192 logits are 20 MB, in float32 alone; 64 of them are 2 MB."""
    model = make_random_model(vocab_size=8192, windows=(None,))
    tokens = make_tokens(600)
    runner = make_runner(model, poison=False)
    plan = make_plan([Chunk("r", tokens, tables=[list(range(1, 39))], targets=tokens)])
    tracemalloc.start()
    runner.execute(plan)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 12e6


# --- the seam ---------------------------------------------------------------------------------------------------------


def test_one_step_is_in_flight_at_most():
    runner = make_runner()
    plan = make_plan([Chunk("r", [1, 2], tables=[[1]])], step=5)

    runner.submit(plan)
    with pytest.raises(AssertionError, match="in flight"):
        runner.submit(plan)
    assert runner.collect() == runner.execute(plan)
    with pytest.raises(AssertionError, match="no step"):
        runner.collect()


def test_a_result_carries_the_number_of_its_step():
    assert make_runner().execute(make_plan([Chunk("r", [1], tables=[[1]])], step=41)).step == 41


@pytest.mark.parametrize("chunks", [[], [Chunk("r", [1, 2], tables=[[1]], sample=None)]], ids=["empty", "prefill"])
def test_a_step_may_choose_nothing(chunks):
    result = make_runner().execute(make_plan(chunks, copies=[(3, 4)], new_blocks=[4]))

    assert (result.samples, result.prompt_logprobs) == ((), ())


def test_samples_come_in_the_order_of_the_plan():
    chunks = [Chunk(name, make_tokens(5, seed=i), tables=[[i + 1]]) for i, name in enumerate("abc")]
    plan = make_plan(chunks)
    in_order = make_runner().execute(plan).samples
    shuffled = replace(plan, samples=(plan.samples[2], plan.samples[0]))

    answers = make_runner().execute(shuffled).samples

    assert [one.request_id for one in answers] == ["c", "a"]
    assert answers == (in_order[2], in_order[0])
