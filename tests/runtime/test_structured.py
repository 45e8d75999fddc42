"""Structured output over real vocabularies: what is allowed, what is refused, and whole answers of a random model.

A model with random weights is the harshest one: it takes whatever the masks leave open.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError, MachineError
from octavo.models.load import open_model
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.structured import LlguidanceCompiler, LlguidanceMatcher
from octavo.runtime.tokenizer import Tokenizer
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import ENDOFTEXT_ID, IM_END_ID, SPECIAL_TOKENS, TinyModel, write_hf_model

VOCAB_SIZE = 512
EOS_IDS = (IM_END_ID, ENDOFTEXT_ID)
JSON_OBJECT = StructuredOutput(kind="json_object")


def regex(expression: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", value=expression)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_model(TinyModel(vocab_size=VOCAB_SIZE, num_layers=1), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module", params=["folder", "gguf"])
def tokenizer(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "folder":
        return load_tokenizer(open_model(folder))
    path = write_gguf_model(TinyModel(vocab_size=VOCAB_SIZE, num_layers=1), tmp_path_factory.mktemp("gguf") / "m.gguf")
    return load_tokenizer(open_model(path))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> LlguidanceCompiler:
    return LlguidanceCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)


@pytest.fixture(scope="module", params=["reference", "native"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return LLM(str(folder), runner=request.param, max_model_len=640, num_blocks=400, threads=1)


@pytest.fixture(scope="module")
def native(folder: Path) -> LLM:
    return LLM(str(folder), runner="native", max_model_len=1024, num_blocks=2000, threads=1)


def allowed_ids(matcher: LlguidanceMatcher) -> list[int]:
    mask = matcher.allowed_tokens()
    assert mask is not None and len(mask) == VOCAB_SIZE // 8
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


# --- which tokens are allowed -----------------------------------------------------------------------------------------


def test_any_text_allows_every_token_that_can_stand_in_text_and_the_end(
    compiler: LlguidanceCompiler, tokenizer: Tokenizer
) -> None:
    allowed = set(allowed_ids(compiler.compile(regex("(?s:.*)")).start()))

    for token_id in range(VOCAB_SIZE):
        spelled = tokenizer.token_bytes(token_id)
        starts_character = bool(spelled) and (spelled[0] < 0x80 or 0xC2 <= spelled[0] <= 0xF4)
        is_text = starts_character and not tokenizer.is_special(token_id)
        assert (token_id in allowed) == (is_text or token_id in EOS_IDS), (token_id, spelled)


def test_a_character_may_come_in_tokens_of_a_byte_each(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(regex("[é日]")).start()
    token_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, 259)}

    assert allowed_ids(matcher) == sorted(token_of[bytes([byte])] for byte in (0xC3, 0xE6))
    for byte in "日".encode():
        assert token_of[bytes([byte])] in allowed_ids(matcher)
        matcher.accept(token_of[bytes([byte])])
    assert allowed_ids(matcher) == sorted(EOS_IDS), "only the end may follow a text that is complete"


def test_special_tokens_are_no_text_even_where_a_grammar_spells_them(compiler: LlguidanceCompiler) -> None:
    choice = StructuredOutput.of_choice([SPECIAL_TOKENS[1]])

    allowed = allowed_ids(compiler.compile(choice).start())

    assert 1 not in allowed and allowed, "the text is spelled letter by letter"


def test_an_answer_may_end_or_go_on_where_one_choice_begins_another(
    compiler: LlguidanceCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(StructuredOutput.of_choice(["a", "aé"])).start()
    matcher.accept(tokenizer.encode("a", add_special_tokens=False)[0])

    assert set(EOS_IDS) < set(allowed_ids(matcher))


def test_answers_of_one_grammar_do_not_move_each_other(compiler: LlguidanceCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutput.of_choice(["xyz", "k"]))
    first, second = grammar.start(), grammar.start()
    before = allowed_ids(second)

    first.accept(allowed_ids(first)[0])

    assert allowed_ids(second) == before == allowed_ids(grammar.start()) != allowed_ids(first)


def test_a_grammar_is_compiled_once_and_shared(compiler: LlguidanceCompiler) -> None:
    assert compiler.compile(JSON_OBJECT) is compiler.compile(StructuredOutput(kind="json_object"))


def test_threads_may_compile_at_the_same_time(tokenizer: Tokenizer) -> None:
    compiler = LlguidanceCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)
    made: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: made.append(compiler.compile(regex(f"a{{{i % 3 + 1}}}")))) for i in range(9)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert len(made) == 9 and len(set(map(id, made))) == 3


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structured", "said"),
    [
        (regex("(a"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex("a\\"), "regex"),
        (StructuredOutput.of_json_schema({"type": "no type"}), "no type"),
        (StructuredOutput.of_json_schema({"$ref": "#"}), "json schema"),
        (StructuredOutput.of_json_schema({"$ref": "http://localhost/schema"}), "localhost"),
        (StructuredOutput.of_json_schema({"not": {"type": "string"}}), "not"),
        (StructuredOutput.of_json_schema("false"), "schema"),
        (StructuredOutput(kind="grammar", value='begin: "a"'), "start"),
        (StructuredOutput(kind="grammar", value="start: start"), "grammar"),
        (StructuredOutput(kind="grammar", value='start: "a'), "grammar"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    compiler: LlguidanceCompiler, structured: StructuredOutput, said: str
) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(said)) as caught:
        compiler.compile(structured)

    assert caught.value.param == "structured" and len(str(caught.value)) < 1000


def test_a_refused_grammar_leaves_the_engine_as_it_was(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="unclosed"):
        llm.generate("x", SamplingParams(structured=regex("(a")))

    assert not llm.engine.has_unfinished
    assert llm.generate("x", SamplingParams(structured=regex("ab"), max_tokens=9))[0].outputs[0].text == "ab"


def test_a_grammar_beyond_the_limits_of_a_step_ends_its_own_answer_alone(llm: LLM) -> None:
    too_much = SamplingParams(structured=regex("a{1000}{1000}"), max_tokens=20, temperature=0.0)
    free = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    alone = llm.generate("neighbour", free)[0].outputs[0]

    beyond, neighbour = llm.generate(["x", "neighbour"], [too_much, free])

    assert beyond.outputs[0].finish_reason == "error"
    assert neighbour.outputs[0].token_ids == alone.token_ids
    assert not llm.engine.has_unfinished


def test_without_the_extra_the_error_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = LlguidanceCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)

    with pytest.raises(MachineError, match=r"octavo\[serve\]"):
        compiler.compile(JSON_OBJECT)


# --- whole answers ----------------------------------------------------------------------------------------------------

names = st.text("abcdeé_ ", min_size=1, max_size=4)
numbers = st.tuples(st.integers(-500, 500), st.integers(0, 2000)).map(lambda pair: (pair[0], pair[0] + pair[1]))
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    numbers.map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}),
    numbers.map(lambda pair: {"type": "number", "minimum": pair[0], "maximum": pair[1] + 0.5}),
    st.integers(0, 8).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(["[a-c]{1,4}", "x?(yz){2}", "[0-9]{3}é"]).map(
        lambda one: {"type": "string", "pattern": f"^{one}$"}
    ),
    st.lists(st.one_of(names, st.integers(-(2**53), 2**53), st.booleans(), st.none()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    names.map(lambda value: {"const": value}),
)


def _objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], is_required: list[bool]) -> dict[str, Any]:
        required = [name for name, wanted in zip(properties, is_required, strict=False) if wanted]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(make, st.dictionaries(names, children, max_size=3), st.lists(st.booleans(), max_size=3))


schemas = st.recursive(
    leaves,
    lambda children: st.one_of(
        _objects(children),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, children, st.integers(0, 3)),
        st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


def is_beginning(llm: LLM, structured: StructuredOutput, token_ids: list[int]) -> bool:
    """Tell whether a text that was cut follows its grammar as far as it goes."""
    tokenizer = llm.tokenizer
    matcher = LlguidanceCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS).compile(structured).start()
    for token_id in token_ids:
        if token_id not in allowed_ids(matcher):
            return False
        matcher.accept(token_id)
    return True


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(schemas, min_size=10, max_size=10), seed=st.integers(0, 2**30))
def test_whatever_a_random_model_says_is_of_the_schema(native: LLM, drawn: list[Any], seed: int) -> None:
    wanted = [StructuredOutput.of_json_schema(schema) for schema in drawn]
    params = [
        SamplingParams(structured=one, max_tokens=700, seed=seed + i, temperature=(0.0, 1.0, 3.0)[i % 3])
        for i, one in enumerate(wanted)
    ]

    outputs = native.generate(["say something"] * len(params), params)

    for schema, structured, output in zip(drawn, wanted, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            jsonschema_rs.validator_for(schema).validate(json.loads(answer.text))
        else:  # white space and free strings can fill any answer
            assert answer.finish_reason == "length" and is_beginning(native, structured, answer.token_ids)


def test_a_random_model_reaches_the_end_of_objects(native: LLM) -> None:
    """The property above would prove little if every answer were cut."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "é"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    params = SamplingParams(structured=StructuredOutput.of_json_schema(schema), max_tokens=900, n=8, seed=1)

    answers = native.generate("say something", params)[0].outputs

    values = [json.loads(answer.text) for answer in answers if answer.finish_reason == "stop"]
    assert len(values) >= 4 and len({json.dumps(value) for value in values}) > 1
    assert all(jsonschema_rs.validator_for(schema).is_valid(value) for value in values)


@pytest.mark.parametrize(
    "expression", [r"[a-f]{3}-\d+é", r"(yes|no|maybe not)!*", r"\d{4}-\d\d-\d\d", "日本?[^a-z\n]{2}"]
)
def test_answers_match_the_expression_as_a_whole(llm: LLM, expression: str) -> None:
    params = SamplingParams(structured=regex(expression), max_tokens=60, n=4, seed=5, temperature=2.0)

    answers = llm.generate("a prompt", params)[0].outputs

    assert len({answer.text for answer in answers}) > 1
    for answer in answers:
        if answer.finish_reason == "stop":
            assert re.fullmatch(expression, answer.text)
        else:
            assert is_beginning(llm, regex(expression), answer.token_ids)
    assert any(answer.finish_reason == "stop" for answer in answers)


def test_slashes_and_line_feeds_in_an_expression_are_itself(llm: LLM) -> None:
    params = SamplingParams(structured=regex('a/\n|"/b/ #'), max_tokens=20, n=8, seed=2, temperature=5.0)

    answers = llm.generate("a prompt", params)[0].outputs

    assert {answer.text for answer in answers} == {"a/\n", '"/b/ #'}


def test_answers_are_one_of_the_choices(llm: LLM) -> None:
    choices = ["a", "ab", 'with "quotes" and \\', "line\nfeed", "日本", "[x]|(y)", " space "]
    params = SamplingParams(
        structured=StructuredOutput.of_choice(choices), n=24, seed=9, temperature=5.0, max_tokens=40
    )

    answers = llm.generate("a prompt", params)[0].outputs

    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert {answer.text for answer in answers} <= set(choices)
    assert len({answer.text for answer in answers}) > 3


def test_a_lark_grammar_is_followed(llm: LLM) -> None:
    grammar = StructuredOutput(kind="grammar", value='start: pair ("," pair)*\npair: /[a-z]{1,3}/ "=" /[0-9]/\n')

    answer = llm.generate("x", SamplingParams(structured=grammar, max_tokens=30, seed=4))[0].outputs[0]

    assert re.match(r"([a-z]{1,3}=[0-9],?)+", answer.text)


def test_an_answer_that_is_cut_says_so_and_is_the_beginning_of_the_whole_one(llm: LLM) -> None:
    structured = StructuredOutput.of_json_schema({"type": "array", "items": {"enum": ["one", 2]}, "minItems": 4})
    whole = llm.generate("x", SamplingParams(structured=structured, max_tokens=200, seed=6))[0].outputs[0]

    for max_tokens in (1, 2, 7):
        cut = llm.generate("x", SamplingParams(structured=structured, max_tokens=max_tokens, seed=6))[0].outputs[0]
        assert cut.finish_reason == "length" and cut.token_ids == whole.token_ids[:max_tokens]


def test_both_runners_say_the_same(folder: Path) -> None:
    params = SamplingParams(structured=regex("[ab]{30}"), temperature=0.0, max_tokens=40)
    answers = [
        LLM(str(folder), runner=runner, max_model_len=128, num_blocks=32, threads=1, kv_cache_dtype="f32").generate(
            "p", params
        )[0]
        for runner in ("reference", "native")
    ]

    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids


def test_masks_do_not_change_log_probabilities(llm: LLM) -> None:
    """They are of the model's own distribution: finite, and the same as when the same tokens are scored as a prompt."""
    params = SamplingParams(structured=regex("[ab]{6}"), logprobs=2, max_tokens=10, temperature=0.0)
    answer = llm.generate("prompt", params)[0].outputs[0]
    assert answer.logprobs is not None

    ids = [*llm.tokenizer.encode("prompt"), *answer.token_ids]
    scores = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=0, prompt_logprobs=2))[0].prompt_logprobs

    assert scores is not None
    assert scores[-len(answer.token_ids) :] == answer.logprobs
    assert any(candidates[token].rank > 1 for token, candidates in zip(answer.token_ids, answer.logprobs, strict=True))


# --- company and pressure ---------------------------------------------------------------------------------------------


def _mixed_params() -> list[SamplingParams]:
    wanted = [
        None,
        JSON_OBJECT,
        regex("[a-z ]{40,80}"),
        StructuredOutput.of_json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 20}),
    ]
    return [
        SamplingParams(structured=one, max_tokens=60, seed=30 + i, logprobs=2, n=1 + i % 3)
        for i, one in enumerate(wanted * 3)
    ]


def test_structured_answers_and_their_neighbours_keep_their_bits_under_pressure(folder: Path) -> None:
    params = _mixed_params()
    prompts = [f"prompt {i} " * (1 + i % 4) for i in range(len(params))]
    roomy = LLM(str(folder), runner="native", max_model_len=256, num_blocks=600, threads=1)
    tight = LLM(str(folder), runner="native", max_model_len=256, num_blocks=24, max_num_seqs=8, threads=1)
    alone = [roomy.generate(prompt, one)[0].outputs for prompt, one in zip(prompts, params, strict=True)]

    together = [output.outputs for output in tight.generate(prompts, params)]

    assert tight.engine.metrics.num_preemptions > 0
    assert together == alone
