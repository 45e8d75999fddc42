"""docs/cli.md says what the commands say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from octavo.cli.main import COMMANDS
from octavo.config.engine import OPTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "cli.md"


def test_docs_are_what_the_commands_say_now():
    spec = importlib.util.spec_from_file_location("write_cli_docs", ROOT / "scripts" / "write_cli_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert DOCS.read_text() == module.cli_docs(), "docs/cli.md is behind: run `make docs`"


def test_every_option_and_command_is_documented():
    text = DOCS.read_text()

    for option in OPTIONS:
        assert f"`{option.env}`" in text, option.name
        assert option.is_positional or f"--{option.flag_name}" in text, option.name
    for name, each in COMMANDS.items():
        assert (f"## octavo {name}\n" in text) == each.is_there, name
