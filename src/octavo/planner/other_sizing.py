"""How another engine divides one device's memory: its rules for the budget, our arithmetic for the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.errors import CapacityError, InvalidParameterError
from octavo.models.shape import ModelShape
from octavo.planner.advice import as_flags, rank_options
from octavo.planner.block_counts import longest_fitting
from octavo.planner.calibrate import Calibration
from octavo.planner.devices import Device
from octavo.planner.engine_budget import EngineBudget, EngineSettings, OtherEngine
from octavo.planner.engine_rules import engine_budget
from octavo.planner.estimate import Estimate, exact
from octavo.planner.forward_shape import forward_shape
from octavo.planner.kv_arithmetic import KVLayout, kv_layout
from octavo.planner.layer_group import LayerGroup
from octavo.planner.next_command import needs_packed_checkpoint
from octavo.planner.pool import pool_bytes, usable_blocks
from octavo.planner.question import PlanQuestion
from octavo.planner.sizing import GroupCost, Sizing
from octavo.planner.subject import Subject
from octavo.units import GIB, cdiv, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutKVCosts:
    """Implements `KVCosts` with another engine's layout.

    Args:
        is_reserved: A request holds a contiguous run for all its tokens, windows or not.
    """

    layout: KVLayout
    is_reserved: bool = False

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def token_bytes(self) -> int:
        return self.layout.token_bytes

    @property
    def groups(self) -> tuple[GroupCost, ...]:
        kinds: dict[str, list[LayerGroup]] = {}
        for group in self.layout.groups:
            kinds.setdefault(_name(group), []).append(group)
        return tuple(self._cost(name, groups) for name, groups in kinds.items())

    def _cost(self, name: str, groups: list[LayerGroup]) -> GroupCost:
        tokens = sum(self.layout.block_bytes * cdiv(self.block_size, group.block_size) for group in groups)
        is_state = groups[0].kind == "state"
        return GroupCost(
            name=name,
            num_layers=sum(group.num_layers for group in groups),
            token_bytes=sum(group.token_bytes for group in groups),
            block_bytes=0 if is_state else tokens,
            request_bytes=sum(group.state_blocks * self.layout.block_bytes for group in groups),
        )

    def blocks_for(self, num_tokens: int) -> int:
        return self.blocks_reserved(num_tokens) if self.is_reserved else self.layout.blocks_for(num_tokens)

    def blocks_reserved(self, num_tokens: int) -> int:
        return self.layout.blocks_reserved(num_tokens)

    def blocks_shared(self, num_tokens: int) -> int:
        return self.layout.blocks_shared(num_tokens)

    def longest(self, num_blocks: int, limit: int) -> int:
        if self.is_reserved:
            return longest_fitting(self.blocks_reserved, num_blocks, step=self.block_size, limit=limit)
        return self.layout.longest(num_blocks, limit)

    def pool_tokens(self, num_blocks: int, max_model_len: int) -> int:
        return self.layout.logged_tokens(num_blocks, max_model_len)


def size_other(
    question: PlanQuestion,
    subject: Subject,
    changed: Subject,
    *,
    device: Device | None,
    visible: Estimate | None,
    ranks: tuple[int, int],
    calibration: Calibration | None = None,
) -> Sizing:
    """Divide one device's memory by another engine's rules.

    Args:
        changed: The model whose keys and values are kept; other than `subject` only for a hypothesis.
        device, visible: One of them; `visible` wins, for a person's own `--memory`.
        ranks: Devices that share each layer, and stages.

    Raises:
        InvalidParameterError: the engine does not take such a value, or the model cannot be cut so.
    """
    shape = subject.shape
    length_limit = question.max_model_len or shape.max_position
    _check_positions(shape, length_limit)
    seen = visible if device is None else visible or device.visible
    assert seen is not None, "the sizer asks for a device"
    budget, weights_as = _budget(question, subject, device, visible, ranks, calibration)
    layout = kv_layout(
        changed.shape,
        engine=budget.engine,
        version=budget.version,
        kv_dtype=question.kv_cache_dtype,
        block_size=question.block_size,
        tensor_parallel_size=ranks[0],
        pipeline_parallel_size=ranks[1],
        max_num_batched_tokens=budget.max_num_batched_tokens,
        is_caching=question.enable_prefix_caching,
    )
    kv = LaidOutKVCosts(layout=layout, is_reserved=question.kv_allocator == "reserved")
    pool, refusal = _pool(question, budget, layout)
    num_blocks = usable_blocks(max(0, pool.value_bytes), layout.block_bytes)
    sizing = Sizing(
        engine=budget.engine,
        engine_version=f"{budget.version.major}.{budget.version.minor}",
        memory_bytes=seen.value_bytes,
        usable_bytes=budget.usable.value_bytes,
        usable_source=budget.usable.source,
        weights=budget.weights,
        activation=budget.activation,
        overhead=_overhead(budget),
        pool=pool,
        kv=kv,
        num_blocks=num_blocks,
        length_limit=length_limit,
        model_limit=max(shape.max_position, length_limit),
        longest_fitting_len=kv.longest(num_blocks, max(shape.max_position, length_limit)),
        # An engine that is told no length takes the model's, and refuses to start when that does not fit.
        is_length_asked=not question.is_length_auto,
        max_num_seqs=budget.max_num_seqs,
        max_num_batched_tokens=budget.max_num_batched_tokens,
        kv_dtype=layout.kv_format.name,
        weights_as=weights_as,
        is_caching=question.enable_prefix_caching and not kv.is_reserved,
        is_reserved=question.kv_allocator == "reserved",
        reasons={},
        refusal=refusal,
        notes=(
            *budget.notes,
            *_notes(budget, subject, length_limit),
            *_packing_notes(question, subject),
            *_allocator_notes(question),
        ),
    )
    return replace(sizing, refusal=refusal or _too_long(sizing))


def _budget(
    question: PlanQuestion,
    subject: Subject,
    device: Device | None,
    visible: Estimate | None,
    ranks: tuple[int, int],
    calibration: Calibration | None,
) -> tuple[EngineBudget, str]:
    """Return how the engine spends the memory, and how it stores the weights."""
    shape, (tensor, stages) = subject.shape, ranks
    _check_ranks(question, shape.num_heads, len(shape.layers), tensor, stages)
    _check_batch(question)
    engine: OtherEngine = "sglang" if question.engine == "sglang" else "vllm"
    weights, weights_as = subject.weights_on_one(
        question.weight_dtype, tensor=tensor, stages=stages, is_padded=engine == "vllm"
    )
    budget = engine_budget(
        engine,
        forward=forward_shape(shape),
        weights=weights,
        settings=settings_of(question, question.max_model_len or shape.max_position, tensor, stages),
        device=device,
        visible=visible,
        version=question.engine_version,
    )
    return (budget if calibration is None else calibration.corrected(budget)), weights_as


def settings_of(question: PlanQuestion, length_limit: int, tensor: int, stages: int) -> EngineSettings:
    """Return what is asked of another engine, in its own terms."""
    return EngineSettings(
        max_model_len=length_limit,
        utilization=question.utilization,
        max_num_seqs=question.max_num_seqs,
        max_num_batched_tokens=question.max_num_batched_tokens,
        block_size=question.block_size,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        is_eager=question.enforce_eager,
    )


def _pool(question: PlanQuestion, budget: EngineBudget, layout: KVLayout) -> tuple[Estimate, CapacityError | None]:
    """Return the pool as asked, or else what the rest leaves."""
    asked = question.kv_cache_memory
    if question.num_blocks is not None:
        asked = pool_bytes(question.num_blocks, layout.block_bytes)
    room = budget.kv_pool
    if asked is not None:
        if asked <= room.value_bytes:
            return exact(asked, source="asked"), None
        return room, CapacityError(
            f"a KV pool of {format_bytes(asked)} does not fit, {format_bytes(max(0, room.value_bytes))} are left",
            because=room.source,
        )
    if room.value_bytes < 2 * layout.block_bytes:
        return room, CapacityError(
            f"{format_bytes(budget.usable.value_bytes)} may be used, the rest takes"
            f" {format_bytes(budget.usable.value_bytes - room.value_bytes)}",
            because=room.source,
        )
    return room, None


def _too_long(sizing: Sizing) -> CapacityError | None:
    if sizing.max_model_len <= sizing.longest_fitting_len:
        return None
    needed = sizing.kv.blocks_for(sizing.max_model_len) * sizing.kv.block_bytes
    return CapacityError(
        f"one request of {sizing.max_model_len:,} tokens needs {format_bytes(needed)} of KV cache,"
        f" the pool has {format_bytes(sizing.pool_bytes)}",
        because=sizing.pool.source,
    )


def _overhead(budget: EngineBudget) -> Estimate:
    """Add CUDA graphs where they are part of what the engine may use."""
    overhead, graphs = budget.overhead, budget.graphs
    if not budget.graphs_inside:
        return overhead
    return Estimate(
        low_bytes=overhead.low_bytes + graphs.low_bytes,
        value_bytes=overhead.value_bytes + graphs.value_bytes,
        high_bytes=overhead.high_bytes + graphs.high_bytes,
        source=f"{overhead.source}; CUDA graphs: {graphs.source}",
    )


def _notes(budget: EngineBudget, subject: Subject, length_limit: int) -> tuple[str, ...]:
    notes = []
    if length_limit > subject.shape.max_position:
        notes.append(
            f"{length_limit:,} tokens are more than the {subject.shape.max_position:,} that the configuration says:"
            f" {budget.engine} takes them only when told to, and answers beyond are only as good as the model's rotary"
            " scaling"
        )
    if not budget.graphs_inside and budget.graphs.value_bytes:
        notes.append(
            f"CUDA graphs take about {budget.graphs.value_bytes / GIB:.2f} GiB more, outside of the share that"
            f" {budget.engine} {budget.version.major}.{budget.version.minor} keeps to"
        )
    if subject.shape.uncounted:
        uncounted = ", ".join(subject.shape.uncounted)
        estimate = "is in the weights by a rule" if forward_shape(subject.shape).sees_images else "comes on top"
        notes.append(f"the configuration does not size the {uncounted}; what it takes {estimate}")
    return tuple(notes)


def _allocator_notes(question: PlanQuestion) -> tuple[str, ...]:
    if question.kv_allocator == "paged":
        return ()
    return (f"{question.engine} always pages its cache: these are the requests that it would hold with reserved runs",)


def _packing_notes(question: PlanQuestion, subject: Subject) -> tuple[str, ...]:
    if not needs_packed_checkpoint(question, subject):
        return ()
    words = f"{question.engine} loads weights that are packed as {question.weight_dtype}, and packs none: "
    return (words + f"start it with a checkpoint of {subject.name} that is packed so",)


def _check_positions(shape: ModelShape, length_limit: int) -> None:
    if shape.has_learned_positions and length_limit > shape.max_position:
        raise InvalidParameterError(
            f"{length_limit:,} tokens are more than {shape.name} takes",
            param="max_model_len",
            because=f"it looks positions up in a table, which ends at {shape.max_position:,}",
            hints=(f"`--max-model-len {shape.max_position}`",),
        )


def _check_batch(question: PlanQuestion) -> None:
    tokens, requests = question.max_num_batched_tokens, question.max_num_seqs
    if question.engine == "vllm" and tokens is not None and requests is not None and tokens < requests:
        raise InvalidParameterError(
            f"{tokens:,} is less than max_num_seqs = {requests:,}",
            param="max_num_batched_tokens",
            because="vLLM starts only with a token of a step for every request",
            hints=(f"`--max-num-batched-tokens {requests}`", f"`--max-num-seqs {tokens}`"),
        )


def _check_ranks(question: PlanQuestion, num_heads: int, num_layers: int, tensor: int, stages: int) -> None:
    if tensor > 1 and num_heads % tensor:
        fitting = next(each for each in range(tensor, 0, -1) if num_heads % each == 0)
        raise InvalidParameterError(
            f"{num_heads} heads cannot be shared equally by {tensor} devices",
            param="tensor_parallel_size",
            because="tensor parallelism gives each device whole heads",
            hints=(f"`{as_flags(rank_options(question, fitting, stages))}`",),
        )
    if stages > num_layers:
        raise InvalidParameterError(
            f"{num_layers} layers cannot be cut into {stages} stages",
            param="pipeline_parallel_size",
            hints=(f"`--pipeline-parallel-size {num_layers}`",),
        )


def _name(group: LayerGroup) -> str:
    match group.kind:
        case "full":
            return "full attention"
        case "latent":
            return "latent attention"
        case "sliding":
            return f"sliding window of {group.window:,}"
        case "chunked":
            return f"chunks of {group.window:,}"
        case "state":
            return "recurrent state"
