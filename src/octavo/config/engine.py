"""EngineConfig: what a person asks of the engine. The one option table of all commands and of the Python API.

Complete and frozen; `None` means "not asked for", and `planner/resolve.py` decides such a value and says why. Names
follow vLLM's where the meaning is the same; its other spellings are accepted as hidden aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import Option, option, options_of
from octavo.errors import InvalidParameterError
from octavo.units import round_up

DEFAULT_MODEL = "smollm2-135m"
NATIVE_TILE_TOKENS = 16
"""The native kernels' unit of attention: blocks of the native runner hold a multiple of it."""

DEFAULT_ATTENTION_SINKS = 4
"""First tokens that stay visible beside an attention window."""

MIN_SPARSE_BLOCKS = 3
"""A query always reads the first tile and its own; one more can be chosen."""

POOL_SIZES = ("num_blocks", "kv_cache_memory")
"""Options that say the size of the KV pool; at most one of them is asked for."""

KVDtype = Literal["f32", "f16", "bf16", "int8", "fp8_e4m3", "int4"]
WeightDtype = Literal["f32", "f16", "bf16", "int8", "int4"]
KVAllocator = Literal["paged", "reserved"]
SchedulingPolicy = Literal["fcfs", "priority"]
RunnerName = Literal["native", "reference"]
InstructionSet = Literal["auto", "avx2", "portable"]

_DTYPE_SPELLINGS = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
_KV_DTYPE_SPELLINGS = _DTYPE_SPELLINGS | {"fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}
_E5M2 = "it has 2 bits of mantissa where fp8_e4m3 has 3 and int8 7, and the scale of each token makes up for the range"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that can be asked of an engine, before anything is known about model or machine.

    Raises:
        InvalidParameterError: a value outside its range, or two values that contradict each other.
    """

    model: str = option(
        default=DEFAULT_MODEL,
        kind="text",
        group="Model",
        help="An alias, a folder with safetensors, a .gguf file, or a hub id (org/name)",
        is_positional=True,
    )
    weight_dtype: Literal["auto"] | WeightDtype = option(
        default="auto",
        kind="choice",
        group="Model",
        help="How weights are held in memory",
        choices=("auto", "f32", "f16", "bf16", "int8", "int4"),
        choice_aliases=_DTYPE_SPELLINGS,
        aliases=("dtype",),
        auto="as the file stores them",
    )
    max_model_len: int | None = option(
        default=None,
        kind="count",
        group="Model",
        unit="tokens",
        help="Most tokens (prompt + output) of one request",
        aliases=("max_seq_len",),
        auto="the model's limit, or what the pool holds if that is less",
    )
    runner: Literal["auto"] | RunnerName = option(
        default="auto",
        kind="choice",
        group="Model",
        help="What executes the model: C++ kernels, or the readable NumPy reference",
        choices=("auto", "native", "reference"),
        auto="native where the machine and the model allow it",
    )
    threads: int | None = option(
        default=None,
        kind="count",
        group="Model",
        help="Threads that compute a step",
        maximum=1024,
        auto="physical cores within affinity and CPU quota",
    )
    instruction_set: InstructionSet = option(
        default="auto",
        kind="choice",
        group="Model",
        help="CPU instructions of the C++ kernels; the last bits of an answer may differ between sets",
        choices=("auto", "avx2", "portable"),
        auto="the widest that this CPU has; AVX-512 gives the bits of AVX2",
    )
    seed: int | None = option(
        default=None,
        kind="integer",
        group="Model",
        minimum=-(2**63),
        maximum=2**63 - 1,
        help="Makes the seeds drawn for unseeded requests repeatable",
        auto="drawn from the system",
    )
    memory: int | None = option(
        default=None,
        kind="bytes",
        group="Memory",
        unit="bytes",
        help="Memory that weights, activations and KV cache may use together",
        auto="what the machine and its cgroup have available",
    )
    utilization: float | None = option(
        default=None,
        kind="ratio",
        group="Memory",
        help="Part of --memory that is really used",
        aliases=("gpu_memory_utilization", "memory_utilization"),
        auto="0.9 with --memory",
    )
    kv_cache_memory: int | None = option(
        default=None,
        kind="bytes",
        group="Memory",
        unit="bytes",
        help="Size of the KV pool, instead of deriving it from --memory",
        aliases=("kv_cache_memory_bytes",),
        auto="at most 4 GiB, half of what is free after the weights, and what the limits can use",
    )
    num_blocks: int | None = option(
        default=None,
        kind="count",
        group="Memory",
        unit="blocks",
        help="Usable blocks of the KV pool, instead of a size",
        aliases=("num_gpu_blocks_override",),
        auto="what the KV pool holds",
    )
    kv_prefault: bool = option(
        default=False,
        kind="flag",
        group="Memory",
        help="Commit the KV pool's memory at start instead of on first use",
    )
    block_size: int = option(
        default=16,
        kind="count",
        group="Memory",
        unit="tokens",
        help="Tokens in one block; the native runner takes multiples of 16",
        maximum=4096,
    )
    kv_cache_dtype: Literal["auto"] | KVDtype = option(
        default="auto",
        kind="choice",
        group="Memory",
        help="How keys and values are held",
        choices=("auto", "f32", "f16", "bf16", "int8", "fp8_e4m3", "int4"),
        choice_aliases=_KV_DTYPE_SPELLINGS,
        refused={"fp8_e5m2": _E5M2},
        auto="f16",
    )
    kv_cache_dtype_skip_layers: tuple[int, ...] = option(
        default=(),
        kind="numbers",
        group="Memory",
        help="Layers, counted from 0, whose keys and values a quantised cache leaves in 16 bit",
        minimum=0,
    )
    sparse_blocks: int | None = option(
        default=None,
        kind="count",
        group="Memory",
        unit="tiles of 16 tokens",
        help="Read only so many tiles of keys and values per query, those that matter most to it (lossy)",
        minimum=MIN_SPARSE_BLOCKS,
        auto="all of them",
    )
    attention_window: int | None = option(
        default=None,
        kind="count",
        group="Memory",
        unit="tokens",
        help="Let each token see only so many last ones, in a model that sees all: bounds memory, changes answers",
        minimum=2,
        maximum=2**24,
        auto="none",
    )
    attention_sinks: int | None = option(
        default=None,
        kind="integer",
        group="Memory",
        unit="tokens",
        help="First tokens that stay visible beside --attention-window",
        minimum=0,
        maximum=2**24,
        auto=str(DEFAULT_ATTENTION_SINKS),
    )
    kv_allocator: KVAllocator = option(
        default="paged",
        kind="choice",
        group="Memory",
        help="Blocks on demand, or one contiguous run of --max-model-len per request (the textbook baseline)",
        choices=("paged", "reserved"),
    )
    enable_prefix_caching: bool = option(
        default=True,
        kind="flag",
        group="Scheduling",
        help="Reuse the blocks of prompts that begin alike",
        flag="prefix_caching",
        aliases=("prefix_caching",),
    )
    max_num_seqs: int | None = option(
        default=None,
        kind="count",
        group="Scheduling",
        unit="requests",
        help="Most requests in one step",
        maximum=65536,
        auto="64 offline, 32 when serving",
    )
    max_num_batched_tokens: int | None = option(
        default=None,
        kind="count",
        group="Scheduling",
        unit="tokens",
        help="Most tokens computed in one step; longer prompts are cut into chunks",
        maximum=2**20,
        auto="512",
    )
    scheduling_policy: SchedulingPolicy = option(
        default="fcfs",
        kind="choice",
        group="Scheduling",
        help="Who goes first: first come first served, or the request's priority",
        choices=("fcfs", "priority"),
    )

    def __post_init__(self) -> None:
        for each in OPTIONS:
            value = getattr(self, each.name)
            if value is not None:
                # The one place a frozen value is completed: `"4GiB"` becomes bytes, `"half"` becomes f16.
                object.__setattr__(self, each.name, each.read(value, param=each.name))
        _check_pool_is_asked_once(self)
        _check_batch_holds_a_token_per_request(self)
        _check_native_block_size(self)
        _check_skipped_layers(self)
        _check_sparse_block_size(self)
        _check_sinks_have_a_window(self)
        _check_one_way_to_read_less(self)

    @property
    def num_sinks(self) -> int:
        """First tokens that stay visible beside an attention window."""
        if self.attention_window is None:
            return 0
        return DEFAULT_ATTENTION_SINKS if self.attention_sinks is None else self.attention_sinks


OPTIONS: tuple[Option, ...] = options_of(EngineConfig)


def find_option(name: str) -> Option | None:
    """Return the option with this name or alias; `name` is spelled like a field."""
    return next((each for each in OPTIONS if name == each.name or name in each.aliases), None)


def _check_pool_is_asked_once(config: EngineConfig) -> None:
    if config.num_blocks is not None and config.kv_cache_memory is not None:
        raise InvalidParameterError(
            "given together with kv_cache_memory",
            param="num_blocks",
            because="both set the size of the KV pool",
            hints=("give one of them",),
        )


def _check_batch_holds_a_token_per_request(config: EngineConfig) -> None:
    tokens, requests = config.max_num_batched_tokens, config.max_num_seqs
    if tokens is not None and requests is not None and tokens < requests:
        raise InvalidParameterError(
            f"{tokens:,} is less than max_num_seqs = {requests:,}",
            param="max_num_batched_tokens",
            because="every running request needs one token of a step",
            hints=(f"`--max-num-batched-tokens {requests}`", f"`--max-num-seqs {tokens}`"),
        )


def _check_native_block_size(config: EngineConfig) -> None:
    if config.runner == "native" and config.block_size % NATIVE_TILE_TOKENS != 0:
        fitting = round_up(config.block_size, NATIVE_TILE_TOKENS)
        raise InvalidParameterError(
            f"{config.block_size} is not a multiple of {NATIVE_TILE_TOKENS}",
            param="block_size",
            because=f"the native kernels read keys and values in tiles of {NATIVE_TILE_TOKENS} tokens",
            hints=(f"`--block-size {fitting}`", "`--runner reference` takes any block size"),
        )


def _check_skipped_layers(config: EngineConfig) -> None:
    if config.kv_cache_dtype_skip_layers and config.kv_cache_dtype in ("auto", "f32", "f16", "bf16"):
        raise InvalidParameterError(
            f"given with a cache of {config.kv_cache_dtype}",
            param="kv_cache_dtype_skip_layers",
            because="it names layers that a quantised cache leaves in 16 bit",
            hints=("`--kv-cache-dtype int8`", "leave out --kv-cache-dtype-skip-layers"),
        )


def _check_sparse_block_size(config: EngineConfig) -> None:
    if config.sparse_blocks is not None and config.block_size % NATIVE_TILE_TOKENS != 0:
        fitting = round_up(config.block_size, NATIVE_TILE_TOKENS)
        raise InvalidParameterError(
            f"{config.block_size} is not a multiple of {NATIVE_TILE_TOKENS}",
            param="block_size",
            because=f"sparse reading chooses among tiles of {NATIVE_TILE_TOKENS} tokens",
            hints=(f"`--block-size {fitting}`", "leave out --sparse-blocks"),
        )


def _check_sinks_have_a_window(config: EngineConfig) -> None:
    if config.attention_sinks is not None and config.attention_window is None:
        raise InvalidParameterError(
            "given without attention_window",
            param="attention_sinks",
            because="without a window all tokens stay visible",
            hints=("`--attention-window 1024`", "leave out --attention-sinks"),
        )


def _check_one_way_to_read_less(config: EngineConfig) -> None:
    if config.sparse_blocks is not None and config.attention_window is not None:
        raise InvalidParameterError(
            "given together with attention_window",
            param="sparse_blocks",
            because="a window leaves nothing to choose from but itself",
            hints=("leave out --sparse-blocks", "leave out --attention-window"),
        )
