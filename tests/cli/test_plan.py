"""`octavo plan`: the card, the document, the page, and what it says when something does not fit or is not known."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from octavo.config.engine import OPTIONS
from octavo.planner.question import PLAN_OPTIONS
from octavo.testing.tiny_models import TinyModel, write_hf_model

H100 = ("llama-3-70b", "--device", "h100-80gb", "--devices", "4", "--max-model-len", "32k")


@pytest.fixture
def folder(tmp_path):
    """A model folder on this disk."""
    path = tmp_path / "tiny"
    write_hf_model(TinyModel(), path)
    return str(path)


def test_the_card_answers_how_many_fit_and_where_the_memory_goes(octavo):
    ran = octavo("plan", *H100, "--lengths", "1155:211", "--itl", "30ms")

    assert ran.code == 0
    assert ran.err == ""
    for words in (
        "Meta-Llama-3-70B on 4 x NVIDIA H100",
        "vllm 0.19 (the default on a GPU)",
        "requests of 32,768 tokens at once",
        "KV cache, on one device of 4",
        "full attention",
        "Two ceilings",
        "if: all 64 heads with own keys and values",
        "--kv-cache-dtype fp8",
        "Where the figures come from",
        "next: VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 4",
    ):
        assert words in ran.out, words
    assert all(len(line) <= 96 for line in ran.out.splitlines() if not line.startswith("next:"))
    assert not re.search(r" $", ran.out, re.MULTILINE)
    assert "\x1b" not in ran.out, "no colour where there is no terminal"


def test_the_bar_has_a_cell_for_every_part_and_its_table_adds_up(octavo, folder):
    ran = octavo("plan", folder, "--memory", "200MiB")

    bar = next(line for line in ran.out.splitlines() if line.startswith("["))
    assert len(bar) == 96
    assert {"█", "▓", "▒", "·"} <= set(bar)
    sizes = [
        float(each.replace(",", "")) for each in re.findall(r"^\S+ [a-zA-Z ]+? +([\d,.]+) MiB", ran.out, re.MULTILINE)
    ]
    *parts, whole = sizes[:6]
    assert sum(parts) == pytest.approx(whole, abs=0.05)
    assert whole == 200


def test_narrow_terminals_get_a_narrow_card(octavo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = octavo("plan", *H100)
    assert all(len(line) <= 80 for line in ran.out.splitlines() if not line.startswith("next:"))


@pytest.mark.parametrize("columns", ["72", "80", "96"])
def test_no_figure_is_cut_off_however_narrow_the_card(octavo, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    ran = octavo("plan", "gemma-3-27b", "--device", "h100", "--lengths", "1155:211", "--max-model-len", "32k")
    assert "What each lever would do" in ran.out
    assert "at lengths" in ran.out
    assert "\N{HORIZONTAL ELLIPSIS}" not in ran.out


def test_json_is_one_document_and_the_same_as_a_form_gets(octavo):
    from octavo.llm.plan import plan_document

    ran = octavo("plan", *H100, "--json")
    document = json.loads(ran.out)
    assert document["schema"] == "octavo.plan/1"
    assert document == plan_document(
        {"model": "llama-3-70b", "device": "h100-80gb", "devices": "4", "max_model_len": "32k"}
    )


def test_reserved_runs_are_called_so(octavo):
    ran = octavo("plan", *H100, "--kv-allocator", "reserved", "--lengths", "1155:211")
    assert "32,768 tokens each, reserved" in ran.out
    assert "of the asked lengths, reserved" in ran.out
    assert "tokens each, paged" not in ran.out
    assert "vllm always pages its cache" in ran.out


def test_quiet_gives_the_answer_in_a_line(octavo, folder):
    whole, quiet = octavo("plan", *H100), octavo("plan", *H100, "-q")
    assert quiet.code == 0 and not quiet.err
    assert len(quiet.out.splitlines()) == 1
    assert f"✓ {quiet.out}" in whole.out

    ran = octavo("plan", *H100, "-q", "--lengths", "1155:211", "--itl", "30ms", "--target-concurrency", "30")
    first, *ways = ran.out.splitlines()
    assert re.search(r"; [\d,.]+ of the asked lengths; the device holds [\d,]+ at 30.0 ms a token$", first)
    assert ways and all(re.match(r"[\d,.]+ requests at once: \S", way) for way in ways)

    ran = octavo("plan", folder, "-q", "--kv-cache-memory", "300KiB", "--max-model-len", "2048", "--check")
    assert ran.code == 3
    assert ran.out.startswith("does not fit; the longest that fits has ")
    assert "error[does-not-fit]" in ran.err


def test_check_exits_with_3_and_names_the_nearest_fit(octavo, folder):
    asked = ("plan", folder, "--kv-cache-memory", "300KiB", "--max-model-len", "2048")
    assert octavo(*asked).code == 0

    ran = octavo(*asked, "--check")
    assert ran.code == 3
    assert "error[does-not-fit]" in ran.err
    hint = re.search(r"hint: `(--max-model-len \d+)`", ran.err).group(1)
    assert octavo("plan", folder, "--kv-cache-memory", "300KiB", *hint.split(), "--check").code == 0

    ran = octavo(*asked, "--check", "--json")
    assert ran.code == 3
    assert json.loads(ran.out)["fits"] is False


def test_the_next_command_works_as_it_stands(octavo, folder):
    ran = octavo("plan", folder, "--memory", "300MiB", "--max-model-len", "auto", "--purpose", "offline", "--json")
    command = shlex.split(json.loads(ran.out)["next_command"])
    assert command[:2] == ["octavo", "generate"]

    ran = octavo(*command[1:], "--max-tokens", "2", "--json")
    assert ran.code == 0, ran.err


def test_the_next_server_command_is_understood(octavo, folder):
    ran = octavo(
        "plan",
        folder,
        "--memory",
        "300MiB",
        "--num-blocks",
        "50",
        "--no-prefix-caching",
        "--block-size",
        "32",
        "--json",
    )
    command = shlex.split(json.loads(ran.out)["next_command"])
    assert command[:2] == ["octavo", "serve"]
    # What a server would take, doctor takes: the same options.
    assert octavo("doctor", *command[2:], "--config").code == 0
    assert "--no-prefix-caching" in command


def test_variables_count_for_octavo_and_not_for_others(octavo, folder, monkeypatch):
    monkeypatch.setenv("OCTAVO_NUM_BLOCKS", "33")
    monkeypatch.setenv("OCTAVO_MEMORY", "200MiB")
    assert json.loads(octavo("plan", folder, "--json").out)["num_blocks"] == 33
    assert json.loads(octavo("plan", folder, "--json", "--num-blocks", "44").out)["num_blocks"] == 44
    assert json.loads(octavo("plan", *H100, "--json").out)["num_blocks"] > 1000
    device = json.loads(octavo("plan", folder, "--device", "desktop-ddr5", "--json").out)
    assert device["memory_bytes"] > 2**35


def test_every_engine_option_can_be_asked_of_a_plan():
    plan_names = {name for each in PLAN_OPTIONS for name in (each.name, *each.aliases)}
    for option in OPTIONS:
        assert {option.name, *option.aliases} <= plan_names, option.name


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("lama-3-8b",), "did you mean"),
        (("llama-3-8b", "--device", "h1000"), "did you mean"),
        (("llama-3-8b", "--device", "a100"), "may be"),
        (("llama-3-8b", "--engine", "vlm"), "did you mean"),
        (("llama-3-8b", "--itl", "200"), "200ms"),
        (("llama-3-8b", "--lengths", "12"), "1155:211"),
        (("llama-3-8b", "--memory", "24"), "24GiB"),
        (("llama-3-8b", "--device", "h100", "--kv-cache-dtype", "int3"), "--kv-cache-dtype"),
        (("llama-3-8b", "--device", "h100", "--engine-version", "newest"), "release"),
        (("llama-3-8b", "--lengths", "1:1", "--trace", "x"), "both say"),
        (("smollm2-135m", "--devices", "2", "--engine", "octavo"), "one process"),
        (("smollm2-135m", "--engine", "octavo", "--engine-version", "0.19"), "other engines"),
        (("smollm2-135m", "--enforce-eager"), "other engines"),
        (("smollm2-135m", "--num-blocks", "9", "--kv-cache-memory", "1GiB"), "both set the size"),
    ],
)
def test_what_is_not_understood_is_said_with_what_would_be(octavo, args, words):
    ran = octavo("plan", *args)
    assert ran.code in (1, 2)
    assert words in ran.err
    assert "internal" not in ran.err


def test_names_from_a_file_cannot_steer_the_terminal(octavo, tmp_path):
    name = "\x1b[31mEvil\x07ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    ran = octavo("plan", str(tmp_path / "config.json"))
    assert ran.code == 1
    assert "Evil" in ran.err
    assert not {"\x1b", "\x07"} & set(ran.err)
    assert "\n  because" in ran.err


def test_lists_are_complete_and_json(octavo):
    models = json.loads(octavo("plan", "--list-models", "--json").out)
    assert len(models["models"]) >= 75
    assert "smollm2-135m" in models["aliases"]
    llama = next(each for each in models["models"] if each["name"] == "meta-llama/Meta-Llama-3-70B")
    assert llama["kv_bytes_per_token"] == 320 * 1024
    devices = json.loads(octavo("plan", "--list-devices", "--json").out)["devices"]
    assert len(devices) >= 47
    assert "llama-3-70b" in octavo("plan", "--list-models").out.lower().replace("meta-", "")
    assert "h100-sxm" in octavo("plan", "--list-devices").out


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "rect", "line", "circle", "polyline", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_is_whole_in_itself(octavo, tmp_path):
    page = tmp_path / "plan.html"
    ran = octavo("plan", *H100, "--lengths", "1155:211", "--itl", "30ms", "--report", str(page), "-q")

    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1
    text = page.read_text()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == []
    assert "script" not in tags.seen
    assert tags.seen["svg"] == 2
    assert tags.seen["polyline"] == 2, "a curve for each KV dtype"
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\(|@import", text)


def test_names_from_outside_cannot_write_into_the_page(tmp_path, octavo):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    write_hf_model(TinyModel(), folder)
    page = tmp_path / "plan.html"
    assert octavo("plan", str(folder), "--memory", "1GiB", "--report", str(page), "-q").code == 0
    tags = _Tags()
    tags.feed(page.read_text())
    assert "img" not in tags.seen


WITHOUT_NUMPY = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "torch", "fastapi", "tokenizers", "jinja2", "huggingface_hub", "http"}:
            raise ImportError(f"{name} is not to be had")

sys.meta_path.insert(0, Blocked())
from octavo.cli.main import run
code = run(sys.argv[1:])
assert not {"numpy", "http.client"} & set(sys.modules), sys.modules.keys()
sys.exit(code)
"""


@pytest.mark.parametrize("args", [H100, ("smollm2-135m", "--memory", "2GiB"), ("{folder}", "--memory", "2GiB")])
def test_a_plan_needs_neither_numpy_nor_a_network(args, folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, "plan", *(each.format(folder=folder) for each in args), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"]
