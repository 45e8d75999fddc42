"""`LLM`, from prompt to text, on a tiny model with random weights and both runners."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.config.machine import AVX2_FLAGS, read_machine
from octavo.errors import (
    CapacityError,
    InvalidParameterError,
    MachineError,
    ModelNotFoundError,
    ModelNumbersError,
    RequestTooLongError,
)
from octavo.testing.tiny_models import TinyModel, make_tensors, write_hf_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["reference", "native"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return LLM(str(folder), runner=request.param, max_model_len=64, num_blocks=64, threads=1)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", "a much longer second prompt", "3"]

    together = llm.generate(prompts, GREEDY)

    assert [output.prompt for output in together] == prompts
    for output, prompt in zip(together, prompts, strict=True):
        alone = llm.generate(prompt, GREEDY)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.finished and output.outputs[0].finish_reason == "length"


def test_a_prompt_can_be_text_ids_or_a_mapping(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")

    outputs = llm.generate(["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}], GREEDY)

    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["hello", "hello", None]


def test_a_repeated_prompt_is_served_from_the_prefix_cache_with_the_same_answer(llm: LLM) -> None:
    prompt = "the very same prompt, twice in a row"
    llm.engine.reset_prefix_cache()

    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))

    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(second.prompt_token_ids) - 1, "hits are token-granular"
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_other_salts_share_nothing(llm: LLM) -> None:
    prompt = "a prompt of one tenant, seen by no other"
    llm.engine.reset_prefix_cache()

    hits = [llm.generate(prompt, GREEDY, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "a", "b", None, None)]

    assert [bool(hit) for hit in hits] == [False, True, False, False, True]


def test_logprobs_have_the_chosen_token_first_and_the_rest_by_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=3, ignore_eos=True)

    answer = llm.generate("abc", params)[0].outputs[0]

    assert answer.logprobs is not None and len(answer.logprobs) == 6
    for token_id, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(candidates)) == token_id
        assert len(candidates) in {3, 4}
        assert sorted(c.rank for c in candidates.values())[:3] == [1, 2, 3]
    assert answer.cumulative_logprob == pytest.approx(
        sum(c[t].logprob for t, c in zip(answer.token_ids, answer.logprobs, strict=True))
    )


def test_a_prompt_can_be_scored_without_generating(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)

    output = llm.generate("score me", params)[0]

    assert output.outputs[0].token_ids == [] and output.finished
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for token_id, candidates in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert candidates is not None and token_id in candidates


def test_scores_are_the_same_with_a_warm_cache(llm: LLM) -> None:
    """Scoring reads no hits (it needs every row), but fills the cache for others."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    llm.engine.reset_prefix_cache()

    cold = llm.generate("score me twice", params)[0]
    warm = llm.generate("score me twice", params)[0]
    after = llm.generate("score me twice", GREEDY)[0]

    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 0)
    assert after.num_cached_tokens > 0


def test_a_chat_is_formatted_by_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]

    assert output.prompt is not None and "<|im_start|>user\nhi<|im_end|>" in output.prompt
    assert len(output.outputs[0].token_ids) == 12


def test_a_stream_joins_to_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate("stream me", GREEDY)[0].outputs[0]

    deltas = list(llm.stream("stream me", GREEDY))

    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids


def test_leaving_a_stream_early_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("leave me", GREEDY)
    next(iter(stream))
    assert llm.engine.has_unfinished

    stream.close()

    assert not llm.engine.has_unfinished
    assert llm.engine.snapshot().num_used_blocks == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [
        (62, 2, True),
        (63, None, True),
        (63, 1, True),
        (63, 2, False),
        (64, 1, False),
        (64, None, False),
        (200, 1, False),
    ],
)
def test_lengths_are_served_in_full_or_refused_with_numbers(llm: LLM, length: int, max_tokens, fits: bool) -> None:
    """Never cut, never clamped: L = 64."""
    prompt = {"prompt_token_ids": [5] * length}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    if not fits:
        with pytest.raises(RequestTooLongError, match=rf"{length}\b.*\b64\b"):
            llm.generate(prompt, params)
        return

    answer = llm.generate(prompt, params)[0].outputs[0]

    assert len(answer.token_ids) == 64 - length if max_tokens is None else max_tokens
    assert answer.finish_reason == "length"


def test_a_scored_prompt_may_have_exactly_the_greatest_length(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [5] * 64}, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 64


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestTooLongError):
        llm.generate(["fine", {"prompt_token_ids": [5] * 500}], GREEDY)

    assert not llm.engine.has_unfinished
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ({"prompt_token_ids": []}, "prompt"), ({"prompt_token_ids": [10**6]}, "prompt_token_ids"),
     ({"prompt_token_ids": "text"}, "prompt_token_ids"), ({"tokens": [1]}, "prompt"), (b"bytes", "prompt")],
)  # fmt: skip
def test_a_bad_prompt_is_refused_by_name(llm: LLM, prompt: object, param: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]
    assert refused.value.param == param


def test_options_are_checked_and_misspelt_ones_get_a_hint(folder: Path) -> None:
    with pytest.raises(InvalidParameterError, match="max_model_len"):
        LLM(str(folder), max_model_length=64)
    with pytest.raises(CapacityError, match=r"longest that fits"):
        LLM(str(folder), num_blocks=2, max_model_len=64)
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        LLM("smolm2-135m")


def test_the_suggested_length_starts_and_one_more_does_not(folder: Path) -> None:
    """The advice of a refusal works (OPN-24)."""
    with pytest.raises(CapacityError, match=r"--max-model-len 48\b"):
        LLM(str(folder), num_blocks=3, max_model_len=64)

    small = LLM(str(folder), num_blocks=3, max_model_len=48, runner="reference")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert len(small.generate({"prompt_token_ids": [5] * 40}, params)[0].outputs[0].token_ids) == 8
    with pytest.raises(CapacityError):
        LLM(str(folder), num_blocks=3, max_model_len=49)


def test_reserved_runs_give_the_same_answers_as_paging(folder: Path) -> None:
    """Same bits; fewer at once."""
    prompts = [{"prompt_token_ids": [7 + i] * (3 + i)} for i in range(6)]
    both = {}
    for allocator in ("paged", "reserved"):
        llm = LLM(str(folder), kv_allocator=allocator, num_blocks=12, max_model_len=64, runner="reference")
        both[allocator] = (
            [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)],
            llm.engine.metrics.max_running,
        )

    assert both["paged"][0] == both["reserved"][0]
    assert both["reserved"][1] == 3 < both["paged"][1]


def test_priorities_decide_who_goes_first(folder: Path) -> None:
    llm = LLM(str(folder), scheduling_policy="priority", max_num_seqs=1, max_model_len=64, runner="reference")
    finished: list[str] = []
    llm.engine.subscribe(
        lambda events: finished.extend(e.request_id for e in events if type(e).__name__ == "RequestFinished")
    )

    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3, ignore_eos=True), priority=[2, 1, 0])

    assert [request_id[-1] for request_id in finished] == ["2", "1", "0"]


def test_streams_that_are_read_in_turns_do_not_mix(llm: LLM) -> None:
    alone = {text: list(llm.generate(text, GREEDY)[0].outputs[0].token_ids) for text in ("abc", "def")}

    streams = {text: llm.stream(text, GREEDY) for text in alone}
    got: dict[str, list[int]] = {text: [] for text in alone}
    iterators = {text: iter(stream) for text, stream in streams.items()}
    while iterators:
        for text, iterator in list(iterators.items()):
            delta = next(iterator, None)
            if delta is None:
                del iterators[text]
            else:
                assert delta.request_id == "0"
                got[text].extend(delta.token_ids)

    assert got == alone


def test_a_call_while_a_stream_is_open_takes_nothing_from_it(llm: LLM) -> None:
    alone = llm.generate("left open", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("left open", GREEDY)
    begun = list(next(iter(stream)).token_ids)

    assert len(llm.generate("in between", GREEDY)[0].outputs[0].token_ids) == 12

    assert begun + [token for delta in stream for token in delta.token_ids] == alone


def test_threads_can_share_one_llm(llm: LLM) -> None:
    prompts = [f"thread number {index}" for index in range(4)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0].outputs[0].token_ids, prompts))

    assert together == alone
    assert not llm.engine.has_unfinished


def test_an_answer_that_is_aborted_from_outside_says_so(llm: LLM) -> None:
    stream = llm.stream("abort me", GREEDY)
    first = next(iter(stream))
    request_id = llm.engine.snapshot().requests[0].request_id

    assert llm.engine.abort(str(request_id))

    assert first.finish_reason is None
    assert [delta.finish_reason for delta in stream][-1] == "abort"


@pytest.mark.parametrize("priority", [["x", 1], [1], [1, 2, 3], 5, [1, None]])
def test_bad_priorities_are_refused_before_anything_is_queued(llm: LLM, priority: object) -> None:
    with pytest.raises(InvalidParameterError, match="priority"):
        llm.generate(["a", "b"], GREEDY, priority=priority)  # type: ignore[arg-type]
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("salt", ["", 7, b"x", []])
def test_a_salt_that_is_no_text_is_refused(llm: LLM, salt: object) -> None:
    with pytest.raises(InvalidParameterError, match="cache_salt"):
        llm.generate("a", GREEDY, cache_salt=salt)  # type: ignore[arg-type]


def test_the_greatest_seed_wraps_around_for_the_next_answer(llm: LLM) -> None:
    last = SamplingParams(seed=2**63 - 1, n=2, max_tokens=8, ignore_eos=True)
    wrapped = SamplingParams(seed=-(2**63), max_tokens=8, ignore_eos=True)

    answers = llm.generate("seeds", last)[0].outputs

    assert answers[1].token_ids == llm.generate("seeds", wrapped)[0].outputs[0].token_ids


def test_a_request_that_could_choose_no_token_is_refused_and_harms_nobody(llm: LLM) -> None:
    every_id = range(llm.vocab_size)
    with pytest.raises(InvalidParameterError, match="min_tokens"):
        llm.generate("a", SamplingParams(stop_token_ids=every_id, min_tokens=3, max_tokens=5))
    assert not llm.engine.has_unfinished


def test_a_forked_process_is_told_that_it_cannot_use_the_model(folder: Path) -> None:
    llm = LLM(folder, runner="native", max_model_len=64, num_blocks=16, threads=2)
    llm.generate("warm", GREEDY)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks under threads, which is the point
        child = os.fork()
    if child == 0:
        try:
            llm.generate("in the child", GREEDY)
        except MachineError:
            os.write(writer, b"told")
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 10) == b"told"
    os.waitpid(child, 0)
    os.close(reader)


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_weights_that_are_no_numbers_are_the_files_fault_not_ours(tmp_path, runner):
    model = TinyModel()
    tensors = make_tensors(model)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    llm = LLM(write_hf_model(model, tmp_path / "broken", tensors=tensors), runner=runner)

    with pytest.raises(ModelNumbersError, match="NaN or infinity"):
        llm.generate("hello", SamplingParams(max_tokens=4))
    with pytest.raises(ModelNumbersError):
        llm.generate("hello", SamplingParams(max_tokens=1, prompt_logprobs=1))


def test_an_instruction_set_can_be_named_and_the_widest_gives_the_bits_of_avx2(folder: Path) -> None:
    def answer(name: str) -> object:
        llm = LLM(str(folder), num_blocks=8, max_model_len=64, threads=1, instruction_set=name)
        return llm.generate("Every library", SamplingParams(temperature=0.0, max_tokens=12, logprobs=3))[0].outputs

    if not set(AVX2_FLAGS) <= set(read_machine().isa_flags):
        pytest.skip("this CPU has no AVX2")
    widest, avx2, portable = map(answer, ("auto", "avx2", "portable"))

    assert widest == avx2
    assert [output.token_ids for output in portable] == [output.token_ids for output in avx2]
    assert portable != avx2, "portable code rounds twice where AVX2 rounds once"
