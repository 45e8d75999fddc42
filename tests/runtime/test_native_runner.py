"""The native runner on hand-made plans: the reference's numbers, and the same bits however the work is cut up.

Runners here are poisoned: activations and new blocks start a step as NaN, so that a wrong read shows.
"""

from array import array
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.core.sampling import SamplingParams
from octavo.core.step import GroupTables, SampleRow
from octavo.models.kv_record import kv_record
from octavo.models.spec import Rope
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.testing.hand_plans import Chunk, make_plan
from octavo.testing.native_probe import pack_arrays
from octavo.testing.random_weights import make_random_model

VOCAB = 96
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=VOCAB)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_heads": 6, "num_kv_heads": 2}
FULL = make_random_model(**SIZES)
FULL_AND_WINDOW = make_random_model(windows=(None, 20, None, 20), **SIZES)
WEIGHT_DTYPES = ("f32", "f16", "bf16", "int8", "int4")
KV_DTYPES = ("f32", "f16", "bf16", "int8", "fp8_e4m3", "int4")
ISAS = ("portable", "avx2", "auto")

_packed = {}


@pytest.fixture(params=ISAS)
def isa(request):
    from octavo.runtime import _native

    try:
        _native.isa_name(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


def make_runner(model=FULL, *, weight_dtype="f32", isa="auto", **options):
    key = (id(model), weight_dtype, isa)
    if key not in _packed:  # the model is kept, too: its id must not be given to another
        _packed[key] = model, pack_arrays(model.weights, model.program, weight_dtype=weight_dtype, isa=isa)
    settings = {
        "num_blocks": 128,
        "block_size": 16,
        "kv_cache_dtype": "f16",
        "threads": 1,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
        "poison": True,
    }
    return NativeRunner(model.spec, model.program, _packed[key][1], isa=isa, **(settings | options))


def tokens_of(rng, count):
    return [int(each) for each in rng.integers(0, VOCAB, count)]


def tables_of(rng, model, num_tokens, block_size, ids=None):
    """Blocks in random order, different ones for each group."""
    needed = -(-num_tokens // block_size)
    ids = rng.permutation(ids if ids is not None else np.arange(1, 129))
    return [[int(each) for each in ids[g * needed : (g + 1) * needed]] for g in range(len(model.spec.kv_groups))]


def generate(runner, tokens, tables, *, num_new, chunk=10_000, block_size=16, params=ALL_LOGPROBS):
    """Compute a prompt in chunks and decode greedily; returns the answers after the prompt and after each new token."""
    tokens, answers, start, written = list(tokens), [], 0, set()
    while len(answers) <= num_new:
        part = tokens[start : start + chunk]
        blocks = {table[p // block_size] for table in tables for p in range(start, start + len(part))}
        plan = make_plan([Chunk("r", part, start=start, tables=tables, sample=params)], new_blocks=blocks - written)
        written |= blocks
        answer = runner.execute(plan).samples[0]
        start += len(part)
        if start == len(tokens):
            answers.append(answer)
            tokens.append(answer.token_id)
    return answers


def logprob_vector(answer):
    return np.array([value for _, value in sorted(answer.logprobs.top)])


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
    "odd widths": {"hidden_size": 137, "intermediate_size": 51, "head_dim": 40},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 200])
def test_native_equals_reference(rng, isa, changes, num_tokens):
    model = make_random_model(**changes)
    tokens, tables = tokens_of(rng, num_tokens), tables_of(rng, model, num_tokens + 4, 16)
    reference = ReferenceRunner(
        model.spec, model.program, model.weights, num_blocks=128, block_size=16, kv_cache_dtype="f32"
    )
    native = make_runner(model, isa=isa, kv_cache_dtype="f32", threads=2)

    wanted = generate(reference, tokens, tables, num_new=4)
    got = generate(native, tokens, tables, num_new=4)

    for want, have in zip(wanted, got, strict=True):
        scale = max(1.0, np.abs(logprob_vector(want)).max())
        assert np.abs(logprob_vector(want) - logprob_vector(have)).max() < 1e-5 * scale
    group_of = {layer: index for index, group in enumerate(model.spec.kv_groups) for layer in group.layers}
    for layer in range(model.spec.num_layers):
        stored = [each.read_kv(layer, tables[group_of[layer]], num_tokens) for each in (reference, native)]
        for want, have in zip(*stored, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_bits_do_not_depend_on_how_a_request_is_computed(rng, isa, weight_dtype, kv_cache_dtype):
    """Chunks, block size, block ids, threads: tokens, log-probabilities and stored bytes are equal to the bit."""
    tokens = tokens_of(rng, 75)
    dtypes = {"weight_dtype": weight_dtype, "kv_cache_dtype": kv_cache_dtype, "isa": isa}
    tables = tables_of(rng, FULL_AND_WINDOW, 80, 16)
    runner = make_runner(FULL_AND_WINDOW, **dtypes)
    wanted = generate(runner, tokens, tables, num_new=4)
    stored = stored_bytes(runner, FULL_AND_WINDOW, tables, 79)

    for chunk, block_size, threads in [(1, 16, 1), (7, 16, 2), (16, 32, 1), (64, 48, 3), (10_000, 32, 2)]:
        runner = make_runner(FULL_AND_WINDOW, block_size=block_size, threads=threads, **dtypes)
        tables = tables_of(rng, FULL_AND_WINDOW, 80, block_size)

        got = generate(runner, tokens, tables, num_new=4, chunk=chunk, block_size=block_size)

        assert got == wanted, (chunk, block_size, threads)
        assert stored_bytes(runner, FULL_AND_WINDOW, tables, 79) == stored, (chunk, block_size, threads)


def stored_bytes(runner, model, tables, num_tokens):
    """What a query after `num_tokens` could still read, layer by layer."""
    layers = {}
    for group, table in zip(model.spec.kv_groups, tables, strict=True):
        for layer in group.layers:
            layers[layer] = [part.tobytes() for part in runner.read_kv(layer, table, num_tokens)]
    return layers


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_bits_do_not_depend_on_the_batch(rng, isa, weight_dtype):
    """32 requests share every step, mixed prefill and decode, against each alone."""
    num_requests = 32
    prompts = [tokens_of(rng, int(rng.integers(1, 40))) for _ in range(num_requests)]
    tables = [[row.tolist()] for row in rng.permutation(np.arange(1, 129)).reshape(num_requests, 4)]
    alone = [
        generate(make_runner(weight_dtype=weight_dtype, isa=isa), prompt, table, num_new=5)
        for prompt, table in zip(prompts, tables, strict=True)
    ]

    runner = make_runner(weight_dtype=weight_dtype, isa=isa, threads=2)
    together = [[] for _ in prompts]
    known = [list(prompt) for prompt in prompts]
    computed = [0] * num_requests
    most_requests = 0
    while any(len(answers) < 6 for answers in together):
        active = [i for i in range(num_requests) if len(together[i]) < 6 and (computed[i] or rng.random() < 0.4)]
        parts = {i: known[i][computed[i] : computed[i] + int(rng.integers(1, 12))] for i in active}
        if not parts:
            continue
        chunks = [
            Chunk(
                f"r{i}",
                part,
                start=computed[i],
                tables=tables[i],
                sample=ALL_LOGPROBS if computed[i] + len(part) == len(known[i]) else None,
            )
            for i, part in parts.items()
        ]
        most_requests = max(most_requests, len(chunks))
        for answer in runner.execute(make_plan(chunks)).samples:
            index = int(answer.request_id[1:])
            together[index].append(replace(answer, request_id="r"))
            known[index].append(answer.token_id)
        for i, part in parts.items():
            computed[i] += len(part)

    assert most_requests > 8
    assert together == alone


def test_a_copied_block_continues_with_the_same_bits(rng, isa):
    tokens = tokens_of(rng, 40)
    plain = generate(make_runner(isa=isa, threads=2), tokens, [[1, 2, 3]], num_new=3)

    runner = make_runner(isa=isa, threads=2)
    runner.execute(make_plan([Chunk("a", tokens[:37], tables=[[1, 2, 3]], sample=None)], new_blocks=[1, 2, 3]))
    answers, known, copies = [], list(tokens), [(3, 9)]
    while len(answers) < 4:
        start = 37 if not answers else len(known) - 1
        chunk = Chunk("r", known[start:], start=start, tables=[[1, 2, 9]], sample=ALL_LOGPROBS)
        plan = make_plan([chunk], copies=copies, new_blocks=[9] if copies else [])
        answers.append(runner.execute(plan).samples[0])
        known.append(answers[-1].token_id)
        copies = []

    assert answers == plain


@pytest.mark.parametrize("tile", [1, 5, 64])
def test_prompt_scores_do_not_depend_on_tiles_and_equal_decoding(rng, isa, tile):
    tokens = tokens_of(rng, 90)
    chunk = Chunk("a", tokens[:-1], tables=[[1, 2, 3, 4, 5, 6]], sample=ALL_LOGPROBS, targets=tokens[1:])

    result = make_runner(isa=isa, max_selected_rows=tile, threads=2).execute(make_plan([chunk]))

    runner = make_runner(isa=isa)
    for position, score in enumerate(result.prompt_logprobs[0][:20]):
        step = Chunk("a", [tokens[position]], start=position, tables=[[1, 2, 3, 4, 5, 6]], sample=ALL_LOGPROBS)
        answer = runner.execute(make_plan([step])).samples[0]
        assert dict(answer.logprobs.top)[score.token_id] == score.logprob
        assert score.top == answer.logprobs.top[:4]


def test_samples_that_share_a_row_draw_apart(rng, isa):
    """Four answers to one prompt: the same logits, four seeds."""
    params = SamplingParams(temperature=1.5)
    plan = make_plan([Chunk("a", tokens_of(rng, 9), tables=[[1]], sample=params, seed=3)])
    rows = tuple(replace(plan.samples[0], request_id=f"a{i}", seed=3 + i) for i in range(40))

    tokens = [each.token_id for each in make_runner(isa=isa).execute(replace(plan, samples=rows)).samples]

    alone = [make_runner(isa=isa).execute(replace(plan, samples=(row,))).samples[0].token_id for row in rows[:3]]
    assert tokens[:3] == alone
    assert len(set(tokens)) > 5


def test_a_step_without_answers_computes_and_answers_nothing(rng):
    runner = make_runner()
    result = runner.execute(make_plan([Chunk("a", tokens_of(rng, 20), tables=[[1, 2]], sample=None)]))

    assert (result.samples, result.prompt_logprobs) == ((), ())


def test_one_step_is_in_flight(rng):
    runner = make_runner()
    plan = make_plan([Chunk("a", tokens_of(rng, 20), tables=[[1, 2]])])
    wanted = make_runner().execute(plan)

    runner.submit(plan)
    with pytest.raises(AssertionError, match="in flight"):
        runner.submit(plan)
    assert runner.collect() == wanted
    with pytest.raises(AssertionError, match="no step"):
        runner.collect()


def change(plan, **fields):
    return replace(plan, **fields)


def table(block_ids, offsets):
    return (GroupTables(block_ids=array("i", block_ids), offsets=array("i", offsets)),)


BAD_PLANS = {
    "offsets too short": (
        lambda plan: change(plan, query_offsets=array("i", [0])),
        r"query_offsets has length 1, expected num_requests \+ 1 = 2",
    ),
    "rows not covered": (
        lambda plan: change(plan, query_offsets=array("i", [0, 19])),
        r"query_offsets ends at 19, expected num_tokens = 20",
    ),
    "rows fall": (
        lambda plan: change(
            plan, query_offsets=array("i", [0, 25, 20]), start_positions=array("i", [0, 0]), request_ids=("a", "b")
        ),
        r"query_offsets falls at index 2",
    ),
    "too many tokens": (
        lambda plan: change(plan, token_ids=array("i", [0] * 1025), query_offsets=array("i", [0, 1025])),
        r"num_tokens = 1025 is more than max_num_batched_tokens = 1024",
    ),
    "unknown token": (
        lambda plan: change(plan, token_ids=array("i", [1] * 19 + [VOCAB])),
        rf"token_ids\[19\] is {VOCAB}, expected 0 to {VOCAB - 1}",
    ),
    "no table": (lambda plan: change(plan, tables=()), r"tables has length 0, expected num_groups = 1"),
    "table too short": (
        lambda plan: change(plan, tables=table([1], [0, 1])),
        r"tables\[0\] holds 1 blocks of 16 tokens for request 0, whose context is 20 tokens",
    ),
    "null block": (
        lambda plan: change(plan, tables=table([1, 0], [0, 2])),
        r"tables block_ids\[1\] is 0, expected 1 to 128",
    ),
    "block out of the pool": (
        lambda plan: change(plan, tables=table([1, 129], [0, 2])),
        r"tables block_ids\[1\] is 129, expected 1 to 128",
    ),
    "row out of the step": (
        lambda plan: change(plan, selected_rows=array("i", [20])),
        r"selected_rows\[0\] is 20, expected 0 to 19",
    ),
    "answer from a row that is not selected": (
        lambda plan: change(
            plan,
            samples=(SampleRow(request_id="a", logits_row=1, position=20, params=SamplingParams(), seed=0),),
        ),
        r"samples logits_row\[0\] is 1, expected 0 to 0",
    ),
}


@pytest.mark.parametrize(("break_plan", "message"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_contradicts_itself_is_refused_by_name(rng, break_plan, message):
    plan = make_plan([Chunk("a", tokens_of(rng, 20), tables=[[1, 2]])])
    runner = make_runner()

    with pytest.raises(ValueError, match=message):
        runner.execute(break_plan(plan))

    assert runner.execute(plan) == make_runner().execute(plan), "the runner goes on as if nothing had happened"


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="block_size"):
        make_runner(block_size=24)
    with pytest.raises(ValueError, match="isa"):
        make_runner(isa="avx9000")


def test_memory_figures_are_those_of_the_layout():
    runner = make_runner(num_blocks=10, block_size=32, kv_cache_dtype="bf16")

    block_bytes = 2 * 2 * 32 * 32 * 2 * 2  # K and V, heads, head_dim, tokens, layers, bytes
    assert 0 <= runner.pool_bytes - 11 * block_bytes <= 64


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_skipped_layers_stay_in_16_bit_in_both_runners(rng, kv_cache_dtype):
    """Four layers in two groups, each skipped once: records are as long as the longer group needs."""
    model = FULL_AND_WINDOW
    tokens, tables = tokens_of(rng, 40), tables_of(rng, model, 44, 16)
    group_of = {layer: index for index, group in enumerate(model.spec.kv_groups) for layer in group.layers}
    for skipped in range(model.spec.num_layers):
        options = {"kv_cache_dtype": kv_cache_dtype, "kv_skip_layers": (skipped,)}
        native = make_runner(model, **options)
        reference = ReferenceRunner(
            model.spec, model.program, model.weights, num_blocks=128, block_size=16, poison=True, **options
        )
        wanted, got = (generate(runner, tokens, tables, num_new=0)[0] for runner in (reference, native))

        assert np.abs(logprob_vector(wanted) - logprob_vector(got)).max() < 0.2  # a code may fall on either side
        for layer in range(model.spec.num_layers):
            want, have = (each.read_kv(layer, tables[group_of[layer]], 40) for each in (reference, native))
            assert [part.dtype for part in want] == [part.dtype for part in have]
            assert (want[0].dtype == np.float16 and len(want) == 2) == (layer == skipped)
        block_bytes = kv_record(model.spec, dtype=kv_cache_dtype, block_size=16, skip_layers=(skipped,)).block_bytes
        assert native.pool_bytes - 129 * block_bytes == 64  # what kernels may read past the end
        assert reference.kv_bytes == 129 * block_bytes


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_the_pool_takes_the_bytes_that_the_record_counts(kv_cache_dtype):
    runner = make_runner(kv_cache_dtype=kv_cache_dtype, num_blocks=9, block_size=32)

    block_bytes = kv_record(runner.spec, dtype=kv_cache_dtype, block_size=32).block_bytes
    assert runner.pool_bytes == 10 * block_bytes + 64  # the null block, and what kernels may read past the end


def test_an_odd_head_width_is_refused_with_int4():
    with pytest.raises(ValueError, match="int4 packs dimensions in pairs"):
        make_runner(make_random_model(head_dim=7, rope=Rope(kind="none")), kv_cache_dtype="int4")
