"""Options that name a file: devices without end, pipes without a writer and folders are refused, not read."""

from __future__ import annotations

import os

import pytest

COMMANDS = {
    "--trace": ("plan", "llama-3-8b", "--device", "l4"),
    "--calibrate": ("plan", "llama-3-8b", "--device", "l4"),
    "--json-schema": ("generate", "-p", "x"),
    "--prompt-file": ("generate",),
    "--config": ("serve", "--port", "0"),
    "--workload": ("bench", "offline"),
    "--text": ("eval", "kv"),
}


@pytest.fixture(params=COMMANDS)
def command(request):
    """A command line that lacks the path of one option."""
    return (*COMMANDS[request.param], request.param)


@pytest.mark.parametrize("place", ["device", "pipe", "folder"])
def test_what_has_no_end_or_is_no_file_is_refused_with_the_options_name(octavo, command, place, tmp_path):
    paths = {"device": "/dev/zero", "pipe": str(tmp_path / "pipe"), "folder": str(tmp_path)}
    os.mkfifo(paths["pipe"])

    ran = octavo(*command, paths[place])

    words = {"device": "holds more than", "pipe": "pipe that nothing comes from", "folder": "is a folder"}
    assert ran.code == 2
    assert (
        ran.err.removeprefix("error[invalid-parameter]: ").lstrip("-").startswith(f"{command[-1][2:]}: {paths[place]}")
    )
    assert words[place] in ran.err
    assert not ran.out


def test_a_model_that_is_a_pipe_is_refused_by_whoever_opens_it(octavo, tmp_path):
    for name in ("model.gguf", "config.json"):
        os.mkfifo(tmp_path / name)
        ran = octavo("plan", str(tmp_path / name))
        assert ran.code == 1
        assert "is a device or a pipe" in ran.err
    ran = octavo("plan", str(tmp_path))
    assert ran.code == 1
    assert "config.json: is a device or a pipe" in ran.err
