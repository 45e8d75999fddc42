"""Assembles an engine: config -> model -> plan -> runner -> scheduler -> engine.

The one place that knows every part. Nothing is decided here: the planner resolves the numbers, each with its reason,
and the parts are made from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.config.engine import EngineConfig
from octavo.config.machine import Machine, read_machine
from octavo.config.resolved import ResolvedConfig
from octavo.core.events import EventLog
from octavo.core.kv_cache import GroupSpec, KVCache
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.policy import POLICIES
from octavo.core.ports import Runner
from octavo.core.reserved_kv_cache import ReservedKVCache
from octavo.core.scheduler import Scheduler
from octavo.engine.clock import MonotonicClock
from octavo.engine.engine import Engine
from octavo.llm.native_refusal import native_refusal
from octavo.models.download import Progress, ignore_progress
from octavo.models.fetch import fetch
from octavo.models.load import OpenedModel, open_model
from octavo.models.weights import WeightSource
from octavo.planner.card import Card, make_card
from octavo.planner.facts import as_read, facts_of
from octavo.planner.resolve import ModelFacts, Purpose, resolve
from octavo.runtime.load_tokenizer import load_tokenizer
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.runtime.reference_weights import read_reference_weights
from octavo.runtime.structured import LlguidanceCompiler
from octavo.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An engine and what it was made from."""

    engine: Engine
    tokenizer: Tokenizer
    model: OpenedModel
    resolved: ResolvedConfig
    card: Card


def assemble(
    config: EngineConfig,
    *,
    purpose: Purpose = "offline",
    machine: Machine | None = None,
    progress: Progress | None = None,
    on_card: Callable[[Card], None] | None = None,
) -> Assembled:
    """Make an engine.

    Args:
        machine: Facts to plan with; read from this machine when not given.
        on_card: Called with the plan before anything large is loaded.

    Raises:
        ModelError: the model cannot be found, fetched or read.
        CapacityError: it does not fit.
        InvalidParameterError: the config contradicts the model.
    """
    report = progress or ignore_progress
    model = open_model(fetch(config.model, progress=report).path)
    facts = model_facts(model, config)
    model = replace(model, spec=facts.spec, program=facts.program)
    resolved = resolve(config, machine or read_machine(), facts, purpose=purpose)
    card = make_card(resolved)
    if on_card is not None:
        on_card(card)
    tokenizer = load_tokenizer(model)
    runner = _make_runner(model, resolved, report)
    events = EventLog()
    scheduler = Scheduler(
        _make_kv_cache(model, resolved, events),
        Limits(
            max_model_len=resolved.max_model_len,
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
        ),
        events=events,
        policy=POLICIES[resolved.scheduling_policy](),
    )
    eos_token_ids = tuple(dict.fromkeys((*model.spec.eos_token_ids, *tokenizer.eos_token_ids)))
    engine = Engine(
        scheduler,
        runner,
        events=events,
        clock=MonotonicClock(),
        vocab_size=model.spec.vocab_size,
        eos_token_ids=eos_token_ids,
        fingerprint=_fingerprint(model, resolved),
        tokenizer=tokenizer,
        grammars=LlguidanceCompiler(
            tokenizer,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=eos_token_ids,
            is_guarded=purpose == "serving",
        ),
        seed=resolved.seed,
    )
    return Assembled(engine=engine, tokenizer=tokenizer, model=model, resolved=resolved, card=card)


def model_facts(model: OpenedModel, config: EngineConfig) -> ModelFacts:
    """Return what the planner needs to know of a model, read from its headers."""
    return as_read(facts_of(model, config, native_refusal=native_refusal()), config)


def _make_runner(model: OpenedModel, resolved: ResolvedConfig, report: Progress) -> Runner:
    def progress(done: int, total: int) -> None:
        report("loading", done, total)

    with WeightSource(model) as source:
        if resolved.runner == "native":
            from octavo.runtime.native_runner import NativeRunner  # noqa: PLC0415 - needs the native module
            from octavo.runtime.native_weights import pack_weights  # noqa: PLC0415

            return NativeRunner(
                model.spec,
                model.program,
                pack_weights(
                    source.read_all(progress),
                    model.program,
                    weight_dtype=resolved.weight_dtype,
                    isa=resolved.instruction_set,
                ),
                num_blocks=resolved.num_blocks,
                block_size=resolved.block_size,
                kv_cache_dtype=resolved.kv_cache_dtype,
                kv_skip_layers=resolved.kv_cache_dtype_skip_layers,
                threads=resolved.threads,
                max_num_batched_tokens=resolved.max_num_batched_tokens,
                max_num_seqs=resolved.max_num_seqs,
                isa=resolved.instruction_set,
                prefault=resolved.kv_prefault,
            )
        return ReferenceRunner(
            model.spec,
            model.program,
            read_reference_weights(source, weight_dtype=resolved.weight_dtype, progress=progress),
            num_blocks=resolved.num_blocks,
            block_size=resolved.block_size,
            kv_cache_dtype=resolved.kv_cache_dtype,
            kv_skip_layers=resolved.kv_cache_dtype_skip_layers,
        )


def _make_kv_cache(model: OpenedModel, resolved: ResolvedConfig, events: EventLog) -> KVCache:
    groups = [GroupSpec(window=group.window, num_sinks=group.num_sinks) for group in model.spec.kv_groups]
    if resolved.kv_allocator == "reserved":
        return ReservedKVCache(
            resolved.num_blocks,
            resolved.block_size,
            groups=groups,
            max_model_len=resolved.max_model_len,
            events=events,
        )
    return PagedKVCache(
        resolved.num_blocks,
        resolved.block_size,
        groups=groups,
        max_chunk_tokens=resolved.max_num_batched_tokens,
        is_caching=resolved.enable_prefix_caching,
        events=events,
    )


def _fingerprint(model: OpenedModel, resolved: ResolvedConfig) -> bytes:
    """Name what decides the bits of K and V besides the tokens.

    Enough for a cache that lives and dies with its process: one process has one set of weights. A cache that outlives
    it will have to add a checksum of the weights themselves.
    """
    parts = (
        model.spec,
        sorted((name, entry.shape, entry.kind) for name, entry in model.tensors.items()),
        resolved.runner,
        resolved.instruction_set,
        resolved.weight_dtype,
        resolved.kv_cache_dtype,
        resolved.kv_cache_dtype_skip_layers,
        resolved.block_size,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
