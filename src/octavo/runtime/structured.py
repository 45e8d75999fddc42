"""LlguidanceCompiler: structured output as masks over the model's own tokens, with llguidance.

    compile(structured)   schema, expression or grammar  ->  grammar over the bytes that tokens spell; kept for reuse
    start()               a matcher at the beginning of a text: a copy, some microseconds
    allowed_tokens()      walks the trie of all tokens; those that are special or spell nothing are never in it

Tokens are matched by their bytes, so one may end within a character and the next complete it. What following a grammar
may cost is counted in steps of work, not in time, so that the same answer is cut short on any machine and in any
company: the worst grammar found takes 16 ms a token, an honest one 0.03. What compiling one may cost is bounded by
`GrammarProbe`, where it matters.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from octavo.core.ports import TokenMatcher
from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError, MachineError
from octavo.runtime.grammar_probe import LIMITS, GrammarProbe, SpelledVocabulary
from octavo.runtime.tokenizer import Tokenizer
from octavo.units import cdiv

if TYPE_CHECKING:
    import llguidance

MAX_CACHED_GRAMMARS = 64
MAX_MESSAGE_CHARACTERS = 500
WHITE_SPACE = r"[ \n\r\t]{1,64}"
"""Between the tokens of JSON: bounded, or a model that only indents fills its whole answer with it."""


class LlguidanceMatcher:
    """Implements `TokenMatcher`.

    Args:
        vocab_size: Bits of a mask, rounded up to whole words; llguidance's own has room for one more.
    """

    __slots__ = ("_matcher", "_num_mask_bytes")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = 4 * cdiv(vocab_size, 32)

    def allowed_tokens(self) -> bytes | None:
        mask = self._matcher.compute_bitmask()[: self._num_mask_bytes]
        is_empty = mask.count(0) == len(mask)
        # In an error the mask asks for the end of the text, complete or not.
        return None if is_empty or self._matcher.is_error() else mask

    def accept(self, token_id: int) -> None:
        # What cannot be followed, because a limit was met, leaves an error behind that `allowed_tokens` reports.
        self._matcher.consume_token(token_id)


class LlguidanceGrammar:
    """Implements `Grammar`: a matcher that never moves, copied for each answer."""

    __slots__ = ("_first", "_vocab_size")

    def __init__(self, first: llguidance.LLMatcher, vocab_size: int) -> None:
        self._first = first
        self._vocab_size = vocab_size

    def start(self) -> TokenMatcher:
        return LlguidanceMatcher(self._first.deep_copy(), self._vocab_size)


class LlguidanceCompiler:
    """Implements `GrammarCompiler` for one vocabulary.

    One thread compiles at a time, so that many hostile schemas keep one core busy and not all.

    Args:
        tokenizer: Spells tokens.
        vocab_size: Ids the model can choose: the length of a mask in bits, rounded up to whole words.
        eos_token_ids: Ids that end a text.
        is_guarded: Try each grammar out in another process first: for those that strangers send.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: tuple[int, ...], is_guarded: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._is_guarded = is_guarded
        self._probe: GrammarProbe | None = None
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._grammars: OrderedDict[StructuredOutput, LlguidanceGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> LlguidanceGrammar:
        known = self._cached(structured)
        if known is not None:
            return known
        with self._compile_lock:
            # Kept before the lock is given back: whoever waited for it finds the grammar, and compiles none of its own.
            grammar = self._cached(structured) or self._compile(structured)
            with self._cache_lock:
                self._grammars[structured] = grammar
                while len(self._grammars) > MAX_CACHED_GRAMMARS:
                    self._grammars.popitem(last=False)
        return grammar

    def _cached(self, structured: StructuredOutput) -> LlguidanceGrammar | None:
        with self._cache_lock:
            grammar = self._grammars.get(structured)
            if grammar is not None:
                self._grammars.move_to_end(structured)
            return grammar

    def _compile(self, structured: StructuredOutput) -> LlguidanceGrammar:
        _check_installed()
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - see `_check_installed`

        try:
            source = _grammar_source(structured)
        except ValueError as error:
            raise _refusal(structured, str(error)) from error
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        if self._probe is not None:
            said = self._probe.check(source)
            if said:
                raise _refusal(structured, said)
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(structured, matcher.get_error())
        # Some grammars turn out impossible, or too large, only when their first token is asked for.
        grammar = LlguidanceGrammar(matcher, self._vocab_size)
        if LlguidanceMatcher(matcher, self._vocab_size).allowed_tokens() is None:
            raise _refusal(structured, matcher.get_error() or "no token of this model can begin such a text")
        return grammar

    def _make_vocabulary(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - see `_check_installed`

        spelled = _spell(self._tokenizer, self._vocab_size, self._eos_token_ids)
        if self._is_guarded:
            self._probe = GrammarProbe(spelled)
        return LLTokenizer(
            TokenizerWrapper(_Wrapped(self._tokenizer, spelled)),
            n_vocab=self._vocab_size,
            eos_token=list(self._eos_token_ids),
        )


def _spell(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> SpelledVocabulary:
    tokens = tuple(tokenizer.token_bytes(token_id) for token_id in range(vocab_size))
    return SpelledVocabulary(
        tokens=tokens,
        # An id that spells nothing would otherwise be allowed anywhere, for ever.
        special_token_ids=tuple(
            token_id
            for token_id, spelled in enumerate(tokens)
            if not spelled or tokenizer.is_special(token_id) or token_id in eos_token_ids
        ),
        eos_token_ids=eos_token_ids,
        bos_token_id=tokenizer.bos_token_id,
    )


class _Wrapped:
    """A vocabulary as llguidance's `TokenizerWrapper` wants to see it."""

    def __init__(self, tokenizer: Tokenizer, spelled: SpelledVocabulary) -> None:
        self._tokenizer = tokenizer
        self.tokens = spelled.tokens
        self.special_token_ids = spelled.special_token_ids
        self.eos_token_id = spelled.eos_token_ids[0]
        self.bos_token_id = spelled.bos_token_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _check_installed() -> None:
    # Not imported at the top: its 20 MB are loaded for those who ask for structured output.
    try:
        import llguidance  # noqa: F401, PLC0415
    except ImportError as error:
        raise MachineError(
            "structured output and required tool calls need the package llguidance",
            because=str(error),
            hints=('pip install "octavo[serve]"',),
        ) from error


def _grammar_source(structured: StructuredOutput) -> str:
    """Return llguidance's own form of what is wanted.

    Raises:
        ValueError: it is not of its kind.
    """
    from llguidance import LLMatcher, regex_to_lark  # noqa: PLC0415 - see `_check_installed`

    match structured.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', {"whitespace_pattern": WHITE_SPACE})
        case "json_schema":
            schema = "{}" if json.loads(structured.value) is True else structured.value
            return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITE_SPACE})
        case "regex":
            if (len(structured.value) - len(structured.value.rstrip("\\"))) % 2:
                raise ValueError("invalid regex: it ends within an escape")
            # Digits in the plain sense, as in JSON schemas: a date must not come out in the digits of any script.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(structured.value, 'd')}/")
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_literal, structured.choices)))
        case "grammar":
            return LLMatcher.grammar_from_lark(structured.value)


def _literal(text: str) -> str:
    """Return an expression that matches `text` alone."""
    return "".join(one if one.isascii() and one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


def _refusal(structured: StructuredOutput, said: str) -> InvalidParameterError:
    said = " ".join(said.split())
    if len(said) > MAX_MESSAGE_CHARACTERS:
        said = said[:MAX_MESSAGE_CHARACTERS] + " ..."
    return InvalidParameterError(
        f"this {structured.kind.replace('_', ' ')} cannot be followed: {said}", param="structured"
    )
