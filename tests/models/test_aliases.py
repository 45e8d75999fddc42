"""What a MODEL argument names."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.engine import DEFAULT_MODEL
from octavo.errors import ModelNotFoundError
from octavo.models.aliases import ALIASES, HubId, find_place


def test_default_model_is_an_alias():
    assert find_place(DEFAULT_MODEL) is ALIASES[DEFAULT_MODEL]


def test_alias_means_the_same_in_a_folder_that_has_one_of_that_name(tmp_path, monkeypatch):
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)

    assert find_place(DEFAULT_MODEL) is ALIASES[DEFAULT_MODEL]
    assert find_place(f"./{DEFAULT_MODEL}") == Path(DEFAULT_MODEL)


def test_folder_and_file_on_disk_are_taken_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)

    assert find_place("org/name") == Path("org/name")
    assert find_place("model.gguf") == Path("model.gguf")
    assert find_place(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


def test_name_with_a_slash_that_is_not_here_is_a_hub_id():
    assert find_place("org/name-1.5B") == HubId("org/name-1.5B")
    assert find_place("org/name@v1.0") == HubId("org/name", "v1.0")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("smollm2", "did you mean `smollm2-135m`"),
        ("SmolLM2-135M", "did you mean `smollm2-135m`"),
        ("smolm2-135", "did you mean `smollm2-135m`"),
        ("gpt-17", "known aliases: smollm2-135m"),
        ("./nowhere", "no folder ./nowhere"),
        ("nowhere.gguf", "no file nowhere.gguf"),
        ("/nowhere/model.gguf", "no file /nowhere/model.gguf"),
        ("a/b/c", "no model 'a/b/c'"),
        ("", "no model ''"),
    ],
)
def test_unknown_name_is_refused_with_what_helps(model, said):
    with pytest.raises(ModelNotFoundError) as caught:
        find_place(model)

    assert said in str(caught.value)


def test_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(ModelNotFoundError, match="never from pickles"):
        find_place(str(tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize("model", ["x" * 5000, "org/" + "x" * 5000, "~nobody-of-this-name/model"])
def test_name_that_cannot_be_a_path_here_is_refused_in_few_words(model):
    with pytest.raises(ModelNotFoundError) as caught:
        find_place(model)

    assert "no model" in str(caught.value)
    assert len(str(caught.value)) < 500
