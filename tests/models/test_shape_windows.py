"""Which layers see a window, against transformers' own configurations: for planning and for running.

Fields are combined as files combine them, and as they never should. What is refused is no guess; what is taken has to
be what transformers' classes do.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import OctavoError
from octavo.models.config import spec_from_hf
from octavo.models.kv_groups import layer_windows
from octavo.models.shape_config import shape_from_hf

SMALL: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 96,
    "head_dim": 16,
    "intermediate_size": 136,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "MistralForCausalLM": ("mistral", {}),
    "MixtralForCausalLM": ("mixtral", {**EXPERTS, "num_local_experts": 5}),
    "Phi3ForCausalLM": ("phi3", {}),
    "Starcoder2ForCausalLM": ("starcoder2", {}),
    "MinistralForCausalLM": ("ministral", {}),
    "Ministral3ForCausalLM": ("ministral3", {}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {**EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 56}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {**EXPERTS, "num_experts": 5}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "Gemma2ForCausalLM": ("gemma2", {}),
    "Gemma3ForCausalLM": ("gemma3_text", {}),
    "Gemma4ForCausalLM": ("gemma4_text", {"num_kv_shared_layers": 0}),
    "Cohere2ForCausalLM": ("cohere2", {}),
    "Olmo3ForCausalLM": ("olmo3", {}),
    "Exaone4ForCausalLM": ("exaone4", {}),
    "GptOssForCausalLM": ("gpt_oss", {**EXPERTS, "num_local_experts": 5}),
    "Dots1ForCausalLM": (
        "dots1",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1},
    ),
    "Llama4ForCausalLM": ("llama4_text", {**EXPERTS, "num_local_experts": 5, "intermediate_size_mlp": 72}),
}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] * 2
ON = {"use_sliding_window": True, "sliding_window": 64}
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a window": {"sliding_window": 64},
    "null": {"sliding_window": None},
    "switched on": ON,
    "switched on, the default": {"use_sliding_window": True},
    "switched on, null": {"use_sliding_window": True, "sliding_window": None},
    "switched on, some layers": {**ON, "max_window_layers": 5},
    "switched on, the default in some": {"use_sliding_window": True, "max_window_layers": 5},
    "switched off": {**ON, "use_sliding_window": False, "max_window_layers": 5},
    "listed": {"sliding_window": 64, "layer_types": MIXED},
    "switched on and listed": {**ON, "layer_types": MIXED},
    "switched off and listed": {**ON, "use_sliding_window": False, "layer_types": MIXED},
    "listed as full": {"sliding_window": 64, "layer_types": ["full_attention"] * 8},
    "listed as sliding": {**ON, "layer_types": ["sliding_attention"] * 8},
    "null and listed": {"sliding_window": None, "layer_types": MIXED},
    "a pattern": {"sliding_window": 64, "sliding_window_pattern": 3},
    "a pattern as saved": {"sliding_window": 64, "_sliding_window_pattern": 3},
    "a pattern alone": {"sliding_window_pattern": 3},
    "chunks": {"attention_chunk_size": 64},
    "null chunks": {"attention_chunk_size": None},
    "positions by layer": {**ON, "no_rope_layers": [1, 0] * 4, "attention_chunk_size": 64},
    "positions by interval": {**ON, "no_rope_layer_interval": 2},
}


def windows_of_transformers(model_type: str, config: dict[str, Any]) -> list[int | None] | None:
    """Return each layer's window; `None` where the class takes no such configuration."""
    transformers = pytest.importorskip("transformers")
    from huggingface_hub.errors import StrictDataclassError

    try:
        made = transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(config))
    except (ValueError, ZeroDivisionError, StrictDataclassError):
        return None
    built = getattr(transformers, f"{type(made).__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM")
    source = Path(sys.modules[built.__module__].__file__).read_text(encoding="utf-8")
    num_layers, window = made.num_hidden_layers, getattr(made, "sliding_window", None)
    if "config.layer_types" in source:
        of_kind = {"sliding_attention": window, "chunked_attention": getattr(made, "attention_chunk_size", None)}
        return [of_kind.get(kind) for kind in made.layer_types]
    return [window if "config.sliding_window" in source else None] * num_layers


@pytest.mark.parametrize("architecture", FAMILIES)
def test_windows_are_those_of_transformers_or_the_file_is_refused(architecture):
    model_type, own = FAMILIES[architecture]
    taken = set()
    for name, fields in FIELDS.items():
        config = SMALL | own | fields
        expected = windows_of_transformers(model_type, config)
        named = {"architectures": [architecture], **config}
        try:
            planned = shape_from_hf(named, where=name, name=name)
        except OctavoError:
            planned = None
        if planned is not None and expected is not None:
            assert [layer.kv.window for layer in planned.layers] == expected, name
            taken.add(name)
        try:
            spec = spec_from_hf(named, where=name, name=name)
        except OctavoError:
            continue
        found = list(layer_windows(spec.kv_groups)) if spec.kv_groups else [None] * spec.num_layers
        assert found == expected, f"{name}, as run"
    assert {"nothing", "a window", "listed as full"} & taken
    assert len(taken) >= 10


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM"])
def test_a_list_that_the_family_never_looks_at_may_not_say_otherwise(architecture):
    own = FAMILIES[architecture][1]
    config = {"architectures": [architecture], **SMALL, **own, **FIELDS["switched on and listed"]}
    for read in (shape_from_hf, spec_from_hf):
        with pytest.raises(OctavoError, match=r"layer_types\[1\] is 'full_attention', but the other window fields"):
            read(config, where="file", name="model")
