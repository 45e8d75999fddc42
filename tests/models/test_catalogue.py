"""The bundled catalogue: what names find, what they do not, and that every model in it can be counted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.errors import ModelNotFoundError
from octavo.models.catalogue import find_model, list_models
from octavo.models.shape_config import shape_from_hf


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B"),
        ("META-LLAMA/meta-llama-3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B"),
        ("llama-3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("llama3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("gemma-3-27b", "google/gemma-3-27b-it"),
        ("kimi-k2", "moonshotai/Kimi-K2-Instruct"),
        ("gpt2", "openai-community/gpt2"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_name_is_found_as_people_say_it(asked, name):
    assert find_model(asked).name == name


@pytest.mark.parametrize("asked", ["qwen3", "mixtral", "llama-70b", "opt"])
def test_name_that_could_be_several_models_is_refused_with_the_list(asked):
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(asked)

    listed = caught.value.because.split(" and ")[0].split(", ")
    assert len(listed) > 1
    assert all(find_model(name).name == name for name in listed)
    assert f"`{find_model(caught.value.hints[0].split('`')[1]).name}`" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("gptoss 20b", "openai/gpt-oss-20b"),
        ("Qwen/Qwen3-14B-AWQ", "Qwen/Qwen3-14B"),  # a packing that changes sizes is not passed over
        ("meta-lama/Meta-Lama-3-70B", "meta-llama/Meta-Llama-3-70B"),
    ],
)
def test_unknown_name_asks_whether_a_near_one_was_meant(asked, meant):
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(asked)

    assert f"did you mean `{meant}`?" in caught.value.hints


@pytest.mark.parametrize("asked", ["", "/", "-", "x" * 10_000, "🦙", "instruct"])
def test_name_that_is_none_is_not_found(asked):
    with pytest.raises(ModelNotFoundError):
        find_model(asked)


@pytest.mark.parametrize("name", list_models())
def test_every_model_of_the_catalogue_is_found_and_counted(name):
    model = find_model(name)

    shape = shape_from_hf(model.config, where=name, name=name)

    assert model.name == name
    assert model.source
    assert shape.num_parameters >= shape.num_active_parameters > 0


def test_reading_the_catalogue_imports_nothing_heavy():
    code = (
        "import sys; from octavo.models.catalogue import find_model;"
        "from octavo.models.shape_config import shape_from_hf;"
        "model = find_model('llama-3-70b'); shape_from_hf(model.config, where='', name='');"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'numpy', 'gguf', 'click', 'rich'}))"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
