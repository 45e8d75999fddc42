"""A model file on a bare machine: nothing is written, nothing is fetched, and the file is needed only while loading."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)

WATCHED = """
import os, sys
def watch(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if args[0] not in ("/dev/null", "/dev/tty"):
            raise SystemExit(f"wrote to {args[0]!r}")
    if event in ("socket.connect", "os.mkdir", "os.rename", "os.remove"):
        raise SystemExit(f"{event} {args!r}")
sys.addaudithook(watch)
from octavo.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_model(TinyModel(), tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_0")


def test_generate_from_a_file_writes_nothing_and_needs_no_home_terminal_or_network(gguf: Path) -> None:
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path[1:]))}
    done = subprocess.run(
        [sys.executable, "-B", "-c", WATCHED, "generate", str(gguf), "-p", "hello", "--max-tokens", "4", "--json"],
        env={**kept, "TMPDIR": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent/cache"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert b"octavo.generate/1" in done.stdout


def test_the_watch_would_have_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", WATCHED.replace("from octavo.cli.main import main", "open('x', 'w')")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and b"wrote to 'x'" in done.stderr


@pytest.mark.parametrize("runner", ["native", "reference"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "replaced", "deleted"])
def test_a_model_file_that_changes_while_running_changes_no_bit(
    gguf: Path, tmp_path: Path, runner: str, damage: str
) -> None:
    path = tmp_path / "copy.gguf"
    shutil.copy(gguf, path)
    llm = LLM(str(path), runner=runner, max_model_len=128, num_blocks=32, threads=1, enable_prefix_caching=False)
    before = llm.generate("what the file said", GREEDY)[0].outputs[0]

    if damage == "truncated":
        os.truncate(path, 1000)
    elif damage == "overwritten":
        path.write_bytes(bytes(path.stat().st_size))
    elif damage == "replaced":
        (tmp_path / "other").write_bytes(b"something else")
        (tmp_path / "other").replace(path)
    else:
        path.unlink()
    after = llm.generate("what the file said", GREEDY)[0].outputs[0]

    assert (before.token_ids, before.logprobs) == (after.token_ids, after.logprobs)


LOAD_AND_MEASURE = """
import resource, sys
from octavo.config.engine import EngineConfig
from octavo.llm.assemble import assemble
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
assemble(EngineConfig(model=sys.argv[1], num_blocks=8, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16,
                      runner="native", threads=1))
print(peak() - before)
"""


@pytest.mark.parametrize(("kind", "num_layers"), [("f16", 8), ("q4_0", 24)])
def test_loading_keeps_one_copy_of_the_weights(tmp_path: Path, kind: str, num_layers: int) -> None:
    """Peak memory of loading is at most the file and 30 % (a tensor at a time is read, packed and let go)."""
    model = TinyModel(
        hidden_size=512, intermediate_size=2048, num_layers=num_layers, num_heads=8, num_kv_heads=8, vocab_size=600
    )
    path = write_gguf_model(model, tmp_path / "big.gguf", kind=kind)
    size = path.stat().st_size
    assert size > 50 * 2**20, "large against what a process takes anyway"

    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_MEASURE, str(path)], capture_output=True, timeout=300, check=True
    )

    assert int(done.stdout) <= 1.3 * size + resource.getpagesize()
