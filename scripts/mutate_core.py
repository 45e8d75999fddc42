"""Break the core one line at a time, and see which test notices.

    python scripts/mutate_core.py [NAME ...] [--list]

The mutants stand in `core_mutants.txt`. Each is applied to a copy of `src` in a temporary folder, and `tests/core` runs
against the copy until the first failure. A mutant that survives is a rule that nothing tests. Takes half an hour on a
busy machine; name a few to be quicker.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS_FILE = Path(__file__).with_name("core_mutants.txt")
SLOWEST = ("test_state_machine.py", "test_cost.py")
# An editable install may put its own finder before the path, and the unchanged package would be tested.
RUN_TESTS = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Scikit" not in type(finder).__name__]
sys.path.insert(0, sys.argv[1])
import octavo, pytest
assert octavo.__file__.startswith(sys.argv[1]), octavo.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: `old` occurs exactly once in a file of the core; an empty `new` takes the line out."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, core: Path) -> None:
        """Change the file below `core`."""
        path = core / self.file
        text = path.read_text()
        count = text.count(self.old)
        if count != 1:
            sys.exit(f"error: {self.name}: the text to change occurs {count} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))


def read_mutants(text: str) -> list[Mutant]:
    """Read blocks of `== name (file)`, `- old` lines and `+ new` lines."""
    mutants = []
    for block in text.split("\n== ")[1:]:
        title, *lines = block.splitlines()
        found = re.fullmatch(r"(.+) \((\w+\.py)\)", title)
        assert found is not None, title
        old = "\n".join(line[2:] for line in lines if line.startswith("-"))
        new = [line[2:] for line in lines if line.startswith("+")]
        mutants.append(
            Mutant(
                name=found.group(1),
                file=found.group(2),
                old=old if new else old + "\n",
                new="\n".join(new),
            )
        )
    return mutants


def first_failure(mutant: Mutant) -> str | None:
    """Return the test that notices a mutant, or `None` if it survives."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(source / "octavo" / "core")
        tests = sorted((ROOT / "tests" / "core").glob("test_*.py"), key=lambda path: (path.name in SLOWEST, path.name))
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
        command = [sys.executable, "-c", RUN_TESTS, str(source), *options, *map(str, tests)]
        environment = os.environ | {"OCTAVO_CAMPAIGN": "0.3", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and files
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            return "(a test that never ended)"
        if done.returncode == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", done.stdout, re.MULTILINE)
        return found.group(1) if found else f"(exit {done.returncode})"


def main() -> int:
    """Try the mutants; exit 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants to try; all by default")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    options = parser.parse_args()
    chosen = [one for one in read_mutants(MUTANTS_FILE.read_text()) if not options.names or one.name in options.names]
    if options.list:
        print("\n".join(f"{mutant.file:<22} {mutant.name}" for mutant in chosen))
        return 0
    num_survivors = 0
    for mutant in chosen:
        test = first_failure(mutant)
        num_survivors += test is None
        print(f"{mutant.name:<50} {test or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - num_survivors} of {len(chosen)} mutants are noticed")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
