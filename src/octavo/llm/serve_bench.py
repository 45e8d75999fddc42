"""What a load on a server came to: counts, rates and percentiles of its outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from octavo.engine.metrics import spread
from octavo.llm.offline_bench import WorkloadRequest
from octavo.llm.serve_load import Outcome, Target

SCHEMA = "octavo.bench.serve/1"


def bench_document(
    target: Target,
    workload: Sequence[WorkloadRequest],
    outcomes: Sequence[Outcome],
    *,
    request_rate: float | None,
    max_concurrency: int | None,
) -> dict[str, Any]:
    """Return the JSON document of a load.

    Times are over answers that came whole; tokens and rates count those, too. `itl_s` is the gap between two pieces of
    text as they arrived (a server may put several tokens into one), `tpot_s` the mean gap per token of an answer.
    """
    whole = [one for one in outcomes if one.error is None]
    wall_s = max((one.done_s for one in outcomes), default=0.0)
    output_tokens = sum(one.output_tokens for one in whole)
    prompt_tokens = sum(one.prompt_tokens for one in whole)
    asked = {id(outcome): request.max_tokens for outcome, request in zip(outcomes, workload, strict=True)}
    return {
        "schema": SCHEMA,
        "base_url": _base_url(target),
        "model": target.model,
        "prompts_as": target.prompts_as,
        "takes_ignore_eos": target.takes_ignore_eos,
        "request_rate_per_s": request_rate,
        "max_concurrency": max_concurrency,
        "num_requests": len(outcomes),
        "num_whole": len(whole),
        "num_short": sum(one.output_tokens < asked[id(one)] for one in whole),
        "errors": dict(sorted(Counter(one.error for one in outcomes if one.error is not None).items())),
        "wall_s": wall_s,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(one.cached_tokens for one in whole),
        "output_tokens": output_tokens,
        "requests_per_s": len(whole) / wall_s if wall_s else 0.0,
        "output_tokens_per_s": output_tokens / wall_s if wall_s else 0.0,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / wall_s if wall_s else 0.0,
        "max_in_flight": _max_in_flight(outcomes),
        "ttft_s": _spread([one.chunk_s[0] - one.sent_s for one in whole if one.chunk_s]),
        "itl_s": _spread([b - a for one in whole for a, b in zip(one.chunk_s, one.chunk_s[1:], strict=False)]),
        "tpot_s": _spread(
            [
                (one.chunk_s[-1] - one.chunk_s[0]) / (one.output_tokens - 1)
                for one in whole
                if one.output_tokens > 1 and one.chunk_s
            ]
        ),
        "e2e_s": _spread([one.done_s - one.sent_s for one in whole]),
        "late_s": _spread([one.sent_s - one.due_s for one in outcomes]),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return spread(values)._asdict()


def _base_url(target: Target) -> str:
    endpoint = target.endpoint
    return f"{'https' if endpoint.is_tls else 'http'}://{endpoint.host_header}{endpoint.path}"


def _max_in_flight(outcomes: Sequence[Outcome]) -> int:
    """Return how many requests were in flight at once at most."""
    changes = sorted([(one.sent_s, 1) for one in outcomes] + [(one.done_s, -1) for one in outcomes])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
