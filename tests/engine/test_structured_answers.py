"""Answers held to a grammar, in the engine: with a grammar of words and a runner that must see every mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from octavo.core.events import EventLog, RequestPreempted
from octavo.core.invariants import check_idle, check_scheduler
from octavo.core.kv_cache import GroupSpec
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.sampling import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SampleRow
from octavo.core.structured import StructuredOutput
from octavo.engine.clock import MonotonicClock
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.errors import InvalidParameterError
from octavo.testing.fake_runner import FakeRunner, hashed_token

EOS = 0
VOCAB_SIZE = 256


@dataclass
class WordMatcher:
    """Follows one of several words, byte by byte; `!` can be reached but not followed."""

    words: tuple[bytes, ...]
    so_far: bytes = b""

    def allowed_tokens(self) -> bytes | None:
        following = [word[len(self.so_far)] for word in self.words if self._continues(word)]
        following += [EOS] * (self.so_far in self.words)
        if not following or self.so_far.endswith(b"!"):
            return None
        mask = bytearray(VOCAB_SIZE // 8)
        for token_id in following:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)

    def accept(self, token_id: int) -> None:
        assert self.allowed_tokens() is not None
        self.so_far += bytes([token_id])

    def _continues(self, word: bytes) -> bool:
        return len(word) > len(self.so_far) and word.startswith(self.so_far)


class Words:
    """Grammars of words: the choices are the words."""

    def __init__(self) -> None:
        self.num_compiled = 0

    def compile(self, structured: StructuredOutput) -> WordGrammar:
        self.num_compiled += 1
        if structured.kind != "choice":
            raise InvalidParameterError("only words", param="structured")
        return WordGrammar(tuple(word.encode() for word in structured.choices))


@dataclass(frozen=True)
class WordGrammar:
    words: tuple[bytes, ...]

    def start(self) -> WordMatcher:
        return WordMatcher(self.words)


class ByteSpeller:
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


class Bench:
    """An engine over a runner that draws from a hash among what is allowed."""

    def __init__(self, *, num_blocks: int = 64, max_num_seqs: int = 8, eos: tuple[int, ...] = (EOS,)) -> None:
        self.events = EventLog()
        self.kv_cache = PagedKVCache(num_blocks, 4, groups=[GroupSpec()], max_chunk_tokens=64, events=self.events)
        limits = Limits(max_model_len=100, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
        self.scheduler = Scheduler(self.kv_cache, limits, events=self.events)
        self.rows: list[SampleRow] = []
        draw = hashed_token(VOCAB_SIZE)

        def choose(row: SampleRow, history: Sequence[int]) -> int:
            self.rows.append(row)
            return draw(row, history)

        self.grammars = Words()
        self.engine = Engine(
            self.scheduler,
            FakeRunner(num_blocks=num_blocks, block_size=4, choose=choose),
            events=self.events,
            clock=MonotonicClock(),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos,
            tokenizer=ByteSpeller(),
            grammars=self.grammars,
            seed=1,
        )
        self.preemptions: list[RequestPreempted] = []
        self.engine.subscribe(
            lambda events: self.preemptions.extend(one for one in events if isinstance(one, RequestPreempted))
        )

    def add(
        self, request_id: str = "a", words: Sequence[str] = (), prompt: Sequence[int] = (7, 8, 9), **params
    ) -> None:
        structured = StructuredOutput.of_choice(list(words)) if words else None
        one = SamplingParams(structured=structured, **{"max_tokens": 40, **params})
        self.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=one))

    def finish(self) -> dict[tuple[str, int], tuple[str, str | None]]:
        """Run to the end; return each answer's text and reason."""
        texts: dict[tuple[str, int], str] = {}
        reasons: dict[tuple[str, int], str | None] = {}
        for _ in range(1000):
            if not self.engine.has_unfinished:
                check_idle(self.kv_cache)
                return {key: (text, reasons[key]) for key, text in texts.items()}
            self._take(self.engine.step(), texts, reasons)
            check_scheduler(self.scheduler)
        raise AssertionError("the engine does not come to an end")

    @staticmethod
    def _take(deltas: Sequence[OutputDelta], texts: dict, reasons: dict) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert reasons.get(key) is None, "nothing follows an end"
            texts[key] = texts.get(key, "") + delta.text
            reasons[key] = delta.finish_reason


WORDS = ["yes", "yes, of course", "no", "perhaps tomorrow", "nobody knows", "zebra"]


def test_an_answer_is_one_of_the_words_and_ends_by_itself() -> None:
    bench = Bench()
    for seed in range(12):
        bench.add(f"r{seed}", WORDS, seed=seed)

    answers = bench.finish()

    assert {text for text, _ in answers.values()} <= set(WORDS)
    assert {reason for _, reason in answers.values()} == {"stop"}
    assert len({text for text, _ in answers.values()}) > 1


def test_a_free_neighbour_never_gets_a_mask() -> None:
    bench = Bench()
    bench.add("held", WORDS)
    bench.add("free", max_tokens=5)

    bench.finish()

    assert {row.request_id: row.allowed_tokens is None for row in bench.rows} == {"held": False, "free": True}


def test_each_of_n_answers_follows_the_grammar_by_itself() -> None:
    bench = Bench(max_num_seqs=2)  # some answers fork, others wait for a seat
    bench.add("a", WORDS, n=6, seed=3)

    answers = bench.finish()

    assert len(answers) == 6
    assert {text for text, _ in answers.values()} <= set(WORDS) and len({text for text, _ in answers.values()}) > 1


def test_a_preempted_answer_goes_on_where_it_was() -> None:
    words = [word * 3 for word in ("a long word ", "another word ", "nothing short ")]
    arrivals = [{"request_id": f"r{i}", "words": words, "seed": i, "prompt": range(i + 1, i + 9)} for i in range(6)]
    alone = {}
    for arrival in arrivals:
        bench = Bench()
        bench.add(**arrival)
        alone |= bench.finish()
    tight = Bench(num_blocks=13)
    for arrival in arrivals:
        tight.add(**arrival)

    assert tight.finish() == alone
    assert tight.preemptions, "the pool was meant to be short"


def test_a_cut_answer_is_the_beginning_of_a_word() -> None:
    bench = Bench()
    bench.add("a", ["perhaps tomorrow"], max_tokens=7)

    assert bench.finish() == {("a", 0): ("perhaps", "length")}


def test_a_stop_string_still_ends_an_answer() -> None:
    bench = Bench()
    bench.add("a", ["perhaps tomorrow"], stop=" to")

    assert bench.finish() == {("a", 0): ("perhaps", "stop")}


def test_an_answer_that_nothing_can_follow_ends_with_an_error_and_all_its_text_alone() -> None:
    bench = Bench()
    bench.add("stuck", ["oh!no"])
    bench.add("fine", ["oh yes"])

    assert bench.finish() == {("stuck", 0): ("oh!", "error"), ("fine", 0): ("oh yes", "stop")}


def test_an_aborted_answer_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.add("a", WORDS, n=3)
    bench.engine.step()

    bench.engine.abort("a")

    assert {reason for _, reason in bench.finish().values()} == {"abort"}
    bench.add("a", ["again"])
    assert bench.finish() == {("a", 0): ("again", "stop")}


def test_a_grammar_compiled_elsewhere_is_not_compiled_again() -> None:
    bench = Bench()
    params = SamplingParams(structured=StructuredOutput.of_choice(["word"]), max_tokens=9)
    grammar = bench.engine.compile_grammar(params)

    bench.engine.add(EngineRequest(request_id="a", prompt_token_ids=(5,), params=params), grammar)

    assert bench.finish() == {("a", 0): ("word", "stop")}
    assert bench.grammars.num_compiled == 1


def test_a_grammar_that_does_not_compile_is_refused_and_leaves_nothing() -> None:
    bench = Bench()
    params = SamplingParams(structured=StructuredOutput(kind="regex", value="x"))

    with pytest.raises(InvalidParameterError, match="only words"):
        bench.engine.add(EngineRequest(request_id="a", prompt_token_ids=(5,), params=params))

    assert not bench.engine.has_unfinished
    bench.add("a", ["yes"])
    assert bench.finish() == {("a", 0): ("yes", "stop")}


def test_a_model_without_an_end_cannot_be_held_to_a_grammar() -> None:
    bench = Bench(eos=())

    with pytest.raises(InvalidParameterError, match="names no end-of-sequence token"):
        bench.add("a", WORDS)
