"""docs/errors.md says what errors there are."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def test_document_is_what_the_classes_say_now(documents: dict[str, str], script: Callable[[str], ModuleType]) -> None:
    written = script("write_error_docs").error_docs()
    assert documents["docs/errors.md"] == written, "docs/errors.md is behind: run `python scripts/write_error_docs.py`"


def test_every_error_has_a_code_of_its_own_and_is_documented(
    documents: dict[str, str], script: Callable[[str], ModuleType]
) -> None:
    classes = script("write_error_docs").error_classes()

    assert len(classes) > 8
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes)
    for cls in classes:
        assert f"| `{cls.code}` | `{cls.__name__}` | {cls.exit_code} |" in documents["docs/errors.md"]
        assert cls.exit_code in {1, 2, 3}
        assert cls.__doc__


def test_errors_for_users_live_in_one_file(root: Path, script: Callable[[str], ModuleType]) -> None:
    names = {cls.__name__ for cls in script("write_error_docs").error_classes()}
    for path in root.glob("src/octavo/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & names, f"{path.name}: {node.name} belongs into errors.py"
