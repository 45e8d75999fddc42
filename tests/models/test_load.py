"""Opening models: which files belong together, and what is missing, unknown or misshapen."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from octavo.errors import MachineError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.models.generation_config import GenerationDefaults
from octavo.models.load import open_model, read_spec
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel, make_tensors, write_hf_model, write_safetensors

MODEL = TinyModel()
INDEX = "model.safetensors.index.json"


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folder_is_opened_with_everything_but_the_weights(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "tiny-llama")

    model = open_model(folder)

    assert (model.format, model.spec.name, model.path) == ("safetensors", "tiny-llama", folder)
    assert (model.tokenizer_folder, model.gguf_metadata) == (folder, {})
    assert model.weight_bytes == 4 * model.spec.num_parameters
    assert model.tensors["layers.1.q"].name == "model.layers.1.self_attn.q_proj.weight"


def test_gguf_file_is_opened_with_its_metadata(tmp_path):
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")

    model = open_model(path)

    assert (model.format, model.tokenizer_folder) == ("gguf", None)
    assert model.gguf_metadata["tokenizer.ggml.pre"] == "gpt-2"


def test_folder_that_holds_one_gguf_file_stands_for_it(tmp_path):
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")

    assert open_model(tmp_path).path == path

    write_gguf_model(MODEL, tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match="holds 2 GGUF files"):
        open_model(tmp_path)


def test_sharded_folder_equals_the_single_file(tmp_path):
    single = open_model(write_hf_model(MODEL, tmp_path / "single"))
    sharded = open_model(write_hf_model(MODEL, tmp_path / "sharded", num_shards=3))

    assert {entry.path.name for entry in sharded.tensors.values()} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    for name, entry in single.tensors.items():
        assert (sharded.tensors[name].shape, sharded.tensors[name].kind) == (entry.shape, entry.kind)


def test_opening_a_model_imports_no_numpy(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")
    file = write_gguf_model(MODEL, tmp_path / "tiny.gguf")
    code = (
        "import sys; from pathlib import Path; from octavo.models.load import open_model, read_spec\n"
        "for name in sys.argv[1:]: open_model(Path(name)); read_spec(Path(name))\n"
        "assert not {'numpy', 'gguf', 'tokenizers'} & set(sys.modules), sorted(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code, folder, file], check=True, env={**os.environ})


def test_lone_configuration_is_enough_for_the_sizes(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "tiny")
    expected = open_model(folder).spec
    (folder / "model.safetensors").unlink()

    assert read_spec(folder) == expected
    assert read_spec(folder / "config.json") == expected


def test_ends_of_sequence_of_all_files_are_united(tmp_path):
    folder = write_hf_model(TinyModel(eos_token_id=5), tmp_path / "model")
    edit_json(folder / "generation_config.json", eos_token_id=[5, 9])

    assert open_model(folder).spec.eos_token_ids == (5, 9, 2), "2 is the tokenizer's <|im_end|>"

    listed = {"7": {"content": "<|im_end|>"}}
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"}, added_tokens_decoder=listed)
    assert open_model(folder).spec.eos_token_ids == (5, 9, 7)


def test_suggested_sampling_is_kept(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")
    edit_json(folder / "generation_config.json", do_sample=True, temperature=0.6, top_k=20, top_p=0.95)

    assert open_model(folder).generation == GenerationDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize("changes", [{"temperature": "hot"}, {"top_k": 2.5}, {"do_sample": 1}])
def test_odd_suggestion_is_an_error_that_names_the_field(tmp_path, changes):
    folder = write_hf_model(MODEL, tmp_path / "model")
    edit_json(folder / "generation_config.json", **changes)

    with pytest.raises(ModelFileError, match=f"generation_config.json: {next(iter(changes))} is"):
        open_model(folder)


def rewritten(folder, **changes):
    """Rewrite the weights with tensors replaced or added; `None` removes. `__` stands for a dot."""
    tensors = make_tensors(MODEL) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_safetensors(folder / "model.safetensors", kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__layers__1__mlp__up_proj__weight": None}, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        ({"lm_head__weight": None}, "tensor 'lm_head.weight' is missing"),
        (
            {"model__layers__0__self_attn__q_proj__bias": np.zeros(64, np.float32)},
            "tensor 'model.layers.0.self_attn.q_proj.bias' is unknown",
        ),
        ({"model__layers__2__input_layernorm__weight": np.ones(64, np.float32)}, "layers.2.input_layernorm.weight'"),
        (
            {"model__norm__weight": np.ones(63, np.float32)},
            "tensor 'model.norm.weight' has shape [63], [64] was expected",
        ),
        (
            {"model__layers__0__self_attn__k_proj__weight": np.ones((64, 32), np.float32)},
            "k_proj.weight' has shape [64, 32], [32, 64] was expected",
        ),
        ({"model__norm__weight": np.ones((64, 1), np.float32)}, "has shape [64, 1], [64] was expected"),
    ],
)
def test_wrong_tensor_is_an_error_that_names_it(tmp_path, changes, message):
    folder = write_hf_model(MODEL, tmp_path / "model")
    rewritten(folder, **changes)

    with pytest.raises(ModelFileError) as caught:
        open_model(folder)

    assert message in str(caught.value)


def test_many_missing_tensors_are_one_error(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")
    edit_json(folder / "config.json", num_hidden_layers=4)

    with pytest.raises(ModelFileError, match=r"tensors .*, .*, .* and 15 more are missing"):
        open_model(folder)


def test_stored_rotary_tables_are_harmless(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")
    table = np.ones(8, np.float32)
    rewritten(folder, model__layers__0__self_attn__rotary_emb__inv_freq=table, model__rotary_emb__inv_freq=table)

    assert "model.rotary_emb.inv_freq" not in {entry.name for entry in open_model(folder).tensors.values()}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map is not an object"),
        ([1], "weight_map is not an object"),
        ({"a": "../secret.safetensors"}, "not a file of this folder"),
        ({"a": "/etc/passwd"}, "not a file of this folder"),
        ({"a": 5}, "not a file of this folder"),
        ({"a": "model-00001-of-00002.safetensors"}, "tensor 'a' is missing"),
    ],
)
def test_bad_index_is_an_error(tmp_path, weight_map, message):
    folder = write_hf_model(MODEL, tmp_path / "model", num_shards=2)
    edit_json(folder / INDEX, weight_map=weight_map)

    with pytest.raises(ModelFileError) as caught:
        open_model(folder)

    assert message in str(caught.value)


def test_missing_shard_is_named(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model", num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(ModelNotFoundError, match=r"model-00002-of-00002\.safetensors: no such file"):
        open_model(folder)


def test_shards_without_an_index_are_not_guessed_together(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model", num_shards=2)
    (folder / INDEX).unlink()

    with pytest.raises(ModelFileError, match=f"2 safetensors files, but no {INDEX}"):
        open_model(folder)


def test_pickled_weights_are_refused(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(UnsupportedModelError, match="pickled weights only"):
        open_model(folder)


def test_what_is_not_there_or_not_readable_is_said(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_model(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match=r"neither config\.json nor a \.gguf file"):
        open_model(tmp_path)
    folder = write_hf_model(MODEL, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"holds no model\.safetensors"):
        open_model(folder)


def test_path_that_the_system_refuses_is_the_machines_fault(tmp_path):
    with pytest.raises(MachineError, match="cannot be opened: File name too long"):
        open_model(tmp_path / ("long" * 1000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_the_machines_fault(tmp_path):
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")
    path.chmod(0)

    with pytest.raises(MachineError, match="cannot be read"):
        open_model(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_broken_configuration_is_an_error_that_names_the_file(tmp_path, text):
    folder = write_hf_model(MODEL, tmp_path / "model")
    (folder / "config.json").write_text(text)

    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_model(folder)


def test_name_of_the_model_file_does_not_matter(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")

    assert len(open_model(folder).tensors) == len(make_tensors(MODEL))
