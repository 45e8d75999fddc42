"""What int8 activations, quantised weights and a 16-bit cache cost, against float32 arithmetic on the same weights.

Both sides read the same real text, window by window, each token given (teacher-forced), and their whole distributions
are compared after every token:

    python benchmarks/quality.py                       # the default of the engine, on 8,192 tokens of prose
    python benchmarks/quality.py --text python         # the same on Python's language reference
    python benchmarks/quality.py --held int8/f16 --held f32/bf16 --json
    python benchmarks/quality.py --parts               # which products' activations cost how much (slow, NumPy)

Needs about 1.5 GiB for the default model. Figures and what they mean: docs/quality.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.models.fetch import fetch
from octavo.models.load import OpenedModel, open_model
from octavo.models.program import Linear
from octavo.models.weights import WeightSource
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import pack_weights
from octavo.runtime.reference_linear import quantise_rows
from octavo.testing.dense_model import DenseModel
from octavo.testing.hand_plans import Chunk, make_plan

DATA = Path(__file__).parent / "data"
BLOCK_SIZE = 16
CHUNK_TOKENS = 256
"""Rows whose logits are held at once: 256 x 49,152 ids in double precision are 100 MB."""
PARTS = {
    "q, k, v": ("q",),
    "o": ("o",),
    "gate, up": ("gate",),
    "down": ("down",),
    "head": ("embed", "lm_head"),
    "all": ("q", "o", "gate", "down", "embed", "lm_head"),
}

Logits = npt.NDArray[np.float32]
Logprobs = npt.NDArray[np.float64]


@dataclass
class Comparison:
    """What was found at every position, in nats; `nlls` where the next token is known."""

    name: str
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)
    flip_gaps: list[float] = field(default_factory=list)
    nlls: list[float] = field(default_factory=list)

    def add(self, exact: Logprobs, found: Logprobs, next_ids: Sequence[int]) -> None:
        """Compare rows `[num_rows, vocab_size]`; `next_ids` may be one short at a window's end."""
        self.divergences += (np.exp(exact) * (exact - found)).sum(axis=1).tolist()
        agrees = exact.argmax(axis=1) == found.argmax(axis=1)
        self.agreements += agrees.tolist()
        best_two = np.sort(np.partition(exact[~agrees], -2, axis=1)[:, -2:], axis=1)
        self.flip_gaps += (best_two[:, 1] - best_two[:, 0]).tolist()
        self.nlls += (-found[np.arange(len(next_ids)), next_ids]).tolist()

    def as_dict(self, exact_nlls: Sequence[float]) -> dict[str, Any]:
        kl = np.array(self.divergences)
        gaps = np.array(self.flip_gaps or [0.0])
        return {
            "held": self.name,
            "kl_mean_nats": kl.mean(),
            "kl_median_nats": float(np.median(kl)),
            "kl_p99_nats": float(np.quantile(kl, 0.99)),
            "kl_max_nats": kl.max(),
            "top1_agreement_ratio": float(np.mean(self.agreements)),
            "flip_gap_median_nats": float(np.median(gaps)),
            "flip_gap_p90_nats": float(np.quantile(gaps, 0.9)),
            "perplexity": float(np.exp(np.mean(self.nlls))),
            "exact_perplexity": float(np.exp(np.mean(exact_nlls))),
        }


class NativeReader:
    """Reads a window in chunks and yields its logits.

    Args:
        held: Weights and cache as `weight dtype/KV dtype`, e.g. "stored/f16".
    """

    def __init__(self, model: OpenedModel, held: str, *, window: int, threads: int) -> None:
        weight_dtype, kv_dtype = held.split("/")
        with WeightSource(model) as source:
            weights = pack_weights(source.read_all(), model.program, weight_dtype=weight_dtype)  # type: ignore[arg-type]
        assert len(model.spec.kv_groups) == 1, "one table serves all layers"
        self._table = list(range(1, 1 + -(-window // BLOCK_SIZE)))
        self._logits = model.program.logits
        self._runner = NativeRunner(
            model.spec,
            model.program,
            weights,
            num_blocks=len(self._table),
            block_size=BLOCK_SIZE,
            kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]
            threads=threads,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=1,
            max_selected_rows=CHUNK_TOKENS,
        )

    def read(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[start : start + CHUNK_TOKENS]
            # Scored rows are those whose logits are computed; the scores themselves are not used.
            scored = Chunk("text", chunk, start=start, tables=[self._table], sample=None, targets=[0] * len(chunk))
            self._runner.execute(make_plan([scored], num_top=0))
            yield self._runner.read_buffer(self._logits, len(chunk))


class PartReader:
    """Computes densely in float32, but quantises what some products are given, as the native kernels do."""

    def __init__(self, model: OpenedModel, weights: dict[str, Logits], parts: Sequence[str]) -> None:
        def rounded(op: Linear, x: Logits) -> Logits:
            if op.weights[0].split(".")[-1] not in parts:
                return x
            numbers, scales = quantise_rows(x)
            return (numbers * scales[..., None]).reshape(x.shape).astype(np.float32)

        self._model = DenseModel(model, weights, product_input=rounded)

    def read(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        logits = self._model.logits(token_ids)
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            yield logits[start : start + CHUNK_TOKENS]


Reader = NativeReader | PartReader


def log_softmax(logits: Logits) -> Logprobs:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def compare(
    exact: Reader, others: dict[str, Reader], windows: Sequence[Sequence[int]], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Read all windows with all readers and return what each of `others` differs by."""
    comparisons = {name: Comparison(name) for name in others}
    exact_nlls: list[float] = []
    for number, window in enumerate(windows, 1):
        start_s = time.perf_counter()
        targets = list(window[1:])
        for index, rows in enumerate(
            zip(exact.read(window), *(each.read(window) for each in others.values()), strict=True)
        ):
            wanted, *found = (log_softmax(each) for each in rows)
            next_ids = targets[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS]
            exact_nlls += (-wanted[np.arange(len(next_ids)), next_ids]).tolist()
            for comparison, logprobs in zip(comparisons.values(), found, strict=True):
                comparison.add(wanted, logprobs, next_ids)
        report(f"window {number} of {len(windows)}: {time.perf_counter() - start_s:.1f} s")
    return [comparison.as_dict(exact_nlls) for comparison in comparisons.values()]


def read_text(name: str) -> tuple[str, str]:
    """Return a text and where it is from."""
    if name == "austen":
        return (DATA / "austen.txt").read_text(encoding="utf-8"), "four chapters of Jane Austen (benchmarks/data)"
    if name == "python":
        from pydoc_data.topics import topics

        text = "\n".join(topics[topic] for topic in sorted(topics))
        return text, f"the language reference in Python {platform.python_version()} (pydoc_data.topics)"
    return Path(name).read_text(encoding="utf-8"), name


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Quality of held weights and cache against float32 arithmetic.")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for octavo")
    parser.add_argument("--text", default="austen", help="austen, python, or a file (default: austen)")
    parser.add_argument("--held", action="append", metavar="WEIGHTS/KV", help="repeatable (default: stored/f16)")
    parser.add_argument("--parts", action="store_true", help="quantise the inputs of some products only, in NumPy")
    parser.add_argument("--window", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens read in all, whole windows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    asked = parser.parse_args(argv)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    text, source = read_text(asked.text)
    model = open_model(fetch(asked.model).path)
    token_ids = load_tokenizer(model).encode(text, add_special_tokens=False)
    windows = [
        token_ids[start : start + asked.window]
        for start in range(0, min(asked.tokens, len(token_ids)) - asked.window + 1, asked.window)
    ]
    if not windows:
        parser.error(f"the text has {len(token_ids)} tokens: less than a window, or less than --tokens")
    report(f"{sum(map(len, windows)):,} tokens of {source}")
    if asked.parts:
        with WeightSource(model) as weight_source:
            weights = {tensor.name: tensor.to_f32() for tensor in weight_source.read_all()}
        exact: Reader = PartReader(model, weights, ())
        others: dict[str, Reader] = {name: PartReader(model, weights, parts) for name, parts in PARTS.items()}
    else:
        options = {"window": asked.window, "threads": asked.threads}
        exact = NativeReader(model, "f32/f32", **options)
        others = {held: NativeReader(model, held, **options) for held in asked.held or ["stored/f16"]}
    found = compare(exact, others, windows, report)
    document = {
        "schema": "octavo.quality/1",
        "model": model.spec.name,
        "text": source,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "window_tokens": asked.window,
        "num_positions": sum(map(len, windows)),
        "exact": "f32/f32",
        "compared": found,
    }
    print(json.dumps(document, indent=1) if asked.json else _table(document))


def _table(document: dict[str, Any]) -> str:
    head = f"{'held as':<12}{'KL mean':>9}{'median':>9}{'p99':>9}{'max':>9}{'top-1':>9}{'perplexity':>12}{'(f32)':>9}"
    lines = [f"{document['model']}, {document['num_positions']:,} positions, {document['text']}", head]
    lines += [
        f"{row['held']:<12}{row['kl_mean_nats']:>9.5f}{row['kl_median_nats']:>9.5f}{row['kl_p99_nats']:>9.4f}"
        f"{row['kl_max_nats']:>9.3f}{row['top1_agreement_ratio']:>9.2%}{row['perplexity']:>12.4f}"
        f"{row['exact_perplexity']:>9.4f}   flips: gap median {row['flip_gap_median_nats']:.3f},"
        f" p90 {row['flip_gap_p90_nats']:.3f}"
        for row in document["compared"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
