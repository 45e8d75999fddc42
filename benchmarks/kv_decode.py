"""How fast one request is decoded, by length of its context and by how its keys and values are held.

python benchmarks/kv_decode.py [--model smollm2-135m] [--lengths 512,2048,8000] [--variants f16,int8,f16:32]
                               [--threads 2] [--rounds 5] [--json]

A variant is a KV dtype, and behind a colon the tiles that a query reads (--sparse-blocks). Each reads the beginning of
a novel once and decodes 24 tokens from there in each round. The variants of a length take turns, round by round, so
that a busy machine is busy for all; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from octavo.llm.kv_eval import bundled_text
from octavo.models.decoder import emit_decoder
from octavo.models.fetch import fetch
from octavo.models.load import OpenedModel, open_model
from octavo.models.sparse import with_sparse_blocks
from octavo.models.weights import WeightSource
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.native_weights import HeldWeights, pack_weights
from octavo.runtime.text_runner import TextRunner

NUM_DECODED = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Median speed of a variant at a context length; `ratio` is to the first variant of that length."""

    context_tokens: int
    variant: str
    tokens_per_s: float
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8000")
    parser.add_argument("--variants", default="f16,int8,int4,f16:32,int8:32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()

    model = open_model(fetch(options.model).path)
    with WeightSource(model) as source:
        weights = pack_weights(source.read_all(), model.program)
    token_ids = load_tokenizer(model).encode(bundled_text(), add_special_tokens=True)
    speeds: list[Speed] = []
    for length in map(int, options.lengths.split(",")):
        variants = options.variants.split(",")
        for speed in measure(model, weights, token_ids[:length], variants, options.threads, options.rounds):
            speeds.append(speed)
            if not options.json:
                print(
                    f"{speed.context_tokens:6,} tokens  {speed.variant:8} {speed.tokens_per_s:7.1f} tokens/s"
                    f"  {speed.ratio:5.2f}",
                    flush=True,
                )
    if options.json:
        rows = [asdict(speed) for speed in speeds]
        print(json.dumps({"schema": "octavo.bench.kv_decode/1", "threads": options.threads, "speeds": rows}))


def measure(
    model: OpenedModel, weights: HeldWeights, token_ids: list[int], variants: list[str], threads: int, num_rounds: int
) -> Iterator[Speed]:
    """Yield the speed of each variant behind the same context."""
    runners = {variant: make_runner(model, weights, variant, len(token_ids), threads) for variant in variants}
    firsts = {variant: runner.prefill(token_ids) for variant, runner in runners.items()}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(num_rounds):
        for variant, runner in runners.items():
            _, took_s = runner.decode(firsts[variant], position=len(token_ids), num_tokens=NUM_DECODED)
            seconds[variant].append(took_s)
    reference_s = median(seconds[variants[0]])
    for variant in variants:
        took_s = median(seconds[variant])
        yield Speed(
            context_tokens=len(token_ids),
            variant=variant,
            tokens_per_s=NUM_DECODED / took_s,
            ratio=reference_s / took_s,
        )


def make_runner(model: OpenedModel, weights: HeldWeights, variant: str, num_tokens: int, threads: int) -> TextRunner:
    dtype, _, num_tiles = variant.partition(":")
    spec = with_sparse_blocks(model.spec, int(num_tiles or 0))
    return TextRunner(
        spec,
        emit_decoder(spec),
        weights,
        kv_cache_dtype=dtype,  # type: ignore[arg-type]
        max_tokens=num_tokens + NUM_DECODED + 1,
        threads=threads,
    )


if __name__ == "__main__":
    main()
