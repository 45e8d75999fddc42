"""Grammars from strangers: what would keep a compiler busy, or overflow its stack, is refused and hurts nobody."""

from __future__ import annotations

import gc
import os

import pytest

from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError
from octavo.models.load import open_model
from octavo.runtime.grammar_probe import GrammarProbe
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.structured import LlguidanceCompiler
from octavo.runtime.tokenizer import Tokenizer
from octavo.testing.tiny_models import ENDOFTEXT_ID, IM_END_ID, TinyModel, write_hf_model

WORD = StructuredOutput(kind="regex", value="[a-z]+!")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = TinyModel(vocab_size=512, num_layers=1)
    return load_tokenizer(open_model(write_hf_model(model, tmp_path_factory.mktemp("tiny") / "model")))


def make_compiler(tokenizer: Tokenizer, *, is_guarded: bool = True) -> LlguidanceCompiler:
    eos = (IM_END_ID, ENDOFTEXT_ID)
    return LlguidanceCompiler(tokenizer, vocab_size=512, eos_token_ids=eos, is_guarded=is_guarded)


def probe_of(compiler: LlguidanceCompiler) -> GrammarProbe:
    assert compiler._probe is not None and compiler._probe._process is not None
    return compiler._probe


def pid_of(compiler: LlguidanceCompiler) -> int:
    process = probe_of(compiler)._process
    assert process is not None
    return process.pid


def rule_chain(length: int) -> StructuredOutput:
    rules = [f"a{i}: a{i + 1}" for i in range(length)]
    return StructuredOutput(kind="grammar", value="\n".join(["start: a0", *rules, f'a{length}: "x"\n']))


def reference_chain(length: int) -> StructuredOutput:
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    schema = {"$defs": {**chain, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}
    return StructuredOutput.of_json_schema(schema)


@pytest.mark.parametrize("hostile", [rule_chain(8000), reference_chain(2300)], ids=["rules", "references"])
def test_what_overflows_the_stack_of_a_compiler_is_refused(tokenizer: Tokenizer, hostile: StructuredOutput) -> None:
    compiler = make_compiler(tokenizer)
    compiler.compile(WORD)
    first = pid_of(compiler)

    with pytest.raises(InvalidParameterError, match="nested too deeply"):
        compiler.compile(hostile)

    assert compiler.compile(StructuredOutput.of_choice(["a", "b"])).start().allowed_tokens() is not None
    assert pid_of(compiler) != first, "the process that died has been replaced"


def test_what_would_keep_a_compiler_busy_for_hours_is_refused(tokenizer: Tokenizer) -> None:
    compiler = make_compiler(tokenizer)

    with pytest.raises(InvalidParameterError, match="more than 2 s to compile"):
        compiler.compile(StructuredOutput.of_json_schema({"type": "integer", "multipleOf": 99_999_999}))

    compiler.compile(WORD)


@pytest.mark.parametrize(
    "structured",
    [
        WORD,
        StructuredOutput(kind="json_object"),
        StructuredOutput(kind="regex", value="one text alone"),
        StructuredOutput.of_choice([f"choice {i} é" for i in range(2000)]),
        StructuredOutput.of_json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(200)}}),
        rule_chain(50),
        reference_chain(20),
    ],
    ids=lambda structured: f"{structured.kind} {structured.value[:12]}",
)
def test_honest_grammars_pass_and_become_the_same(tokenizer: Tokenizer, structured: StructuredOutput) -> None:
    guarded, plain = (make_compiler(tokenizer, is_guarded=one).compile(structured).start() for one in (True, False))

    assert guarded.allowed_tokens() == plain.allowed_tokens()


def test_a_wrong_grammar_is_refused_in_the_words_of_its_compiler_and_costs_no_process(tokenizer: Tokenizer) -> None:
    compiler = make_compiler(tokenizer)
    compiler.compile(WORD)
    first = pid_of(compiler)

    with pytest.raises(InvalidParameterError, match="unclosed group"):
        compiler.compile(StructuredOutput(kind="regex", value="(a"))

    assert pid_of(compiler) == first


def test_a_process_that_somebody_ended_is_replaced_without_a_word(tokenizer: Tokenizer) -> None:
    compiler = make_compiler(tokenizer)
    compiler.compile(WORD)
    process = probe_of(compiler)._process
    assert process is not None
    process.kill()
    process.wait(timeout=30)

    compiler.compile(StructuredOutput(kind="regex", value="other"))


def test_the_process_ends_with_its_compiler(tokenizer: Tokenizer) -> None:
    compiler = make_compiler(tokenizer)
    compiler.compile(WORD)
    pid = pid_of(compiler)

    del compiler
    gc.collect()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_ends_when_its_caller_is_killed(tokenizer: Tokenizer) -> None:
    """By the end of its input, whoever holds the other side."""
    compiler = make_compiler(tokenizer)
    compiler.compile(WORD)
    process = probe_of(compiler)._process
    assert process is not None and process.stdin is not None

    process.stdin.close()

    assert process.wait(timeout=30) == 0


def test_an_interrupt_from_the_terminal_does_not_reach_it(tokenizer: Tokenizer) -> None:
    compiler = make_compiler(tokenizer)
    compiler.compile(WORD)

    assert os.getpgid(pid_of(compiler)) != os.getpgid(0)
