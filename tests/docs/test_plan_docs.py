"""docs/plan.md names every field of the document, and its commands work."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from octavo.llm.plan import plan_for
from octavo.models.catalogue import list_models
from octavo.planner.devices import list_devices
from octavo.planner.plan import Plan
from octavo.planner.question import PLAN_OPTIONS, question_from_words

TEXT = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def test_every_field_of_the_document_is_explained():
    table = TEXT.partition("| field of")[2]
    named = set(re.findall(r"`([a-z_0-9]+)`", table))
    fields = {each.name for each in dataclasses.fields(Plan)} - {"refusal"} | {"schema"}
    assert fields <= named


def test_its_commands_are_understood_and_its_counts_hold():
    flags = {f"--{each.flag_name}" for each in PLAN_OPTIONS}
    commands = re.findall(r"^    octavo (plan .*?)(?: +#.*)?$", TEXT, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command)[1:]
        assert {word for word in words if word.startswith("--")} <= flags
        if words[0].startswith("."):
            continue
        pairs = {"model": words[0], **dict(zip(words[1::2], words[2::2], strict=True))}
        assert plan_for(question_from_words(pairs)).fits
    assert len(list_models()) >= 95
    assert "47 devices" in TEXT
    assert len(list_devices()) == 47
