"""What an opened model is to the planner: sizes, program, and the bytes its weights will take when loaded.

The one place where loader and planner agree on bytes: `octavo plan`, the start card and the runner all count so.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config.engine import EngineConfig
from octavo.models.attention_window import with_attention_window
from octavo.models.decoder import emit_decoder
from octavo.models.held_kinds import held_as, held_entry_kind
from octavo.models.load import OpenedModel
from octavo.models.sparse import with_sparse_blocks
from octavo.models.spec import ModelSpec
from octavo.planner.memory import weight_bytes
from octavo.planner.resolve import ModelFacts, why_not_native


def as_read(facts: ModelFacts, config: EngineConfig) -> ModelFacts:
    """Return the facts of the model as this config has its keys and values read.

    Raises:
        InvalidParameterError: the model cannot be read so.
    """
    spec = with_sparse_blocks(facts.spec, config.sparse_blocks or 0)
    return facts if spec is facts.spec else replace(facts, spec=spec, program=emit_decoder(spec))


def windowed(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the spec with the window that was asked for, if any.

    Raises:
        InvalidParameterError: the model has a window of its own.
    """
    return with_attention_window(spec, window=config.attention_window, num_sinks=config.num_sinks)


def facts_of(model: OpenedModel, config: EngineConfig, *, native_refusal: str = "") -> ModelFacts:
    """Return what the planner needs to know of a model, read from its headers.

    Spec and program are those that an engine of this configuration runs.

    Args:
        native_refusal: Why the native runner cannot be used on the machine in question; empty if it can.

    Raises:
        InvalidParameterError: rows that are not whole groups of the weight dtype asked for, or a window over a model
            that has its own.
    """
    spec, program = model.spec, model.program
    native_refusal = why_not_native(config, native_refusal)
    if config.attention_window is not None:
        spec = windowed(spec, config)
        program = emit_decoder(spec)
    if config.runner == "reference" or native_refusal:
        return ModelFacts(
            spec=spec,
            program=program,
            weight_bytes=4 * model.spec.num_parameters,
            weights_as="f32, in which the reference computes",
            native_refusal=native_refusal,
        )
    weight_dtype = "stored" if config.weight_dtype == "auto" else config.weight_dtype
    return ModelFacts(
        spec=spec,
        program=program,
        weight_bytes=weight_bytes(model.tensors, lambda entry: held_entry_kind(entry, weight_dtype)),
        weights_as=held_as(model.tensors.values(), weight_dtype),
    )
