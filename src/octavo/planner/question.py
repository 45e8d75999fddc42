"""PlanQuestion: everything that `octavo plan` can be asked, as one option table.

Options that an engine has too are its own rows (same name, unit, help and spellings); a plan only takes more words for
some of them, since it also counts for engines and devices that are not here. Values arrive as text, from flags, the
environment or a form, and are read here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.config.engine import OPTIONS, EngineConfig, find_option
from octavo.config.option import Option, did_you_mean, option
from octavo.config.sources import Source, overruled_pool_sizes
from octavo.errors import InvalidParameterError
from octavo.planner.lengths import Lengths, parse_lengths
from octavo.units import parse_duration_s, quote

EngineName = Literal["octavo", "vllm", "sglang"]
Purpose = Literal["offline", "serving"]
AUTO = "auto"
_MAX_ITL_S = 3600
_SGLANG_NAMES = {
    "model": ("model_path",),
    "max_model_len": ("context_length",),
    "utilization": ("mem_fraction_static",),
    "block_size": ("page_size",),
    "max_num_seqs": ("max_running_requests",),
    "max_num_batched_tokens": ("chunked_prefill_size",),
}
_DTYPE_ALIASES = (find_option("weight_dtype") or OPTIONS[0]).choice_aliases
SCHEMES = ("fp8", "awq", "gptq", "mxfp4", "nvfp4", "bnb-nf4", "q4_0", "q4_k", "q5_k", "q6_k", "q8_0")
"""Ways to store weights that other engines have, and kinds of GGUF files."""


def _as_engine(name: str, **other: Any) -> Any:
    """Declare a field with the engine's own row of the option table, and what differs for a plan."""
    engine_field = next(each for each in dataclasses.fields(EngineConfig) if each.name == name)
    row = {**engine_field.metadata["option"], **other}
    row["aliases"] = (*row.get("aliases", ()), *_SGLANG_NAMES.get(name, ()))
    return option(default=row.pop("default", engine_field.default), **row)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What a person wants to know; `None` means "not asked for", and the plan decides and says why.

    Raises:
        InvalidParameterError: a value outside its range, or two values that contradict each other.
    """

    model: str = _as_engine(
        "model", help="A bundled name, a folder, config.json, a .gguf file, an alias, or a hub id (org/name)"
    )
    weight_dtype: str = _as_engine(
        "weight_dtype",
        choices=("auto", "f32", "f16", "bf16", "int8", "int4", *SCHEMES),
        choice_aliases={
            **_DTYPE_ALIASES,
            "w8a8": "int8",
            "w4a16": "int4",
            "fp8_e4m3": "fp8",
            "bitsandbytes": "bnb-nf4",
        },
        aliases=("dtype", "quantization"),
        auto="as the model is published",
    )
    max_model_len: int | None = _as_engine("max_model_len", auto="the model's limit; the word `auto`: what fits")
    runner: str = _as_engine("runner")
    threads: int | None = _as_engine("threads")
    seed: int | None = _as_engine("seed")
    engine: Literal["auto"] | EngineName = option(
        default="auto",
        kind="choice",
        group="Model",
        help="Whose rules divide the memory",
        choices=("auto", "octavo", "vllm", "sglang"),
        auto="vllm on a GPU, octavo elsewhere",
    )
    engine_version: str | None = option(
        default=None,
        kind="text",
        group="Model",
        help="Version of that engine, as 0.19; its rules changed over time",
        auto="the newest whose rules are known",
    )
    purpose: Purpose = option(
        default="serving",
        kind="choice",
        group="Model",
        help="What Octavo would run as; the default limits of a step differ",
        choices=("serving", "offline"),
    )
    device: str | None = option(
        default=None,
        kind="text",
        group="Device",
        help="A device of --list-devices",
        auto="this machine",
    )
    devices: int | None = option(
        default=None,
        kind="count",
        group="Device",
        unit="devices",
        help="How many of them; one model is cut over all",
        maximum=65536,
        auto="1, or what the parallel sizes multiply to",
    )
    tensor_parallel_size: int | None = option(
        default=None,
        kind="count",
        group="Device",
        unit="devices",
        help="Devices that share each layer",
        maximum=4096,
        aliases=("tp", "tp_size"),
        auto="all --devices",
    )
    pipeline_parallel_size: int | None = option(
        default=None,
        kind="count",
        group="Device",
        unit="devices",
        help="Stages that the layers are cut into",
        maximum=4096,
        aliases=("pp", "pp_size"),
        auto="1",
    )
    memory: int | None = _as_engine(
        "memory",
        group="Device",
        help="Memory of one device, instead of what the device or this machine has",
        auto="what --device has; without one, what this machine has available",
    )
    utilization: float | None = _as_engine(
        "utilization", group="Device", help="Part of the memory that is really used", auto="the engine's own default"
    )
    kv_cache_memory: int | None = _as_engine("kv_cache_memory")
    num_blocks: int | None = _as_engine("num_blocks")
    kv_prefault: bool = _as_engine("kv_prefault")
    block_size: int | None = _as_engine(
        "block_size", default=None, help="Tokens in one block", auto="16, or the engine's own"
    )
    kv_cache_dtype: str = _as_engine(
        "kv_cache_dtype",
        choices=("auto", "f32", "f16", "bf16", "fp8", "fp8_e5m2", "int8", "int4"),
        choice_aliases={
            **(find_option("kv_cache_dtype") or OPTIONS[0]).choice_aliases,
            "fp8": "fp8",
            "fp8_e4m3": "fp8",
        },
        refused={},
        auto="the engine's own default, 16 bits as a rule",
    )
    kv_allocator: Literal["paged", "reserved"] = _as_engine("kv_allocator")
    enable_prefix_caching: bool = _as_engine("enable_prefix_caching")
    max_num_seqs: int | None = _as_engine("max_num_seqs", auto="the engine's own default")
    max_num_batched_tokens: int | None = _as_engine("max_num_batched_tokens", auto="the engine's own default")
    scheduling_policy: str = _as_engine("scheduling_policy")
    enforce_eager: bool = option(
        default=False,
        kind="flag",
        group="Scheduling",
        help="Other engines: without CUDA graphs, and the memory they take",
    )
    lengths: str | None = option(
        default=None,
        kind="text",
        group="Load",
        unit="tokens",
        help="Prompt:output of a typical request, as 1155:211; several with weights, as 500:100x3,8k:500",
    )
    trace: str | None = option(
        default=None,
        kind="text",
        group="Load",
        help="A file of requests whose lengths count (CSV or JSON lines), instead of --lengths",
    )
    shared_prefix: int | None = option(
        default=None,
        kind="count",
        group="Load",
        unit="tokens",
        help="Tokens at the start that all prompts have in common, as a system prompt",
    )
    itl: str | None = option(
        default=None,
        kind="text",
        group="Load",
        help="Longest time between two tokens of an answer, as 200ms",
        auto="no limit",
    )
    target_concurrency: int | None = option(
        default=None,
        kind="count",
        group="Load",
        unit="requests",
        help="Say what would hold so many requests at once: which devices, how many, or which dtype",
        maximum=2**20,
    )
    other_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Octavo's own options that a plan takes as they are, by name."""
    is_length_auto: bool = False
    """`--max-model-len auto`: the longest that fits, and it is no failure when that is less than the model's limit."""

    def __post_init__(self) -> None:
        for each in _OWN_OPTIONS:
            value = getattr(self, each.name)
            if value is not None:
                # The one place a frozen value is completed, as in `EngineConfig`.
                object.__setattr__(self, each.name, each.read(value, param=each.name))
        _check_pairs(self)
        self.itl_s  # noqa: B018 - refused here, not when it is used
        if self.lengths is not None:
            parse_lengths(self.lengths)

    def value(self, name: str) -> Any:
        """Return what was asked under an option's name; its default where nothing was."""
        if hasattr(self, name):
            return getattr(self, name)
        return self.other_options.get(name, _BY_NAME[name].default)

    @property
    def itl_s(self) -> float | None:
        seconds = None if self.itl is None else parse_duration_s(self.itl, param="itl")
        if seconds is not None and seconds > _MAX_ITL_S:
            raise InvalidParameterError(
                f"{quote(self.itl)} between two tokens is no limit",
                param="itl",
                because=f"more than {_MAX_ITL_S // 60} minutes are more than anybody waits",
                hints=("leave out --itl",),
            )
        return seconds

    @property
    def asked_lengths(self) -> Lengths | None:
        """What `--lengths` says; a `--trace` is read by the plan."""
        return None if self.lengths is None else parse_lengths(self.lengths)


_OWN_OPTIONS: tuple[Option, ...] = tuple(
    Option(name=each.name, default=each.default, **each.metadata["option"])
    for each in dataclasses.fields(PlanQuestion)
    if "option" in each.metadata
)
_OWN_NAMES = frozenset(each.name for each in _OWN_OPTIONS)
PLAN_OPTIONS: tuple[Option, ...] = (*_OWN_OPTIONS, *(each for each in OPTIONS if each.name not in _OWN_NAMES))
_BY_NAME = {name: each for each in PLAN_OPTIONS for name in (each.name, *each.aliases)}


def default_of(name: str) -> Any:
    """Return what an option is when nothing was asked."""
    return _BY_NAME[name].default


def question_from(*sources: Source) -> PlanQuestion:
    """Combine sources, strongest first, into one question.

    Raises:
        InvalidParameterError: a value is not allowed; `param` is the spelling of the place that gave it.
    """
    overruled = overruled_pool_sizes(sources)
    values: dict[str, Any] = {}
    is_length_auto = False
    for each in PLAN_OPTIONS:
        source = next((source for source in sources if source.values.get(each.name) is not None), None)
        if source is None or each.name in overruled:
            continue
        value = source.values[each.name]
        if isinstance(value, str) and value.strip().lower() == AUTO and each.auto:
            is_length_auto = is_length_auto or each.name == "max_model_len"
            continue
        values[each.name] = each.read(value, param=source.spellings.get(each.name, each.name))
    own = {name: value for name, value in values.items() if name in _OWN_NAMES}
    others = {name: value for name, value in values.items() if name not in _OWN_NAMES}
    return PlanQuestion(**own, other_options=others, is_length_auto=is_length_auto)


def question_from_words(words: Mapping[str, object]) -> PlanQuestion:
    """Read option names and their values as text, as a form sends them; an empty text is "not asked for".

    Raises:
        InvalidParameterError: no such option, one given twice, or a value that is not allowed.
    """
    values: dict[str, object] = {}
    for word, value in words.items():
        name = word.removeprefix("--").replace("-", "_")
        each = _BY_NAME.get(name) or next((o for o in PLAN_OPTIONS if o.flag_name == word.removeprefix("--")), None)
        if each is None:
            raise InvalidParameterError(
                "there is no such option", param=word, hints=did_you_mean(name, tuple(_BY_NAME))
            )
        if each.name in values:
            raise InvalidParameterError("given twice", param=word)
        if value is not None and value != "":
            values[each.name] = value
    return question_from(Source(name="form", values=values, spellings={}))


def engine_config(question: PlanQuestion) -> EngineConfig:
    """Return the question as Octavo's own configuration.

    Raises:
        InvalidParameterError: Octavo does not do what was asked.
    """
    values = {each.name: question.value(each.name) for each in OPTIONS}
    if values["block_size"] is None:
        del values["block_size"]
    return EngineConfig(**values)


def _check_pairs(question: PlanQuestion) -> None:
    if question.num_blocks is not None and question.kv_cache_memory is not None:
        raise InvalidParameterError(
            "given together with kv_cache_memory",
            param="num_blocks",
            because="both set the size of the KV pool",
            hints=("give one of them",),
        )
    if question.lengths is not None and question.trace is not None:
        raise InvalidParameterError(
            "given together with trace",
            param="lengths",
            because="both say how long requests are",
            hints=("give one of them",),
        )
    if question.shared_prefix is not None and not question.enable_prefix_caching:
        raise InvalidParameterError(
            "given without prefix caching",
            param="shared_prefix",
            because="what prompts have in common is held once only where prefixes are cached",
            hints=("leave out --shared-prefix", "leave out --no-prefix-caching"),
        )
    if (
        question.shared_prefix is not None
        and question.max_model_len is not None
        and question.shared_prefix >= question.max_model_len
    ):
        raise InvalidParameterError(
            f"{question.shared_prefix:,} tokens are more than any prompt has",
            param="shared_prefix",
            because=f"requests have at most {question.max_model_len:,} tokens, of which one is answered",
            hints=(
                f"`--shared-prefix {question.max_model_len - 1}`"
                if question.max_model_len > 1
                else "leave out --shared-prefix",
            ),
        )
    if question.shared_prefix is not None and question.kv_allocator == "reserved":
        raise InvalidParameterError(
            "given with reserved runs",
            param="shared_prefix",
            because="contiguous reservations cannot share blocks",
            hints=("leave out --shared-prefix", "`--kv-allocator paged`"),
        )
    ranks = (question.tensor_parallel_size or 1) * (question.pipeline_parallel_size or 1)
    is_cut = question.tensor_parallel_size is not None or question.pipeline_parallel_size is not None
    if question.devices is not None and is_cut and question.tensor_parallel_size is None:
        if question.devices % ranks:
            raise InvalidParameterError(
                f"{question.devices} devices cannot be cut into {ranks} equal stages",
                param="pipeline_parallel_size",
                hints=(f"`--devices {ranks * max(1, question.devices // ranks)}`",),
            )
    elif question.devices is not None and is_cut and question.devices != ranks:
        raise InvalidParameterError(
            f"{question.devices} devices, but tensor x pipeline parallel sizes make {ranks}",
            param="devices",
            because="one plan is for one copy of the model over all its devices",
            hints=(f"`--devices {ranks}`",),
        )
