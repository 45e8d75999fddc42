"""What a smaller KV cache costs: variants of it against float32 keys and values, on the same weights and the same text.

    distributions   KL divergence, likeliest token and perplexity after every token, by position
    passkeys        a number hidden early in a long text, asked for at its end
    speed           tokens per second at the end of the text

Weights are loaded once; every variant is a runner of its own over them.
"""

from __future__ import annotations

import importlib.resources
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.config.engine import DEFAULT_ATTENTION_SINKS, EngineConfig, KVDtype
from octavo.config.machine import read_machine
from octavo.errors import InvalidParameterError, ModelNumbersError
from octavo.llm.assemble import model_facts
from octavo.llm.passkey import MAX_ANSWER_TOKENS, PASSKEY_DEPTHS, Passkey, make_passkey
from octavo.models.attention_window import with_attention_window
from octavo.models.decoder import emit_decoder
from octavo.models.download import Progress, ignore_progress
from octavo.models.fetch import fetch
from octavo.models.load import OpenedModel, open_model
from octavo.models.sparse import with_sparse_blocks
from octavo.models.spec import ModelSpec
from octavo.models.weights import WeightSource
from octavo.planner.memory import layer_token_bytes
from octavo.planner.resolve import resolve
from octavo.runtime.divergence import Divergence, DivergenceSummary, are_distributions, log_softmax
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.native_weights import HeldWeights, pack_weights
from octavo.runtime.sampler import no_distribution
from octavo.runtime.text_runner import TextRunner
from octavo.runtime.tokenizer import Tokenizer
from octavo.units import RequestId

EXACT: KVDtype = "f32"
NUM_DECODED = 32
"""Tokens whose decoding is timed."""

_NUM_BUCKETS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A range of positions, and what it came to."""

    first_position: int
    last_position: int
    summary: DivergenceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyResult:
    """Whether a number hidden in a text of so many tokens, at this share of it, was found again."""

    length_tokens: int
    depth_ratio: float
    is_found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to hold keys and values and to read them.

    Args:
        attention_window: Last tokens that a query sees, besides the first few; `None` means all.
        sparse_blocks: Tiles of 16 tokens that a query reads; 0 means all.
    """

    kv_cache_dtype: KVDtype
    attention_window: int | None = None
    sparse_blocks: int = 0

    @property
    def label(self) -> str:
        """For tables: `int8`, `f16, window 1024`, `f16, 32 tiles`."""
        parts: list[str] = [self.kv_cache_dtype]
        parts += [f"window {self.attention_window}"] if self.attention_window is not None else []
        parts += [f"{self.sparse_blocks} tiles"] if self.sparse_blocks else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What one way costs.

    Args:
        bytes_per_token: Of keys and values, over all layers, scales and bounds included.
        decode_tokens_per_s: At the end of the text; `None` where no token can be chosen there.
    """

    way: Way
    bytes_per_token: int
    whole: DivergenceSummary
    buckets: tuple[Bucket, ...]
    passkeys: tuple[PasskeyResult, ...]
    decode_tokens_per_s: float | None

    @property
    def is_broken(self) -> bool:
        """Whether the model says nothing after some tokens: a key or value is beyond what the dtype holds."""
        return not math.isfinite(self.whole.kl_mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvaluation:
    """All variants, in the order asked.

    Args:
        exact_passkeys: What the model finds with exact keys and values: no cache can do better.
    """

    model: str
    threads: int
    num_positions: int
    exact_passkeys: tuple[PasskeyResult, ...]
    variants: tuple[Variant, ...]


class KVEvaluator:
    """A model and a text, ready to be read with one kind of cache after another.

    Args:
        text: What is read.
        max_tokens: Tokens read at most; the model's limit and the text's length bound it, too.
        ways: Will be asked for: those that do not suit the model are refused before its weights are loaded.

    Raises:
        InvalidParameterError: the text is too short, or the native kernels cannot be used.
        ModelNumbersError: from `evaluate`, where exact keys and values leave no distribution.
        OctavoError: as for loading a model.
    """

    def __init__(
        self,
        config: EngineConfig,
        text: str,
        *,
        max_tokens: int | None = None,
        ways: Sequence[Way] = (),
        progress: Progress | None = None,
    ) -> None:
        report = progress or ignore_progress
        self._model: OpenedModel = open_model(fetch(config.model, progress=report).path)
        resolved = resolve(config, read_machine(), model_facts(self._model, config))
        if resolved.runner != "native":
            raise InvalidParameterError(
                "must be native", param="runner", because="whole distributions are read from the native kernels"
            )
        self.threads = resolved.threads
        self.model_name = config.model
        self._tokenizer: Tokenizer = load_tokenizer(self._model)
        self.token_ids = self._read(text, max_tokens)
        for way in ways:
            self._spec(way)
        self._weights = self._load(resolved.weight_dtype, report)

    def evaluate(
        self,
        ways: Sequence[Way],
        *,
        has_passkeys: bool = True,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> KVEvaluation:
        """Read the text once with exact keys and values and all variants side by side.

        Args:
            on_progress: Called with the tokens read so far, by all runners together, and in all.
        """
        passkeys = self._passkeys() if has_passkeys else []
        num_read = (1 + len(ways)) * len(self.token_ids)
        total = num_read + (1 + len(ways)) * sum(len(each.token_ids) for each in passkeys)
        done = 0

        def advance(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            if on_progress is not None:
                on_progress(done, total)

        exact = self._runner(Way(kv_cache_dtype=EXACT))
        runners = {way: self._runner(way) for way in ways}
        divergences = self._compare(exact, runners, advance)
        variants = []
        for way, runner in runners.items():
            speed = self._decode_speed(runner)
            found = tuple(self._ask(runner, each, advance) for each in passkeys)
            variants.append(self._variant(way, divergences[way], found, speed))
        return KVEvaluation(
            model=self.model_name,
            threads=self.threads,
            num_positions=len(self.token_ids) - 1,
            exact_passkeys=tuple(self._ask(exact, each, advance) for each in passkeys),
            variants=tuple(variants),
        )

    def _read(self, text: str, max_tokens: int | None) -> list[int]:
        """Return as many tokens as were asked for; without a number, as many as model and text allow."""
        limit = self._model.spec.max_position
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=True))
        self._check_length(min(limit, max_tokens or limit, len(token_ids)), max_tokens)
        for most, because in ((limit, "the model's limit"), (len(token_ids), "what the text has")):
            if max_tokens is not None and max_tokens > most:
                raise InvalidParameterError(
                    f"{max_tokens:,} tokens cannot be read",
                    param="--max-tokens",
                    because=f"{most:,} are {because}",
                    hints=(f"`--max-tokens {most}`",),
                )
        return token_ids[: max_tokens or limit]

    def _check_length(self, num_tokens: int, max_tokens: int | None) -> None:
        least = 2 * _NUM_BUCKETS
        if num_tokens >= least:
            return
        if max_tokens is not None and max_tokens < least:
            raise InvalidParameterError(
                f"{max_tokens} tokens are too few, at least {least} are needed", param="--max-tokens"
            )
        raise InvalidParameterError(
            f"the text has {num_tokens} tokens, at least {least} are needed",
            param="--text",
            hints=("leave out --text: a novel comes along",),
        )

    def _load(self, weight_dtype: str, report: Progress) -> HeldWeights:
        def progress(done: int, total: int) -> None:
            report("loading", done, total)

        with WeightSource(self._model) as source:
            tensors = source.read_all(progress)
            return pack_weights(tensors, self._model.program, weight_dtype=weight_dtype)  # type: ignore[arg-type]

    def _spec(self, way: Way) -> ModelSpec:
        num_sinks = 0 if way.attention_window is None else DEFAULT_ATTENTION_SINKS
        spec = with_attention_window(self._model.spec, window=way.attention_window, num_sinks=num_sinks)
        return with_sparse_blocks(spec, way.sparse_blocks)

    def _runner(self, way: Way) -> TextRunner:
        spec = self._spec(way)
        return TextRunner(
            spec,
            emit_decoder(spec),
            self._weights,
            kv_cache_dtype=way.kv_cache_dtype,
            max_tokens=len(self.token_ids) + NUM_DECODED,
            threads=self.threads,
        )

    def _compare(
        self, exact: TextRunner, runners: dict[Way, TextRunner], advance: Callable[[int], None]
    ) -> dict[Way, Divergence]:
        divergences = {way: Divergence() for way in runners}
        readers = [runner.read(self.token_ids) for runner in runners.values()]
        position = 0
        for logits in exact.read(self.token_ids):
            next_ids = self.token_ids[position + 1 : position + 1 + len(logits)]
            wanted = log_softmax(logits[: len(next_ids)])
            if not are_distributions(wanted):
                raise no_distribution("with f32 keys and values, the logits hold NaN or infinity", RequestId("text"))
            advance(len(logits))
            # One after the other: of a large vocabulary a chunk is hundreds of MB.
            for divergence, reader in zip(divergences.values(), readers, strict=True):
                divergence.add(wanted, log_softmax(next(reader)[: len(next_ids)]), next_ids)
                advance(len(logits))
            position += len(logits)
        return divergences

    def _variant(
        self, way: Way, divergence: Divergence, passkeys: tuple[PasskeyResult, ...], speed: float | None
    ) -> Variant:
        num_positions = len(self.token_ids) - 1
        bounds = [num_positions * part // _NUM_BUCKETS for part in range(_NUM_BUCKETS + 1)]
        return Variant(
            way=way,
            bytes_per_token=sum(layer_token_bytes(self._spec(way), kv_dtype=way.kv_cache_dtype, block_size=16)),
            whole=divergence.summary(),
            buckets=tuple(
                Bucket(first_position=first, last_position=end - 1, summary=divergence.summary(first, end))
                for first, end in itertools.pairwise(bounds)
            ),
            passkeys=passkeys,
            decode_tokens_per_s=speed,
        )

    def _decode_speed(self, runner: TextRunner) -> float | None:
        """Time tokens at the end of the text, which the runner has just read; none lies beyond the model's limit."""
        room = self._model.spec.max_position
        num_tokens = min(NUM_DECODED, room - 1)
        position = min(len(self.token_ids), room - num_tokens)
        try:
            _, seconds = runner.decode(self.token_ids[position - 1], position=position, num_tokens=num_tokens)
        except ModelNumbersError:
            return None
        return num_tokens / seconds

    def _passkeys(self) -> list[Passkey]:
        longest = min(len(self.token_ids), self._model.spec.max_position - MAX_ANSWER_TOKENS)
        lengths = sorted({length for length in (longest // 8, longest // 2, longest) if length >= 128})
        return [
            make_passkey(self._tokenizer, self.token_ids, length_tokens=length, depth_ratio=depth)
            for length in lengths
            for depth in PASSKEY_DEPTHS
        ]

    def _ask(self, runner: TextRunner, passkey: Passkey, advance: Callable[[int], None]) -> PasskeyResult:
        advance(len(passkey.token_ids))
        try:
            first = runner.prefill(passkey.token_ids)
            rest, _ = runner.decode(first, position=len(passkey.token_ids), num_tokens=MAX_ANSWER_TOKENS)
            answer = self._tokenizer.decode([first, *rest])
        except ModelNumbersError:
            answer = ""
        return PasskeyResult(
            length_tokens=len(passkey.token_ids), depth_ratio=passkey.depth_ratio, is_found=passkey.key in answer
        )


def recommend(evaluation: KVEvaluation, budget_kl: float) -> Variant | None:
    """Return the smallest variant whose mean divergence is within a budget in nats; `None` if none is."""
    within = [each for each in evaluation.variants if not each.is_broken and each.whole.kl_mean <= budget_kl]
    return min(within, key=lambda variant: (variant.bytes_per_token, variant.whole.kl_mean), default=None)


def bundled_text() -> str:
    """Return the text that comes along: nineteen chapters of Jane Austen, in the public domain."""
    return importlib.resources.files("octavo.llm").joinpath("data", "northanger_abbey.txt").read_text(encoding="utf-8")
