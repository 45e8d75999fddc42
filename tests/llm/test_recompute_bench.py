"""The bench that recomputes really recomputes, and finds the tokens that the cache gave."""

from __future__ import annotations

import pytest

from octavo import LLM
from octavo.errors import InvalidParameterError
from octavo.llm import recompute_bench
from octavo.llm.recompute_bench import DECODED_TOKENS, RecomputePoint, run_recompute, total_s
from octavo.testing.tiny_models import TinyModel, write_hf_model

LONGEST = 100


@pytest.fixture(scope="module", params=["reference", "native"])
def llm(request, tmp_path_factory) -> LLM:
    if request.param == "native":
        pytest.importorskip("octavo.runtime._native", reason="the native module is not built")
    folder = write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny"))
    return LLM(
        str(folder), runner=request.param, max_model_len=LONGEST, enable_prefix_caching=False, max_num_seqs=1, threads=1
    )


def test_every_token_but_the_decoded_ones_costs_a_pass_over_its_prefix(llm):
    metrics = llm.engine.start_metrics()
    reports = []

    points = run_recompute(llm, (40, 10), num_repeats=2, on_progress=lambda done, total: reports.append((done, total)))

    assert [point.context_tokens for point in points] == [10, 40]
    warm_up = 64 + 3
    decoded = 10 + 40 + 2 * DECODED_TOKENS
    recomputed = (10 + 1) + (10 + 2) + (40 + 1) + (40 + 2)
    assert metrics.num_computed_tokens == warm_up + decoded + recomputed
    assert metrics.num_hit_tokens == 0
    assert all(point.are_tokens_equal and point.num_repeats == 2 for point in points)
    assert all(point.cached_s > 0 and point.recomputed_s > 0 for point in points)
    assert reports[-1] == (3 * 50, 3 * 50)


def test_different_tokens_are_noticed(llm, monkeypatch):
    answer = recompute_bench._Bench._answer

    def lie(self, prompt, num_tokens):
        token_ids, seconds = answer(self, prompt, num_tokens)
        return (token_ids if num_tokens > 1 else [token_ids[0] + 1]), seconds

    monkeypatch.setattr(recompute_bench._Bench, "_answer", lie)

    (point,) = run_recompute(llm, (10,), num_repeats=1)

    assert not point.are_tokens_equal


def test_length_that_cannot_fit_is_refused_before_anything_runs(llm):
    metrics = llm.engine.start_metrics()

    with pytest.raises(InvalidParameterError) as refused:
        run_recompute(llm, (10, 90), num_repeats=1)

    assert refused.value.hints == ("`--lengths 10`",)
    assert "90 tokens does not fit, 83 would" in refused.value.message
    assert metrics.num_computed_tokens == 0
    assert run_recompute(llm, (83,), num_repeats=1)[0].are_tokens_equal


@pytest.mark.parametrize("num_repeats", [0, DECODED_TOKENS + 1])
def test_repeats_out_of_range_are_refused(llm, num_repeats):
    with pytest.raises(InvalidParameterError, match="--repeats"):
        run_recompute(llm, (10,), num_repeats=num_repeats)


def test_totals_add_straight_lines_between_lengths():
    points = [
        RecomputePoint(context_tokens=tokens, cached_s=cached, recomputed_s=slow, num_repeats=1, are_tokens_equal=True)
        for tokens, cached, slow in ((10, 1.0, 3.0), (30, 2.0, 5.0))
    ]

    assert total_s(points, is_cached=True) == [10 * 1.0, 10 * 1.0 + 20 * 1.5]
    assert total_s(points, is_cached=False) == [10 * 2.0, 10 * 2.0 + 20 * 4.0]
