"""Writes docs/errors.md from the error classes themselves; a test fails when the file is behind.

python scripts/write_error_docs.py
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

from octavo import errors
from octavo.core.events import EventLog
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.scheduler import Scheduler
from octavo.errors import OctavoError
from octavo.testing.factories import make_request

DOCS = Path(__file__).parent.parent / "docs" / "errors.md"

HEAD = """\
# Errors

<!-- Made by `python scripts/write_error_docs.py` from `src/octavo/errors.py`; edit that, not this file. -->

Everything that can go wrong through input or machine is a subclass of `octavo.OctavoError`, with a stable `code`, a
`message`, the rule that was broken (`because`) and `hints` that work. The command line prints it to stderr and exits
with its exit code; with `--json` it is also a document on stdout:

    {"schema": "octavo.error/1", "error": {"code": "...", "message": "...", "hints": ["..."]}}

An `AssertionError` is a bug in Octavo, not in your input.

"""

COMMAND_LINE_ONLY = """\

The command line has two codes of its own: `usage` (exit 2) for a command line that cannot be read, and `internal`
(exit 1) for a bug in Octavo.
"""


def error_classes() -> list[type[OctavoError]]:
    """Return every error class, each after its parent."""

    def below(parent: type[OctavoError]) -> list[type[OctavoError]]:
        return [parent, *(cls for child in parent.__subclasses__() for cls in below(child))]

    return below(OctavoError)


def error_docs() -> str:
    """Return the text of docs/errors.md."""
    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1]
    rows = ["| code | class | exit code | meaning |", "| --- | --- | ---: | --- |"]
    for cls in error_classes():
        meaning = inspect.cleandoc(cls.__doc__ or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")
        rows.append(f"| `{cls.code}` | `{cls.__name__}` | {cls.exit_code} | {meaning} |")
    return "\n".join(
        [
            HEAD + "```text\n" + textwrap.dedent(tree) + "\n```\n",
            "\n".join(rows) + "\n" + COMMAND_LINE_ONLY,
            "One of them, as a terminal shows it:\n\n```text\n" + example().render() + "\n```\n",
        ]
    )


def example() -> OctavoError:
    """Return a real error: a request that no pool of 100 blocks can hold."""
    events = EventLog()
    scheduler = Scheduler(
        PagedKVCache(100, 16, max_chunk_tokens=512, events=events),
        Limits(max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=512),
        events=events,
    )
    try:
        scheduler.add(make_request(1500, max_tokens=256))
    except OctavoError as error:
        return error
    raise AssertionError("1,756 tokens do not fit into 1,600 places")


if __name__ == "__main__":
    DOCS.write_text(error_docs(), encoding="utf-8")
