"""Prints files and functions past the house's measure, so that each is a choice; never fails. Part of `make lint`."""

from __future__ import annotations

import ast
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
ROOT = Path(__file__).parent.parent


def outliers() -> list[str]:
    """Return a line for each file of sources or tests, and each function, that is longer than the measure."""
    found = []
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("csrc/**/*.[ch]*")]):
        text = path.read_text(encoding="utf-8")
        name, num_lines = path.relative_to(ROOT), text.count("\n")
        if num_lines > MAX_FILE_LINES:
            found.append(f"{name}: {num_lines} lines")
        if path.suffix == ".py":
            found += [f"{name}: {each}" for each in _long_functions(ast.parse(text))]
    return found


def _long_functions(tree: ast.Module) -> list[str]:
    long = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                long.append(f"{node.name}() has {num_lines} lines")
    return long


if __name__ == "__main__":
    lines = outliers()
    print(f"{len(lines)} past {MAX_FILE_LINES} lines a file or {MAX_FUNCTION_LINES} a function:")
    print("\n".join(f"  {line}" for line in lines))
