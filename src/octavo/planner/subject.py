"""Subject: the model that a plan is about, as far as it can be known here, with or without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from octavo.config.engine import EngineConfig
from octavo.errors import OctavoError
from octavo.models.decoder import emit_decoder
from octavo.models.held_kinds import held_bytes, held_kind
from octavo.models.kv_groups import make_kv_groups
from octavo.models.load import OpenedModel
from octavo.models.names import is_product_bias, tensor_shapes
from octavo.models.program import Program
from octavo.models.shape import Layer, LayerKV, ModelShape
from octavo.models.spec import ModelSpec
from octavo.models.tensor_kinds import TensorKind
from octavo.planner.estimate import Estimate, exact
from octavo.planner.facts import as_read, facts_of, windowed
from octavo.planner.resolve import ModelFacts, why_not_native
from octavo.planner.weight_arithmetic import RankWeights, rank_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """The same model with another attention, to show what its own saves; the weights stay as they are.

    Args:
        num_kv_heads: Key-value heads of every layer that keeps heads.
        window: A sliding window on every layer that sees all tokens.
    """

    num_kv_heads: int | None = None
    window: int | None = None

    def on_facts(self, facts: ModelFacts) -> ModelFacts:
        """Return Octavo's facts under the hypothesis."""
        if self == AS_IS:
            return facts
        spec = facts.spec
        groups = spec.kv_groups
        if self.window is not None:
            groups = make_kv_groups([window or self.window for window in _spec_windows(spec)])
        heads = self.num_kv_heads or spec.num_kv_heads
        return replace(facts, spec=replace(spec, num_kv_heads=heads, kv_groups=groups))

    def on_layer(self, layer: Layer) -> Layer:
        """Return a counted layer under the hypothesis; latent layers keep one vector whatever the heads."""
        kv = layer.kv
        if kv is None or kv.kind == "latent":
            return layer
        changed: LayerKV = replace(kv, num_kv_heads=self.num_kv_heads or kv.num_kv_heads)
        if self.window and kv.kind == "full":
            changed = replace(changed, kind="sliding", window=self.window)
        return replace(layer, kv=changed)


AS_IS = Hypothesis()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to plan for.

    Args:
        name: As published, or the name of its folder or file.
        asked: As a person spelt it; what a command line takes.
        source: Where the sizes come from.
        shape: What counting needs.
        opened: The files, where they are on this disk and Octavo runs them.
        spec: What Octavo needs, where it runs the architecture.
        stored: The spec's tensors as the published file stores them, where that file is not here.
        octavo_refusal: Why Octavo does not run it.
        stored_bytes: Of all tensors, as the files store them; 0 where there are no files.
        stored_source: Where that was read.
        is_alias: The name is Octavo's own, so that other engines do not know it.
        is_on_disk: A path was asked for.
    """

    name: str
    asked: str
    source: str
    shape: ModelShape
    opened: OpenedModel | None = None
    spec: ModelSpec | None = None
    stored: tuple[StoredTensors, ...] = ()
    octavo_refusal: OctavoError | None = None
    stored_bytes: int = 0
    stored_source: str = ""
    is_alias: bool = False
    is_on_disk: bool = False

    def name_for(self, engine: str) -> str:
        """Return what a command line of an engine takes for the model; empty where there is nothing to load yet."""
        is_ours = engine == "octavo"
        if self.is_alias:
            return self.asked if is_ours else str(self.opened.path) if self.opened is not None else ""
        if self.is_on_disk:
            return self.asked if self.opened is not None or self.stored_bytes else ""
        return self.asked if is_ours else self.name

    def under(self, hypothesis: Hypothesis) -> Subject:
        """Return the model with another attention."""
        if hypothesis == AS_IS:
            return self
        return replace(self, shape=replace(self.shape, layers=tuple(map(hypothesis.on_layer, self.shape.layers))))

    def with_stored_bytes(self, stored_bytes: int, *, source: str) -> Subject:
        """Return the model with what its files were found to hold."""
        return replace(self, stored_bytes=stored_bytes, stored_source=source)

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, a tied head counted once."""
        return self.spec.num_parameters if self.spec is not None else self.shape.num_parameters

    def weights_on_one(
        self, weight_dtype: str, *, tensor: int, stages: int, is_padded: bool = False
    ) -> tuple[Estimate, str]:
        """Return one device's share of the weights as another engine holds them, and how they are stored.

        Args:
            is_padded: Vocabulary and packed experts are padded as vLLM does.

        Raises:
            InvalidParameterError: a scheme whose bytes are not known.
        """
        counted = self._counted(weight_dtype, tensor, stages, is_padded=is_padded)
        if weight_dtype != "auto" or not self.stored_bytes:
            return exact(counted.num_bytes, source="every tensor of the configuration, counted"), counted.stored_as
        # Files say what all tensors take; which part of it one device holds, the shape says.
        whole = self._counted("auto", 1, 1, is_padded=False).num_bytes
        share = self.stored_bytes * counted.num_bytes // whole
        return exact(share, source=self.stored_source), self._stored_as()

    def _counted(self, weight_dtype: str, tensor: int, stages: int, *, is_padded: bool) -> RankWeights:
        return rank_weights(
            self.shape,
            weight_dtype=weight_dtype,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            is_padded=is_padded,
        )

    def _stored_as(self) -> str:
        if self.opened is None:
            return "as its files store them"
        kinds = sorted({entry.kind for entry in self.opened.tensors.values() if len(entry.shape) > 1})
        return " and ".join(kinds) + ", as its files store them"

    def octavo_facts(self, config: EngineConfig, *, native_refusal: str) -> ModelFacts:
        """Return what Octavo's own planner needs.

        Raises:
            OctavoError: Octavo does not run this model, or cannot hold its weights as asked.
        """
        if self.opened is not None:
            return as_read(facts_of(self.opened, config, native_refusal=native_refusal), config)
        if self.spec is None:
            error = self.octavo_refusal
            assert error is not None, "a model without a spec has a reason"
            others = "`--engine vllm --device h100-80gb`, or any other of `--list-devices`, plans for vLLM"
            raise type(error)(error.message, because=error.because, hints=(*error.hints, others)) from error
        refusal = why_not_native(config, native_refusal)
        facts = _facts_from_spec(windowed(self.spec, config), self.stored, config, native_refusal=refusal)
        return as_read(facts, config)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of one shape that a file stores alike: a model of experts has tens of thousands.

    Args:
        name: Of one of them.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    count: int


def stored_tensors(spec: ModelSpec, kind_of: Callable[[str, tuple[int, ...]], TensorKind]) -> tuple[StoredTensors, ...]:
    """Count the tensors of a model by shape and by how a file that is not here stores them.

    Biases are kept apart from other vectors, since they are held otherwise.
    """
    counts: dict[tuple[tuple[int, ...], TensorKind, bool], tuple[str, int]] = {}
    for name, shape in tensor_shapes(spec).items():
        key = (shape, kind_of(name, shape), is_product_bias(name))
        first, count = counts.get(key, (name, 0))
        counts[key] = (first, count + 1)
    return tuple(StoredTensors(name, shape, kind, count) for (shape, kind, _), (name, count) in counts.items())


def _facts_from_spec(
    spec: ModelSpec, stored: tuple[StoredTensors, ...], config: EngineConfig, *, native_refusal: str
) -> ModelFacts:
    """Count the weights of a model whose files are not here, as they would be held once they are."""
    if config.runner == "reference" or native_refusal:
        num_bytes, words = 4 * spec.num_parameters, "f32, in which the reference computes"
    else:
        dtype = "stored" if config.weight_dtype == "auto" else config.weight_dtype
        held = [(each, held_kind(each.name, each.shape, each.kind, dtype)) for each in stored]
        num_bytes = sum(each.count * held_bytes(each.name, each.shape, kind) for each, kind in held)
        words = " and ".join(sorted({kind for each, kind in held if len(each.shape) > 1}))
        words += ", as published" if dtype == "stored" else ""
    return ModelFacts(
        spec=spec,
        program=_program_of(spec),
        weight_bytes=num_bytes,
        weights_as=words,
        native_refusal=native_refusal,
    )


@lru_cache(maxsize=8)
def _program_of(spec: ModelSpec) -> Program:
    """Return a model's program; made once for all levers of a plan."""
    return emit_decoder(spec)


def _spec_windows(spec: ModelSpec) -> list[int | None]:
    windows: dict[int, int | None] = {layer: group.window for group in spec.kv_groups for layer in group.layers}
    return [windows.get(layer) for layer in range(spec.num_layers)]
