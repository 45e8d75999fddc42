"""What a smaller KV cache costs: variants of it against float32 keys and values, on the same weights and the same text.

    distributions   KL divergence, likeliest token and perplexity after every token, by position
    passkeys        a number hidden early in a long text, asked for at its end
    speed           tokens per second at the end of the text

Weights are loaded once; every variant is a runner of its own over them.
"""

from __future__ import annotations

import importlib.resources
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.config.engine import DEFAULT_ATTENTION_SINKS, EngineConfig, KVDtype
from octavo.config.machine import read_machine
from octavo.errors import InvalidParameterError
from octavo.llm.assemble import model_facts
from octavo.llm.passkey import PASSKEY_DEPTHS, Passkey, make_passkey
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
from octavo.runtime.divergence import Divergence, DivergenceSummary, log_softmax
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.native_weights import HeldWeights, pack_weights
from octavo.runtime.text_runner import TextRunner
from octavo.runtime.tokenizer import Tokenizer

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
    """

    way: Way
    bytes_per_token: int
    whole: DivergenceSummary
    buckets: tuple[Bucket, ...]
    passkeys: tuple[PasskeyResult, ...]
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvaluation:
    """All variants, in the order asked."""

    model: str
    threads: int
    num_positions: int
    variants: tuple[Variant, ...]


class KVEvaluator:
    """A model and a text, ready to be read with one kind of cache after another.

    Args:
        text: What is read.
        max_tokens: Tokens read at most; the model's limit and the text's length bound it, too.

    Raises:
        InvalidParameterError: the text is too short, or the native kernels cannot be used.
        OctavoError: as for loading a model.
    """

    def __init__(
        self, config: EngineConfig, text: str, *, max_tokens: int | None = None, progress: Progress | None = None
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
        limit = min(self._model.spec.max_position, max_tokens or self._model.spec.max_position)
        self.token_ids = list(self._tokenizer.encode(text, add_special_tokens=True))[:limit]
        if len(self.token_ids) < 2 * _NUM_BUCKETS:
            raise InvalidParameterError(
                f"the text has {len(self.token_ids)} tokens, at least {2 * _NUM_BUCKETS} are needed", param="text"
            )
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
        total = num_read + len(ways) * sum(len(each.token_ids) for each in passkeys)
        done = 0

        def advance(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            if on_progress is not None:
                on_progress(done, total)

        runners = {way: self._runner(way) for way in ways}
        divergences = self._compare(self._runner(Way(kv_cache_dtype=EXACT)), runners, advance)
        variants = []
        for way, runner in runners.items():
            speed = self._decode_speed(runner)
            found = tuple(self._ask(runner, each, advance) for each in passkeys)
            variants.append(self._variant(way, divergences[way], found, speed))
        return KVEvaluation(
            model=self.model_name,
            threads=self.threads,
            num_positions=len(self.token_ids) - 1,
            variants=tuple(variants),
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
        readers = [exact.read(self.token_ids), *(runner.read(self.token_ids) for runner in runners.values())]
        position = 0
        for chunks in zip(*readers, strict=True):
            next_ids = self.token_ids[position + 1 : position + 1 + len(chunks[0])]
            wanted, *found = (log_softmax(chunk[: len(next_ids)]) for chunk in chunks)
            for divergence, logprobs in zip(divergences.values(), found, strict=True):
                divergence.add(wanted, logprobs, next_ids)
            position += len(chunks[0])
            advance(len(chunks) * len(chunks[0]))
        return divergences

    def _variant(self, way: Way, divergence: Divergence, passkeys: tuple[PasskeyResult, ...], speed: float) -> Variant:
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

    def _decode_speed(self, runner: TextRunner) -> float:
        """Time tokens after the whole text, which the runner has just read."""
        _, seconds = runner.decode(self.token_ids[-1], position=len(self.token_ids), num_tokens=NUM_DECODED)
        return NUM_DECODED / seconds

    def _passkeys(self) -> list[Passkey]:
        longest = len(self.token_ids)
        lengths = sorted({length for length in (longest // 8, longest // 2, longest) if length >= 128})
        return [
            make_passkey(self._tokenizer, self.token_ids, length_tokens=length, depth_ratio=depth)
            for length in lengths
            for depth in PASSKEY_DEPTHS
        ]

    def _ask(self, runner: TextRunner, passkey: Passkey, advance: Callable[[int], None]) -> PasskeyResult:
        first = runner.prefill(passkey.token_ids)
        rest, _ = runner.decode(first, position=len(passkey.token_ids), num_tokens=passkey.max_answer_tokens)
        advance(len(passkey.token_ids))
        answer = self._tokenizer.decode([first, *rest])
        return PasskeyResult(
            length_tokens=len(passkey.token_ids), depth_ratio=passkey.depth_ratio, is_found=passkey.key in answer
        )


def recommend(evaluation: KVEvaluation, budget_kl: float) -> Variant | None:
    """Return the smallest variant whose mean divergence is within a budget in nats; `None` if none is."""
    within = [variant for variant in evaluation.variants if variant.whole.kl_mean <= budget_kl]
    return min(within, key=lambda variant: (variant.bytes_per_token, variant.whole.kl_mean), default=None)


def bundled_text() -> str:
    """Return the text that comes along: nineteen chapters of Jane Austen, in the public domain."""
    return importlib.resources.files("octavo.llm").joinpath("data", "northanger_abbey.txt").read_text(encoding="utf-8")
