"""docs/kv-cache.md: its pictures are those of the scheduler today, its sums come out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PICTURES = ("block-table", "prefix-hits", "copy-on-write", "preemption", "reserved-and-paged", "windows")
BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def picture(text: str, name: str) -> str:
    return text.partition(f"<!-- picture: {name} -->")[2].partition(f"<!-- end: {name} -->")[0]


@pytest.fixture(scope="module")
def pictures(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("draw_kv_pictures")


def test_there_is_a_place_for_each_picture_and_no_other(pictures: ModuleType, documents: dict[str, str]) -> None:
    places = re.findall(r"<!-- picture: (.+) -->", documents["docs/kv-cache.md"])
    assert tuple(places) == tuple(pictures.PICTURES) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_what_the_scheduler_does_now(name: str, pictures: ModuleType, documents: dict[str, str]) -> None:
    text = documents["docs/kv-cache.md"]
    redrawn = picture(pictures.insert(text), name)
    assert picture(text, name) == redrawn, f"the picture {name} is behind: run `python scripts/draw_kv_pictures.py`"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("prefix-hits", "r1 starts: of its 51 tokens 32 lie in whole blocks of the cache, 5 more are copied"),
        ("copy-on-write", "shares all 40 tokens"),
        ("preemption", "r1 gives back its 4 blocks (58 tokens) so that r0 can go on"),
        ("preemption", "r1 comes back: of its 59 tokens 32 lie in whole blocks"),
        ("windows", "null"),
    ],
)
def test_pictures_show_what_the_text_beside_them_says(name: str, what: str, documents: dict[str, str]) -> None:
    assert what in picture(documents["docs/kv-cache.md"], name)


def test_n_answers_cost_one_copy_less(documents: dict[str, str]) -> None:
    shown = picture(documents["docs/kv-cache.md"], "copy-on-write")
    assert (shown.count("shares all"), shown.count("is copied to block")) == (2, 2)


def test_paged_runs_more_at_once_and_fills_more(documents: dict[str, str]) -> None:
    shown = picture(documents["docs/kv-cache.md"], "reserved-and-paged")
    reserved, paged = re.findall(r"([\d.]+) requests at once on average, (\d+)% of held places", shown)
    assert float(paged[0]) > 2 * float(reserved[0])
    assert int(paged[1]) > 2 * int(reserved[1])


def test_table_of_bytes_comes_out(documents: dict[str, str]) -> None:
    rows = re.findall(
        r"^\| ([\w .-]+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) (\w+) \| ([\d.]+) (\w+) \|$",
        documents["docs/kv-cache.md"],
        re.MULTILINE,
    )
    assert len(rows) == 5
    for name, layers, kv_heads, head_dim, per_token, unit, per_text, text_unit in rows:
        token_bytes = 2 * int(layers) * int(kv_heads) * int(head_dim) * 2
        assert token_bytes == float(per_token) * BYTES[unit], name
        assert 2048 * token_bytes == float(per_text) * BYTES[text_unit], name


@pytest.mark.parametrize(
    ("row", "model"), [("Llama 3 8B", "meta-llama/Llama-3.1-8B"), ("Llama 3 70B", "meta-llama/Llama-3.1-70B")]
)
def test_table_of_bytes_has_the_published_shapes(root: Path, documents: dict[str, str], row: str, model: str) -> None:
    published = json.loads((root / "tests" / "data" / "published_models" / "models.json").read_text())[model]
    config = published["config"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    shape = f"| {row} | {config['num_hidden_layers']} | {config['num_key_value_heads']} | {head_dim} |"
    assert shape in documents["docs/kv-cache.md"]
    kib = published["kv_bytes_per_token_16_bit"] // 1024
    assert f"{shape} {kib} KiB |" in documents["docs/kv-cache.md"]


def test_corrected_figures_come_out(documents: dict[str, str]) -> None:
    assert 2 * 32 * 8 * 128 * 2 == 131_072 == 128 * BYTES["KiB"]
    assert 32 * 32_768 * 320 * BYTES["KiB"] == 320 * BYTES["GiB"]
    text = " ".join(documents["docs/kv-cache.md"].split())
    assert "131,072 bytes = 128 KiB" in text and "32 x 32,768 x 320 KiB = 320 GiB" in text
