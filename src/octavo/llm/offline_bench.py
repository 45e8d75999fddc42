"""Runs a workload as fast as the engine can and counts what that took. No printing.

A workload is a list of `{"prompt_token_ids": [...], "max_tokens": n}`: token ids, so that no tokenizer interferes, and
forced lengths, so that every engine does the same work.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.config.text_file import read_text_file
from octavo.core.sampling import SamplingParams
from octavo.engine.metrics import Metrics, Spread, spread
from octavo.errors import InvalidParameterError
from octavo.llm.offline import LLM
from octavo.llm.prompts import TokensPrompt
from octavo.units import MIB

MAX_WORKLOAD_BYTES = 256 * MIB

OnProgress = Callable[[int, int], None]
"""Called after each step with the output tokens so far and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request of a workload; `arrival_s` is when a server gets it, counted from the start."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBench:
    """What a run came to. Times in seconds; `metrics` are the engine's own counts.

    Args:
        runner_s: Part of `wall_s` spent inside the runner; the rest is scheduling, arrays and text.
    """

    num_requests: int
    wall_s: float
    runner_s: float
    metrics: Metrics
    ttft_s: Spread
    itl_s: Spread
    e2e_s: Spread

    @property
    def output_tokens_per_s(self) -> float:
        return self.metrics.num_output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.metrics.num_prompt_tokens + self.metrics.num_output_tokens) / self.wall_s


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Read a workload file.

    Raises:
        MachineError: it cannot be read.
        InvalidParameterError: it is not a workload; names the entry and field.
    """
    text = read_text_file(path, param="--workload", what="a workload", max_bytes=MAX_WORKLOAD_BYTES)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"{path} is not JSON", param="--workload", because=str(error)) from error
    if not isinstance(entries, list) or not entries:
        raise InvalidParameterError(f"{path} is not a list of requests", param="--workload", hints=(_FORM,))
    return [_read_entry(entry, f"{path}, request {index}") for index, entry in enumerate(entries)]


_FORM = 'a workload is a JSON list of {"prompt_token_ids": [1, 2, 3], "max_tokens": 16}'


def _read_entry(entry: object, where: str) -> WorkloadRequest:
    token_ids = entry.get("prompt_token_ids") if isinstance(entry, dict) else None
    max_tokens = entry.get("max_tokens") if isinstance(entry, dict) else None
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        raise InvalidParameterError(f"{where}: prompt_token_ids is no list of ids", param="--workload", hints=(_FORM,))
    if type(max_tokens) is not int or max_tokens < 1:
        raise InvalidParameterError(f"{where}: max_tokens is no count", param="--workload", hints=(_FORM,))
    arrival_s = entry.get("arrival_s", 0.0) if isinstance(entry, dict) else 0.0
    if type(arrival_s) not in (int, float) or not 0 <= arrival_s < math.inf:
        raise InvalidParameterError(f"{where}: arrival_s is no time", param="--workload", hints=(_FORM,))
    return WorkloadRequest(prompt_token_ids=tuple(token_ids), max_tokens=max_tokens, arrival_s=float(arrival_s))


def run_offline(llm: LLM, workload: Sequence[WorkloadRequest], on_progress: OnProgress | None = None) -> OfflineBench:
    """Send everything at once, greedily, with forced lengths, and wait until all is done.

    Raises:
        RequestTooLongError: a request can never fit; nothing has run then.
    """
    prompts: list[TokensPrompt] = [{"prompt_token_ids": one.prompt_token_ids} for one in workload]
    params = [SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True) for one in workload]
    num_wanted = sum(one.max_tokens for one in workload)
    metrics = llm.engine.start_metrics()
    start_s = time.perf_counter()
    num_done = 0
    for delta in llm.stream(prompts, params):
        num_done += len(delta.token_ids)
        if on_progress is not None:
            on_progress(num_done, num_wanted)
    wall_s = time.perf_counter() - start_s
    times = metrics.times.values()
    return OfflineBench(
        num_requests=len(workload),
        wall_s=wall_s,
        runner_s=metrics.runner_s,
        metrics=metrics,
        ttft_s=spread([one.ttft_s for one in times if one.ttft_s is not None]),
        itl_s=spread([gap for one in times for gap in one.itl_s]),
        e2e_s=spread([one.e2e_s for one in times if one.e2e_s is not None]),
    )


def peak_rss_bytes() -> int:
    """Return the most memory this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
