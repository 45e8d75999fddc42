"""The native sampler chooses the same tokens and reports the same bits as the definition in sampler.py."""

from array import array

import numpy as np
import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.core.sampling import SamplingParams
from octavo.core.step import GroupTables, PromptLogprobRows, SampleRow, StepPlan
from octavo.errors import ModelNumbersError
from octavo.runtime import sampler
from octavo.testing.native_probe import INPUT, probe

ISAS = ("portable", "avx2")


@pytest.fixture(params=ISAS)
def isa(request):
    from octavo.runtime import _native

    try:
        _native.isa_name(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


def runner_over(logits, isa, *, threads=2, max_selected_rows=None):
    """A runner whose logits of token i are row i."""
    from octavo.models.program import SelectRows

    num_rows, vocab_size = logits.shape
    # Ids of samples run over the vocabulary, so the table has as many rows as columns.
    table = np.zeros((max(vocab_size, num_rows), vocab_size), np.float32)
    table[:num_rows] = logits
    return probe(
        [SelectRows(x=INPUT, out="logits")],
        table,
        buffers={},
        selected={"logits": vocab_size},
        logits="logits",
        num_blocks=num_rows,
        threads=threads,
        isa=isa,
        max_num_batched_tokens=num_rows,
        max_selected_rows=max_selected_rows,
    )


def plan_of(num_rows, samples=(), prompt_logprobs=()):
    num_blocks = -(-num_rows // 16)
    return StepPlan(
        step=0,
        request_ids=("a",),
        query_offsets=array("i", [0, num_rows]),
        start_positions=array("i", [0]),
        token_ids=array("i", range(num_rows)),
        tables=(GroupTables(block_ids=array("i", range(1, num_blocks + 1)), offsets=array("i", [0, num_blocks])),),
        selected_rows=array("i", range(num_rows)),
        samples=tuple(samples),
        prompt_logprobs=tuple(prompt_logprobs),
    )


def random_logits(rng, num_rows, vocab_size):
    """Rows of every temper: flat, peaked, tied, huge, with -inf."""
    logits = rng.standard_normal((num_rows, vocab_size)) * rng.choice([0.01, 1, 5, 300, 1e30], (num_rows, 1))
    ties = rng.random(num_rows) < 0.3
    logits[ties] = np.round(logits[ties])
    hidden = rng.random(logits.shape) < rng.choice([0, 0.5], (num_rows, 1))
    hidden[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = False
    return np.where(hidden, -np.inf, logits).astype(np.float32)


def random_params(rng, vocab_size):
    chosen = {"temperature": rng.choice([0.0, 1e-300, 0.3, 1.0, 1.7, 50.0])}
    if rng.random() < 0.5:
        chosen["top_k"] = int(rng.choice([1, 2, 3, 7, 50, vocab_size, 10 * vocab_size]))
    if rng.random() < 0.5:
        chosen["top_p"] = float(rng.choice([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, rng.random()]))
    if rng.random() < 0.3:
        chosen["min_p"] = float(rng.choice([1e-6, 0.01, 0.3, 1.0]))
    if rng.random() < 0.3:
        chosen["repetition_penalty"] = float(rng.choice([0.5, 1.3]))
    if rng.random() < 0.3:
        chosen["presence_penalty"] = float(rng.choice([-1.5, 0.7]))
    if rng.random() < 0.3:
        chosen["frequency_penalty"] = float(rng.choice([-0.3, 0.4]))
    if rng.random() < 0.3:
        ids = rng.integers(0, vocab_size, 3)
        chosen["logit_bias"] = {int(token): float(rng.choice([-100, 5.5, 100])) for token in ids}
    if rng.random() < 0.4:
        chosen["logprobs"] = int(rng.choice([0, 1, 5, min(1024, vocab_size + 3)]))
    return SamplingParams(**chosen)


def random_mask(rng, vocab_size):
    """A bit per id, in words of 32; sometimes few, sometimes all."""
    allowed = rng.random(32 * -(-vocab_size // 32)) < rng.choice([0.02, 0.5, 1.0])
    allowed[rng.integers(0, vocab_size)] = True
    return np.packbits(allowed, bitorder="little").tobytes()


def random_sample(rng, row, vocab_size):
    ban_some = rng.random() < 0.3 and vocab_size > 8
    return SampleRow(
        request_id="a",
        logits_row=row,
        position=int(rng.integers(0, 100_000)),
        params=random_params(rng, vocab_size),
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        banned_token_ids=tuple(int(each) for each in rng.integers(0, vocab_size, 2)) if ban_some else (),
        prompt_token_ids=array("i", [int(each) for each in rng.integers(0, vocab_size, 9)]),
        output_token_ids=array("i", [int(each) for each in rng.integers(0, vocab_size, 30)]),
        allowed_tokens=random_mask(rng, vocab_size) if rng.random() < 0.3 else None,
    )


@pytest.mark.parametrize("vocab_size", [1, 3, 17, 64, 255, 1000, 3001])
def test_native_sampler_equals_definition_bit_for_bit(rng, isa, vocab_size):
    num_rows = 40
    logits = random_logits(rng, num_rows, vocab_size)
    runner = runner_over(logits, isa)
    for _ in range(3 if vocab_size > 1000 else 6):
        samples = [random_sample(rng, int(row), vocab_size) for row in rng.integers(0, num_rows, 60)]
        wanted = []
        for one in samples:
            try:
                wanted.append(sampler.sample(logits[one.logits_row], one))
            except AssertionError as error:  # a random ban or mask left nothing
                assert "banned" in str(error)
                wanted.append(None)
        kept = [one for one, want in zip(samples, wanted, strict=True) if want is not None]

        got = runner.execute(plan_of(num_rows, kept)).samples

        for one, want, have in zip(kept, [each for each in wanted if each is not None], got, strict=True):
            assert have == want, one


def test_random_draws_cover_many_tokens(rng, isa):
    """The comparison above would prove little if every draw were the likeliest token."""
    logits = rng.standard_normal((1, 500)).astype(np.float32)
    runner = runner_over(logits, isa)
    samples = [
        SampleRow(request_id="a", logits_row=0, position=position, params=SamplingParams(), seed=7)
        for position in range(300)
    ]

    tokens = {each.token_id for each in runner.execute(plan_of(1, samples)).samples}

    assert len(tokens) > 100


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_prompt_scores_equal_definition_in_tiles_of_any_size(rng, isa, tile):
    num_rows, vocab_size = 90, 300
    logits = random_logits(rng, num_rows, vocab_size)
    targets = array("i", [int(each) for each in rng.integers(0, vocab_size, 80)])
    rows = PromptLogprobRows(request_id="a", first_logits_row=5, target_token_ids=targets, num_top=4)

    plan = plan_of(num_rows, [random_sample(rng, 89, vocab_size)], [rows])
    got = runner_over(logits, isa, max_selected_rows=tile).execute(plan)

    want = tuple(sampler.token_logprobs(logits[5 + index], target, 4) for index, target in enumerate(targets))
    assert got.prompt_logprobs == (want,)
    assert got.samples == (sampler.sample(logits[89], plan.samples[0]),)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_distribution_name_the_request(isa, bad):
    logits = np.zeros((2, 20), np.float32)
    logits[1, 13] = bad
    if bad < 0:
        logits[1] = bad
    runner = runner_over(logits, isa)
    row = SampleRow(request_id="culprit", logits_row=1, position=3, params=SamplingParams(), seed=0)

    with pytest.raises(ModelNumbersError, match="culprit"):
        runner.execute(plan_of(2, [row]))


def test_everything_banned_names_the_request(isa):
    runner = runner_over(np.zeros((1, 3), np.float32), isa)
    row = SampleRow(
        request_id="culprit", logits_row=0, position=3, params=SamplingParams(), seed=0, banned_token_ids=(0, 1, 2)
    )

    with pytest.raises(ModelNumbersError, match="culprit"):
        runner.execute(plan_of(1, [row]))


def test_a_mask_of_a_wrong_length_is_refused(isa):
    runner = runner_over(np.zeros((1, 33), np.float32), isa)
    row = SampleRow(
        request_id="a", logits_row=0, position=3, params=SamplingParams(), seed=0, allowed_tokens=b"\xff" * 4
    )

    with pytest.raises(ValueError, match=r"allowed has length 1, expected ceil\(num_logits / 32\) = 2"):
        runner.execute(plan_of(1, [row]))


def test_ids_outside_the_vocabulary_are_refused(isa):
    runner = runner_over(np.zeros((1, 30), np.float32), isa)
    params = SamplingParams(logit_bias={30: 1.0})
    row = SampleRow(request_id="a", logits_row=0, position=3, params=params, seed=0)

    with pytest.raises(ValueError, match=r"logit_bias.* 30.*0 to 29"):
        runner.execute(plan_of(1, [row]))
