"""docs/kv-arithmetic.md: its tables are what the code counts today, its sums come out, its logs say what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from octavo.models.packing import PACKINGS

PAGE = "docs/kv-arithmetic.md"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# `2 x 32 x 8 x 128 x 2 B = 131,072 B`, `61 x (656 + 132) B = 48,068 B`, `84 + 3 x 2 = 90`
_SUM = re.compile(
    r"(?<![\w.,])([\d(][\d,.()+x/ ]*?)( B| GiB| KiB)?( / 2)? = ([\d,.]*\d)( B| KiB| GiB| blocks)?(?![\d])"
)


@pytest.fixture(scope="module")
def tables(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("write_kv_arithmetic")


def test_tables_are_what_the_code_counts_now(tables: ModuleType, documents: dict[str, str]) -> None:
    text = documents[PAGE]

    assert set(re.findall(r"<!-- table: (.+) -->", text)) == set(tables.TABLES)
    assert text == tables.insert(text), "a table is behind: run `python scripts/write_kv_arithmetic.py`"


def test_figures_of_the_introductory_text_are_corrected(documents: dict[str, str]) -> None:
    """What a token, 4,096 and 32,768 tokens cost in 16 bits; 32 requests of 32,768 tokens on the 70B model."""
    table = documents[PAGE].partition("<!-- table: corrected -->")[2].partition("<!-- end")[0]
    rows = {
        cells[0]: cells for line in table.strip().splitlines() if (cells := [c.strip() for c in line.split("|")[1:-1]])
    }

    for name, layers, heads, in_4k, in_32k in (
        ("Llama 3 8B", 32, 8, 0.5, 4),
        ("Llama 3 70B", 80, 8, 1.25, 10),
        ("GPT-3 175B", 96, 96, 18, 144),
    ):
        token_bytes = 2 * layers * heads * 128 * 2
        number, unit = rows[name][2].split()
        assert float(number) * _UNITS[unit] == token_bytes
        assert rows[name][3:] == [f"{in_4k:g} GiB", f"{in_32k:g} GiB"]
        assert 4096 * token_bytes == in_4k * 2**30
        assert 32768 * token_bytes == in_32k * 2**30
    assert rows["32 requests x 32,768 tokens, 70B"][-1] == "320 GiB"
    assert 32 * 32_768 * 2 * 80 * 8 * 128 * 2 == 320 * 2**30


def test_sums_in_the_text_come_out(documents: dict[str, str]) -> None:
    text = " ".join(documents[PAGE].split())
    sums = _SUM.findall(text)

    for left, left_unit, halved, right, right_unit in sums:
        value = eval(left.replace(",", "").replace("x", "*")) * _UNITS.get(left_unit.strip(), 1)
        expected = float(right.replace(",", "")) * _UNITS.get(right_unit.strip(), 1)
        assert (value / 2 if halved else value) == pytest.approx(expected, abs=0.05), (left, right)
    assert len(sums) >= 7, sums


def test_logs_that_the_page_cites_say_so(documents: dict[str, str], root: Path) -> None:
    text = " ".join(documents[PAGE].split())
    lines = (root / "tests" / "data" / "kv_logs" / "logs.jsonl").read_text().splitlines()
    rows = {row["id"]: row for row in map(json.loads, lines)}

    for name, *said in (
        ("kv020", "16.0 GiB", "131,072"),
        ("kv001", "3.81 GiB", "1,952 blocks", "130,986 B"),
        ("kv017", "1,638 CPU blocks"),
        ("kv018", "512 CPU blocks"),
        ("kv016", "655 blocks", "409,825 B"),
        ("kv047", "43.67 GiB", "975,424", "48,072 B"),
        ("kv035", "4.99 GiB", "1,568 tokens", "2.31"),
        ("kv038", "75,840 tokens", "2.48"),
        ("kv161", "68,500 blocks"),
        ("kv158", "137,000"),
    ):
        values = {f"{value:g}" for value in rows[name].values() if isinstance(value, int | float)}
        values |= {f"{value:.0f}" for value in rows[name].values() if isinstance(value, float)}
        assert rows[name]["url"] in text
        for figure in said:
            assert figure in text
            number = figure.split()[0].replace(",", "")
            assert f"{float(number):g}" in values or number in values, (name, figure)
    cited = set(re.findall(r"\((https://github\.com/[^)]+)\)", documents[PAGE]))
    assert cited <= {row.get("url") for row in rows.values()}


def test_schemes_of_the_page_are_the_schemes_of_the_code(documents: dict[str, str]) -> None:
    section = documents[PAGE].partition("## Weights")[2]

    named = set(re.findall(r"`([\w-]+)`", section.partition("<!-- table: weights")[0]))

    assert named == set(PACKINGS) - {"bnb-nf4"}
    for name, bits in (("awq", 4), ("w8a8", 8), ("fp8", 8), ("mxfp4", 4)):
        assert PACKINGS[name].bits == bits
