"""Families beyond Llama's: the same logits as Hugging Face transformers, from files that transformers itself wrote.

Weights are random with a standard deviation of 0.125 (norm weights lie around theirs), so that answers depend on the
prompt. Configurations and tensor names are the real ones, as on the hub.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError

from octavo.errors import ModelFileError
from octavo.models.config import spec_from_hf
from octavo.models.load import open_model
from octavo.runtime.divergence import log_softmax
from octavo.testing.dense_model import DenseModel
from octavo.testing.parity import BLOCK_SIZE, exact_runner, tolerance
from octavo.testing.scored_text import score_text

LENGTHS = (1, 15, 16, 17, 33, 150)
Logits = np.ndarray

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_SHORT = [1.0 + pair / 8 for pair in range(8)]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "gpt2 inner": ("GPT2", {**_GPT2, "n_inner": 112, "tie_word_embeddings": False}),
    "gpt_bigcode": ("GPTBigCode", _GPT2),
    "gemma2": (
        "Gemma2",
        {**_COMMON, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20, "num_hidden_layers": 4},
    ),
    "gemma2 without caps": (
        "Gemma2",
        {**_COMMON, "head_dim": 24, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3",
        {**_COMMON, "head_dim": 16, "sliding_window": 20, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
    ),
    "gemma3 listed": (
        "Gemma3",
        {
            **_COMMON,
            "head_dim": 48,
            "sliding_window": 17,
            "final_logit_softcapping": 3.0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3 in unequal groups": (
        "Gemma3",
        {
            **_COMMON,
            "head_dim": 16,
            "sliding_window": 20,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "phi3": ("Phi3", _COMMON),
    "phi3 partial": ("Phi3", {**_COMMON, "hidden_size": 128, "partial_rotary_factor": 0.75}),
    "phi3 window": ("Phi3", {**_COMMON, "sliding_window": 20}),
    "phi3 long": (
        "Phi3",
        {
            **_COMMON,
            "original_max_position_embeddings": 256,
            "rope_scaling": {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": [4.0] * 8},
        },
    ),
    "olmo2": ("Olmo2", _COMMON),
    "mixtral": ("Mixtral", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral alone": ("Mixtral", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 1}),
    "mixtral window": ("Mixtral", {**_COMMON, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 20}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_COMMON, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "qwen3_moe window": (
        "Qwen3Moe",
        {
            **_COMMON,
            "head_dim": 16,
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe normalised": (
        "Qwen3Moe",
        {
            **_COMMON,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_OLDER_NAMES = {"rope_parameters": "rope_scaling"}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """Return a family's name, its model as transformers has it, and the folder it was written to."""
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp("families") / "model"
    model.save_pretrained(folder)
    return request.param, model, folder


def make_model(name: str) -> Any:
    """Return a random transformers model of a family, ready to compute."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family, _ = FAMILIES[name]
    config = make_config(name)
    config._attn_implementation = "eager"
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, family + suffix)(config).to(torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape) * 0.125
            is_norm = parameter.ndim == 1 and parameter_name.endswith("weight")
            parameter.copy_(parameter + noise if is_norm else noise)
    return model.eval()


def make_config(name: str, *, without: str | None = None) -> Any:
    """Return a family's configuration as transformers has it, with its own default for one field."""
    import transformers

    family, changes = FAMILIES[name]
    kind = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))
    names = {without, _OLDER_NAMES.get(without or "")}
    return kind(**{field: value for field, value in changes.items() if field not in names})


def logits_of(model: Any, token_ids: list[int]) -> Logits:
    import torch

    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def tokens(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 512, length).tolist()


def test_dense_logits_equal_transformers(case):
    _, model, folder = case
    dense = DenseModel.load(folder)

    for length in LENGTHS:
        wanted = logits_of(model, tokens(length))
        assert np.abs(dense.logits(tokens(length)) - wanted).max() <= tolerance(wanted), f"at length {length}"


@pytest.mark.parametrize("name", ["reference", "native"])
def test_paged_logprobs_equal_transformers(case, name):
    _, model, folder = case
    opened = open_model(folder)
    runner = exact_runner(name, opened, max(LENGTHS))

    for length in LENGTHS:
        wanted = logits_of(model, tokens(length))
        found = score_text(runner, opened.spec, tokens(length), block_size=BLOCK_SIZE)
        assert np.abs(found - log_softmax(wanted)).max() <= tolerance(wanted), f"at length {length}"


def test_parameters_are_counted_to_the_last_one(case):
    _, model, folder = case

    assert open_model(folder).spec.num_parameters == sum(each.numel() for each in model.parameters())


def test_what_a_file_leaves_out_is_as_in_the_familys_own_configuration(case):
    name, _, folder = case
    config = json.loads((folder / "config.json").read_text())
    whole = replace(spec_from_hf(config, where="whole", name="x"), bos_token_id=None, eos_token_ids=())
    left_out = []
    for field, value in config.items():
        try:
            default = make_config(name, without=field).to_dict().get(field)
        except StrictDataclassError:  # other fields rely on this one
            continue
        if default != value:
            continue
        try:
            spec = spec_from_hf({key: config[key] for key in config if key != field}, where=field, name="x")
        except ModelFileError as error:
            assert "is missing" in error.message
            continue
        assert replace(spec, bos_token_id=None, eos_token_ids=()) == whole, f"without {field}"
        left_out.append(field)
    assert len(left_out) > 5


def test_what_sets_a_family_apart_reaches_its_program(case):
    """Guards the comparisons above: a cap, window, norm or second rotation that is left out must change something."""
    name, _, folder = case
    spec = open_model(folder).spec
    windows = [group.window for group in spec.kv_groups]
    parts = {
        "gemma2": spec.attention_softcap and spec.logits_softcap and windows.count(20) == windows.count(None),
        "gemma3": spec.local_rope is not None and spec.local_rope != spec.rope and 20 in windows,
        "gemma3 listed": windows == [None, None, 17] and spec.rope.kind == "linear" and spec.logits_softcap,
        "gemma3 in unequal groups": [len(group.layers) for group in spec.kv_groups] == [2, 1, 2],
        "phi3 partial": 0 < spec.rope.rotary_dim < spec.head_dim,
        "phi3 window": windows == [20],
        "phi3 long": spec.rope.kind == "longrope" and spec.max_position == 256,
        "olmo2": spec.norm_places == "after" and spec.qk_norm_spans_heads,
        "gpt_bigcode": spec.num_kv_heads == 1,
        "mixtral alone": spec.mixture is not None and spec.mixture.num_active == 1,
        "qwen3_moe window": windows == [20],
        "mixtral window": spec.mixture is not None and spec.mixture.num_active == 3 and windows == [20],
        "qwen3_moe": spec.mixture is not None and not spec.mixture.is_normalised and spec.qk_norm,
        "qwen3_moe normalised": spec.mixture is not None and spec.mixture.is_normalised,
    }
    assert parts.get(name, True), spec
