"""`octavo bench recompute`: the document, the table and the report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from octavo.cli.command import split_example
from octavo.testing.tiny_models import TinyModel, write_hf_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny")))


def test_document_has_units_in_its_names_and_ratios_that_follow(octavo, model):
    ran = octavo("bench", "recompute", model, "--lengths", "20,1k,50", "--repeats", "1", "--json")

    document = json.loads(ran.out)
    assert ran.code == 0
    assert document["schema"] == "octavo.bench.recompute/1"
    assert document["config"]["enable_prefix_caching"] is False
    assert [point["context_tokens"] for point in document["points"]] == [20, 50, 1024]
    for point in document["points"]:
        assert set(point) == {
            "context_tokens",
            "num_repeats",
            "cached_s_per_token",
            "recomputed_s_per_token",
            "recomputed_to_cached_ratio",
            "cached_total_estimate_s",
            "recomputed_total_estimate_s",
            "are_tokens_equal",
        }
        ratio = point["recomputed_s_per_token"] / point["cached_s_per_token"]
        assert point["recomputed_to_cached_ratio"] == pytest.approx(ratio)
        assert point["are_tokens_equal"] is True


def test_table_and_bars_go_to_stdout_and_what_is_going_on_to_stderr(octavo, model):
    ran = octavo("bench", "recompute", model, "--lengths", "20,200", "--repeats", "1")

    assert ran.code == 0
    assert ran.err.splitlines()[0] == f"bench recompute: {model}, one token after 20 and 200 tokens"
    assert "recomputed ████" in ran.out
    assert "Time per token grows like length^" in ran.out
    assert "Both ways chose the same tokens." in ran.out


def test_quiet_says_nothing_but_the_answer(octavo, model):
    ran = octavo("bench", "recompute", model, "--lengths", "20", "--repeats", "1", "-q")

    assert ran.code == 0
    assert ran.err == ""
    assert "tokens" in ran.out


def test_svg_report_is_a_drawing_with_both_lines_and_every_point(octavo, model, tmp_path):
    path = tmp_path / "cost.svg"

    ran = octavo("bench", "recompute", model, "--lengths", "20,40,80", "--repeats", "1", "--report", str(path))

    assert ran.code == 0
    assert f"wrote {path}" in ran.err
    root = ET.fromstring(path.read_text())
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 2
    assert names.count("circle") == 2 * 3
    width, height = (float(each) for each in root.attrib["viewBox"].split()[2:])
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height


def test_html_report_holds_table_and_drawing_and_loads_nothing(octavo, model, tmp_path):
    path = tmp_path / "cost.html"

    ran = octavo("bench", "recompute", model, "--lengths", "20", "--repeats", "1", "--report", str(path), "--json")

    text = path.read_text()
    document = json.loads(ran.out)
    assert ran.code == 0
    assert "<svg" in text and f"{document['points'][0]['recomputed_to_cached_ratio']:,.1f}x" in text
    assert "src=" not in text and "href=" not in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--lengths", "0"), "--lengths"),
        (("--lengths", ""), "is not a list of lengths"),
        (("--lengths", "10,x"), "'x' is not a count"),
        (("--lengths", "4k"), "a context of 4,096 tokens does not fit, 2,031 would"),
        (("--lengths", "10", "--repeats", "99"), "--repeats: 99 is not from 1 to 16"),
        (("--report", "cost.png"), "ends in none of .svg, .html"),
    ],
)
def test_what_cannot_be_measured_is_refused(octavo, model, args, words):
    ran = octavo("bench", "recompute", model, *args)

    assert ran.code == 2
    assert ran.out == ""
    assert words in ran.err


def test_report_that_cannot_be_written_is_named(octavo, model, tmp_path):
    path = tmp_path / "nowhere" / "cost.svg"

    ran = octavo("bench", "recompute", model, "--lengths", "20", "--repeats", "1", "--report", str(path))

    assert ran.code == 1
    assert f"{path}: cannot be written" in ran.err


def test_help_has_examples_that_parse(octavo):
    from octavo.cli.bench_recompute import command

    assert "Examples:" in octavo("bench", "recompute", "-h").out
    for example in command.examples:
        args = split_example(example)
        assert args[:2] == ["bench", "recompute"]
        command.make_context("recompute", args[2:])
