"""The examples run, and show what they say they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.testing.tiny_models import TinyModel, write_hf_model

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
TINY_MODEL_LIMITS = {"OCTAVO_NUM_BLOCKS": "256", "OCTAVO_THREADS": "1"}


@pytest.fixture(scope="module", params=["tiny", "real"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "real":
        return str(request.getfixturevalue("real_model"))
    return str(write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny") / "model"))


def run_example(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> str:
    path = next(path for path in EXAMPLES if path.name.startswith(name))
    for variable, value in TINY_MODEL_LIMITS.items():
        monkeypatch.setenv(variable, value)
    command = [sys.executable, str(path), model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short_and_named_in_order() -> None:
    assert [path.name[:3] for path in EXAMPLES] == [f"{number:02}_" for number in range(1, len(EXAMPLES) + 1)]
    assert len(EXAMPLES) >= 4
    for path in EXAMPLES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, path.name


def test_generate_answers_and_streams(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run_example("01", model, monkeypatch)
    assert out.count("goes on with") == 2
    assert len(out.partition("As it comes:")[2].strip()) > 0


def test_shared_prefix_is_found_in_the_cache(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run_example("02", model, monkeypatch)
    hits = [(int(hit), int(all_)) for hit, all_ in re.findall(r"(\d+) of (\d+) prompt tokens from the cache", out)]

    first, *later = hits
    assert first[0] == 0
    assert later[0] == (first[1] - 1, first[1]), "a repeated prompt computes its last token alone"
    assert len(later) == 3
    assert all(0.6 * all_ < hit < all_ for hit, all_ in later)


def test_four_answers_share_their_prompt(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run_example("03", model, monkeypatch)
    assert out.count("RequestForked") == 3
    assert len(re.findall(r"^answer \d: ", out, re.MULTILINE)) == 4
    assert out.endswith("answer 2 alone is the same: True\n")


def test_prompt_scores_tell_a_likely_text(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run_example("04", model, monkeypatch)
    first, second = (float(value) for value in re.findall(r"perplexity ([\d.]+)", out))
    if Path(model).is_file():  # the tiny model, a folder, has never seen a cat
        assert first < second


def test_a_plan_tells_what_fits_here_and_elsewhere(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run_example("05", model, monkeypatch)
    assert "in 2 GiB: " in out
    assert re.search(r"4 x NVIDIA H100 .* under vllm", out)
    assert len(re.findall(r"^  x +[\d.]+  ", out, re.MULTILINE)) >= 5
    assert "does not fit" in out
    assert "`--max-model-len" in out
