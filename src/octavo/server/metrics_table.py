"""The metrics of `/metrics` as one table: name, kind, meaning, labels, and the name that vLLM gives to the same thing.

docs/metrics.md and the Grafana board are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.server.histogram import Histogram
from octavo.server.metrics_fold import MetricsFold

Kind = Literal["gauge", "counter", "histogram"]
Values = float | Mapping[str, float] | Histogram
"""One number, one for each value of the label, or a histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Blocks of the pool by what they hold.

    Args:
        num_referenced_blocks: Held by requests.
        num_cached_blocks: Held by nobody, but a later request can find them.
        num_free_blocks: Neither; never used, or content that nobody can find.
    """

    num_referenced_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_usable_blocks(self) -> int:
        return self.num_referenced_blocks + self.num_cached_blocks + self.num_free_blocks

    @property
    def usage_ratio(self) -> float:
        return self.num_referenced_blocks / self.num_usable_blocks if self.num_usable_blocks else 0.0

    def by_state(self, unit: int = 1) -> dict[str, float]:
        """Return each state's blocks times `unit`."""
        return {
            "referenced": self.num_referenced_blocks * unit,
            "cached": self.num_cached_blocks * unit,
            "free": self.num_free_blocks * unit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Counters and histograms are named without the endings that Prometheus adds.

    Args:
        name: Without the prefix.
        label: The one label it has besides the model; empty if none. Its values are a fixed set.
        vllm: vLLM's name for the same quantity, without `vllm:`; empty if it has none, or one that means another thing.
        vllm_label: What vLLM calls the label; empty where it has none, and the values are added up.
    """

    name: str
    kind: Kind
    help: str
    read: Callable[[MetricsFold, PoolUse], Values]
    label: str = ""
    vllm: str = ""
    vllm_label: str = ""


METRICS: tuple[Metric, ...] = (
    Metric(
        name="requests_running",
        kind="gauge",
        help="Answers being computed",
        read=lambda fold, _: fold.num_running,
        vllm="num_requests_running",
    ),
    Metric(
        name="requests_waiting",
        kind="gauge",
        help="Answers that wait: arrival (not tried yet), seats, tokens, blocks, prefix (being computed), preempted",
        label="reason",
        read=lambda fold, _: fold.num_waiting,
        vllm="num_requests_waiting",
    ),
    Metric(
        name="kv_usage_ratio",
        kind="gauge",
        help="Share of usable blocks that requests hold, 0 to 1",
        read=lambda _, pool: pool.usage_ratio,
        vllm="kv_cache_usage_perc",
    ),
    Metric(
        name="kv_blocks",
        kind="gauge",
        help="Blocks referenced by requests, cached for later ones, or free",
        label="state",
        read=lambda _, pool: pool.by_state(),
    ),
    Metric(
        name="kv_tokens",
        kind="gauge",
        help="The same as token places",
        label="state",
        read=lambda _, pool: pool.by_state(pool.block_size),
    ),
    Metric(
        name="kv_bytes",
        kind="gauge",
        help="The same as bytes of keys and values",
        label="state",
        read=lambda _, pool: pool.by_state(pool.block_bytes),
    ),
    Metric(
        name="kv_fragmentation_ratio",
        kind="gauge",
        help="Share of the places of held blocks that hold no token, as of the last step; 0 at rest",
        read=lambda fold, _: fold.empty_ratio,
    ),
    Metric(
        name="prefix_query_tokens",
        kind="counter",
        help="Tokens looked up in the prefix cache when requests were first admitted",
        read=lambda fold, _: fold.num_query_tokens,
        vllm="prefix_cache_queries",
    ),
    Metric(
        name="prefix_hit_tokens",
        kind="counter",
        help="Of them, tokens found: in whole blocks that are shared, or in part of a block, which is copied",
        label="kind",
        read=lambda fold, _: {"block": fold.num_block_hit_tokens, "copied": fold.num_copied_hit_tokens},
        vllm="prefix_cache_hits",
    ),
    Metric(
        name="prefix_near_misses",
        kind="counter",
        help="Lookups that ended inside a block because the cached text went on differently",
        read=lambda fold, _: fold.num_near_misses,
    ),
    Metric(
        name="prefix_near_miss_tokens",
        kind="counter",
        help="Tokens of those requests from the first different one on, which had to be computed",
        read=lambda fold, _: fold.num_near_miss_tokens,
    ),
    Metric(
        name="kv_eviction_idle_steps",
        kind="histogram",
        help="Cached blocks whose memory was reused, by how many steps nobody had held them",
        read=lambda fold, _: fold.eviction_idle_steps,
    ),
    Metric(
        name="kv_copies",
        kind="counter",
        help="Blocks copied, on write or for a hit that ends inside a block",
        read=lambda fold, _: fold.num_copies,
    ),
    Metric(
        name="preemptions",
        kind="counter",
        help="Running answers that gave their blocks back, for want of blocks or to a higher priority",
        label="reason",
        read=lambda fold, _: fold.num_preemptions,  # type: ignore[arg-type, return-value]
        vllm="num_preemptions",
    ),
    Metric(
        name="recomputed_tokens",
        kind="counter",
        help="Tokens computed again after a preemption, by its reason",
        label="reason",
        read=lambda fold, _: fold.num_recomputed_tokens,  # type: ignore[arg-type, return-value]
    ),
    Metric(
        name="tokens",
        kind="counter",
        help="Tokens whose keys and values were computed in steps, and tokens of first lookups that were a hit instead",
        label="source",
        read=lambda fold, _: {
            "computed": fold.num_computed_tokens,
            "hit": fold.num_block_hit_tokens + fold.num_copied_hit_tokens,
        },
    ),
    Metric(
        name="prompt_tokens",
        kind="counter",
        help="Prompt tokens of requests that were admitted, hits included; of n answers to one prompt, once",
        read=lambda fold, _: fold.num_prompt_tokens,
        vllm="prompt_tokens",
    ),
    Metric(
        name="output_tokens",
        kind="counter",
        help="Tokens of answers",
        read=lambda fold, _: fold.num_output_tokens,
        vllm="generation_tokens",
    ),
    Metric(
        name="requests_finished",
        kind="counter",
        help="Answers that ended, by reason; every accepted one is counted once",
        label="reason",
        read=lambda fold, _: fold.num_finished,  # type: ignore[arg-type, return-value]
        vllm="request_success",
        vllm_label="finished_reason",
    ),
    Metric(
        name="requests_rejected",
        kind="counter",
        help="Requests refused on arrival: too_long (can never fit), queue_full, stopping",
        label="reason",
        read=lambda fold, _: fold.num_rejected,
    ),
    Metric(name="steps", kind="counter", help="Steps computed", read=lambda fold, _: fold.num_steps),
    Metric(
        name="step_tokens",
        kind="histogram",
        help="Tokens computed in a step",
        read=lambda fold, _: fold.step_tokens,
        vllm="iteration_tokens_total",
    ),
    Metric(
        name="time_to_first_token_seconds",
        kind="histogram",
        help="Arrival to first output token",
        read=lambda fold, _: fold.ttft_s,
        vllm="time_to_first_token_seconds",
    ),
    Metric(
        name="inter_token_seconds",
        kind="histogram",
        help="Between two output tokens of an answer",
        read=lambda fold, _: fold.inter_token_s,
        vllm="inter_token_latency_seconds",
    ),
    Metric(
        name="mean_inter_token_seconds",
        kind="histogram",
        help="Mean of those gaps over an answer that ended",
        read=lambda fold, _: fold.mean_inter_token_s,
        vllm="request_time_per_output_token_seconds",
    ),
    Metric(
        name="queue_seconds",
        kind="histogram",
        help="Arrival to first admission, of answers that ended",
        read=lambda fold, _: fold.queue_s,
        vllm="request_queue_time_seconds",
    ),
    Metric(
        name="prefill_seconds",
        kind="histogram",
        help="First admission to first output token",
        read=lambda fold, _: fold.prefill_s,
        vllm="request_prefill_time_seconds",
    ),
    Metric(
        name="decode_seconds",
        kind="histogram",
        help="First to last output token",
        read=lambda fold, _: fold.decode_s,
        vllm="request_decode_time_seconds",
    ),
    Metric(
        name="inference_seconds",
        kind="histogram",
        help="First admission to last output token",
        read=lambda fold, _: fold.inference_s,
        vllm="request_inference_time_seconds",
    ),
    Metric(
        name="e2e_seconds",
        kind="histogram",
        help="Arrival to end, aborted ones included",
        read=lambda fold, _: fold.e2e_s,
        vllm="e2e_request_latency_seconds",
    ),
    Metric(
        name="request_prompt_tokens",
        kind="histogram",
        help="Prompt tokens of a request when it was first admitted",
        read=lambda fold, _: fold.request_prompt_tokens,
        vllm="request_prompt_tokens",
    ),
    Metric(
        name="request_output_tokens",
        kind="histogram",
        help="Output tokens of an answer that ended",
        read=lambda fold, _: fold.request_output_tokens,
        vllm="request_generation_tokens",
    ),
)
