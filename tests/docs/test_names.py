"""Documents speak of names that the code has, in words that the code uses."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import octavo

_CODE = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"_?[A-Za-z][A-Za-z0-9_]*(?:\.[a-z_]+)?")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

OTHER_WORDS = {
    "page": r"\bpages?\b(?! cache)",
    "page table": r"\bpage tables?\b",
    "swap in": r"\bswap(ped|s|ping)?\b",
    "retract": r"\bretract(ed|s)?\b",
    "ref_cnt": r"\bref_cnt\b",
    "radix tree": r"\bradix\b",
    "cu_seqlens": r"\bcu_seqlens\b",
    "indptr": r"\bindptr\b",
    "cached_len": r"\bcached_len\b",
    "out_loc": r"\bout_loc\b",
    "LRU list": r"\bLRU list\b",
}
"""Words of other engines, as the glossary lists them, and what would betray them in ours."""


def glossary(text: str) -> list[list[str]]:
    """Return the rows of the glossary's table: word, meaning, names in the code, words of others."""
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| **")]
    return [[cell.strip(" |") for cell in (*row, "", "")][:4] for row in rows]


def prose(path: Path) -> Iterator[str]:
    """Yield the comments and docstrings of a file."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_every_name_in_the_glossary_is_in_the_code(root: Path, documents: dict[str, str]) -> None:
    words = set(re.findall(r"\w+", "\n".join(p.read_text(encoding="utf-8") for p in root.glob("src/octavo/**/*.py"))))
    rows = glossary(documents["docs/glossary.md"])

    assert len(rows) > 40
    for row in rows:
        for name in _CODE.findall(row[2]):
            assert name in words, f"the glossary says that {row[0]} is {name} in the code"


def test_glossary_has_one_row_per_word(documents: dict[str, str]) -> None:
    words = [word for row in glossary(documents["docs/glossary.md"]) for word in row[0].replace("*", "").split(", ")]
    assert len(words) == len(set(words))


def test_core_does_not_use_the_words_of_others(root: Path, documents: dict[str, str]) -> None:
    listed = {word for row in glossary(documents["docs/glossary.md"]) for word in re.split(", ", row[3])}
    assert set(OTHER_WORDS) <= listed, "a word is only forbidden if the glossary says what to write instead"
    for folder in ("core", "engine", "llm", "planner"):
        for path in root.glob(f"src/octavo/{folder}/*.py"):
            for text in prose(path):
                for word, pattern in OTHER_WORDS.items():
                    assert not re.search(pattern, text), f"{path.name} says {word}: {text[:200]}"


def test_every_class_and_method_named_in_a_document_is_in_the_code(root: Path, documents: dict[str, str]) -> None:
    """Names in code spans that look like classes, or like methods of one."""
    files = [*root.glob("src/octavo/**/*.py"), *root.glob("csrc/*.*"), root / "pyproject.toml"]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))
    num_names = 0
    for document, text in documents.items():
        if document in {"docs/glossary.md", "docs/cli.md", "docs/metrics.md"}:  # the last two are made from the code
            continue
        for span in _CODE.findall(_FENCED.sub("", text)):
            is_class = re.fullmatch(r"[A-Z][a-z]+[A-Za-z]*(\.\w+)?", span)
            is_name = re.fullmatch(r"_?[a-z]+(_[a-z]+)+", span)
            if not is_class and not is_name:
                continue
            num_names += 1
            for part in span.split("."):
                assert part in words | {"AssertionError"}, f"{document} names {span}"
    assert num_names > 60


def test_architecture_lists_the_layers_that_are_enforced(root: Path, documents: dict[str, str]) -> None:
    rules = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(rule["layers"] for rule in rules if rule["type"] == "layers")
    drawn = documents["docs/architecture.md"].split("```text\n")[1].split("\n```")[0]

    assert [re.split(r"  +", line)[0] for line in drawn.splitlines()] == [re.sub(r"[()]", "", one) for one in layers]


def test_public_names_are_complete_and_sorted() -> None:
    def order(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert octavo.__all__ == sorted(set(octavo.__all__), key=order)
    tree = ast.parse(Path(octavo.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    typed = {alias.name for node in imports if (node.module or "").startswith("octavo") for alias in node.names}
    assert set(octavo.__all__) == typed, "what type checkers see is what is exported"
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert set(octavo.__all__) <= set(dir(octavo))
