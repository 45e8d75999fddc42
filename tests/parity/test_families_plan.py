"""Every family is planned as it starts: the same bytes of weights, of blocks and of a token, whatever the cache.

What starts is measured, not asked: weights are added up as the loader made them, blocks are cut out of the pool that
was mapped, and a token is what the runner gives back of one.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from octavo.config.engine import EngineConfig
from octavo.config.sources import Source, keyword_source
from octavo.llm import assemble as assembly
from octavo.llm.plan import plan_for
from octavo.models.families import FAMILIES
from octavo.models.gguf_families import GGUF_FAMILIES
from octavo.models.load import open_model
from octavo.models.sparse import TILE_TOKENS, is_sparse_layer
from octavo.models.spec import ModelSpec
from octavo.planner.plan import Plan
from octavo.planner.question import question_from
from octavo.runtime import native_weights
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel, write_hf_model

READ_AHEAD_BYTES = 64
"""Mapped behind the last block, since kernels fetch one cache line further than they read."""

BOUND_BYTES = 2 * 2
"""Least and greatest of a dimension, in bf16."""

TINY = {
    "llama": TinyModel(num_layers=3),
    "mistral": TinyModel(architecture="mistral", sliding_window=40, num_layers=3),
    "qwen2": TinyModel(architecture="qwen2", num_layers=3, num_kv_heads=1),
    "qwen3": TinyModel(architecture="qwen3", num_layers=3, head_dim=32, tie_embeddings=True),
}


def load_tests_of(file_name: str) -> ModuleType:
    """Import a test file beside this one, which knows how to make the models."""
    spec = importlib.util.spec_from_file_location(file_name, Path(__file__).with_name(f"{file_name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OF_FOLDERS = load_tests_of("test_families")
OF_FILES = load_tests_of("test_families_gguf")
CASES = [
    *(f"{name}/folder" for name in [*TINY, *OF_FOLDERS.FAMILIES]),
    *(f"{name}/{kind}" for name in [*TINY, *OF_FILES.ARCHITECTURES] for kind in ("f32", "q8_0", "q4_0")),
]


@pytest.fixture(scope="module", params=CASES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, kind = request.param.split("/")
    parent = tmp_path_factory.mktemp("planned")
    if name in TINY:
        if kind == "folder":
            return write_hf_model(TINY[name], parent / "model", dtype="bf16")
        return write_gguf_model(TINY[name], parent / "model.gguf", kind=kind)
    model = OF_FOLDERS.make_model(name)
    model.save_pretrained(parent / "model")
    if kind == "folder":
        return parent / "model"
    return OF_FILES.write_gguf(model.config, parent / "model", OF_FILES.ARCHITECTURES[name], kind=kind)


def options_for(spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Return what to ask of a model: each way to hold keys and values, and each way to read less that it takes."""
    last = spec.num_layers - 1
    inner_sizes = {spec.intermediate_size, spec.mixture.expert_size if spec.mixture else 32}
    has_whole_groups = all(size % 32 == 0 for size in inner_sizes)
    yield {"memory": "150MiB"}
    yield {"kv_cache_dtype": "f32", "weight_dtype": "f16"}
    yield {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0, last), "block_size": 32}
    yield {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": (last,)}
    yield {"kv_cache_dtype": "fp8_e4m3", "weight_dtype": "int8" if has_whole_groups else "bf16"}
    yield {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": (1,), "runner": "reference", "block_size": 24}
    if all(group.window is None for group in spec.kv_groups):
        yield {"kv_cache_dtype": "bf16", "attention_window": 50, "attention_sinks": 20}
        yield {"kv_cache_dtype": "int8", "sparse_blocks": 8, "kv_cache_dtype_skip_layers": (last,)}
        yield {"kv_cache_dtype": "f16", "sparse_blocks": 8, "block_size": 48, "runner": "reference"}


@dataclass(slots=True, kw_only=True)
class Started:
    """What a start made.

    Args:
        weight_bytes: Of all weights as they are held.
        block_bytes: Of one block of the pool.
        token_bytes: Of one token in all layers, bounds included.
    """

    assembled: assembly.Assembled
    weight_bytes: int
    block_bytes: int
    token_bytes: float


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, dict[str, Any]], Started]:
    """Return what starts an engine, without a tokenizer, and measures it."""
    held: list[int] = []
    pack, read = native_weights.pack_weights, assembly.read_reference_weights

    def packing(*args: Any, **options: Any) -> Any:
        packed = pack(*args, **options)
        held.append(packed.resident_bytes)
        return packed

    def reading(*args: Any, **options: Any) -> Any:
        weights = read(*args, **options)
        held.append(sum(each.nbytes for each in weights.values()))
        return weights

    monkeypatch.setattr(native_weights, "pack_weights", packing)
    monkeypatch.setattr(assembly, "read_reference_weights", reading)
    monkeypatch.setattr(assembly, "load_tokenizer", lambda _model: SimpleNamespace(eos_token_ids=()))

    def starting(path: Path, options: dict[str, Any]) -> Started:
        assembled = assembly.assemble(EngineConfig(model=str(path), **options))
        runner, resolved = assembled.engine._runner, assembled.resolved
        is_native = resolved.runner == "native"
        pool_bytes = runner.pool_bytes - READ_AHEAD_BYTES if is_native else runner.kv_bytes
        block_bytes, rest = divmod(pool_bytes, resolved.num_blocks + 1)
        assert rest == 0, "the pool is whole blocks, one of them the null block"
        return Started(
            assembled=assembled,
            weight_bytes=held.pop(),
            block_bytes=block_bytes,
            token_bytes=measured_token_bytes(runner, assembled.model.spec, is_bounded=is_native),
        )

    return starting


def measured_token_bytes(runner: Any, spec: ModelSpec, *, is_bounded: bool) -> float:
    """Return the bytes of one token's keys and values and, where they are kept, of its share of bounds."""
    stored = sum(part.nbytes for layer in range(spec.num_layers) for part in runner.read_kv(layer, [1], 1))
    num_bounded = sum(is_sparse_layer(spec, layer) for layer in range(spec.num_layers))
    return stored + num_bounded * spec.num_kv_heads * spec.head_dim * BOUND_BYTES / TILE_TOKENS


def plan(path: Path, options: dict[str, Any]) -> Plan:
    asked = Source(name="test", values={**options, "purpose": "offline"}, spellings={})
    return plan_for(question_from(keyword_source({"model": str(path)}), asked))


def test_a_plan_counts_the_bytes_that_a_start_takes(path, start):
    for asked in options_for(open_model(path).spec):
        options = {"max_num_batched_tokens": 64, **({} if "memory" in asked else {"num_blocks": 40}), **asked}

        planned, started = plan(path, options), start(path, options)

        resolved = started.assembled.resolved
        assert planned.weight_bytes == resolved.weight_bytes == started.weight_bytes, asked
        assert planned.kv_bytes_per_block == resolved.block_bytes == started.block_bytes, asked
        assert planned.kv_bytes_per_token == started.token_bytes, asked
        assert planned.num_blocks == resolved.num_blocks and planned.block_size == resolved.block_size
        assert planned.kv_pool_bytes == (planned.num_blocks + 1) * started.block_bytes
        assert planned.max_model_len == resolved.max_model_len
        assert sum(each.token_bytes for each in planned.groups) == planned.kv_bytes_per_token
        num_groups = len(started.assembled.model.spec.kv_groups)
        assert sum(each.block_bytes for each in planned.groups) == num_groups * started.block_bytes
        if num_groups == 1:
            assert planned.kv_bytes_per_token * planned.block_size == planned.kv_bytes_per_block


@pytest.mark.parametrize("path", [case for case in CASES if case.endswith("folder")], indirect=True)
def test_a_configuration_without_files_is_counted_as_they_are(path, tmp_path):
    lone = shutil.copy(path / "config.json", tmp_path)

    for asked in options_for(open_model(path).spec):
        options = {"num_blocks": 40, "max_num_batched_tokens": 64} | asked
        options.pop("memory", None)
        with_files, without = (plan(each, options) for each in (path, Path(lone)))
        for figure in ("weight_bytes", "kv_bytes_per_block", "kv_bytes_per_token", "kv_pool_bytes", "parameters"):
            assert getattr(without, figure) == getattr(with_files, figure), (figure, asked)


def test_all_families_are_among_the_cases():
    from_folders = {*TINY, *(name.split()[0] for name in OF_FOLDERS.FAMILIES)}
    from_files = {*(each.replace("mistral", "llama") for each in TINY), *OF_FILES.ARCHITECTURES.values()}

    assert {family.name for family in FAMILIES.values()} == from_folders
    assert set(GGUF_FAMILIES) == from_files
