"""Every link of a document leads somewhere, and every path it names is there."""

from __future__ import annotations

import re
from pathlib import Path

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w./-]+/[\w.-]+\.(?:py|h|cpp|md|toml)|[\w-]+\.(?:py|md)")


def anchors(text: str) -> set[str]:
    """Return the anchors that a rendered document has for its headings."""
    headings = _HEADING.findall(_FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading(root: Path, documents: dict[str, str]) -> None:
    num_links = 0
    for name, text in documents.items():
        for link in _LINK.findall(_FENCED.sub("", text)):
            if "://" in link:
                continue
            num_links += 1
            path, _, anchor = link.partition("#")
            target = (root / name).parent / path if path else root / name
            assert target.exists(), f"{name} links to {link}"
            if anchor:
                assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name} links to {link}"
    assert num_links > 20


def test_every_file_named_in_a_document_is_there(root: Path, documents: dict[str, str]) -> None:
    """Paths in code spans count from the root, from `src/octavo`, or from beside the document."""
    num_paths = 0
    for name, text in documents.items():
        for span in _CODE.findall(_FENCED.sub("", text)):
            if not _PATH.fullmatch(span):
                continue
            num_paths += 1
            folders = (root, root / "src" / "octavo", (root / name).parent)
            assert any((folder / span).is_file() for folder in folders), f"{name} names {span}"
    assert num_paths > 40


def test_every_decision_is_listed_and_short(root: Path) -> None:
    folder = root / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    decisions = sorted(folder.glob("[0-9]*.md"))

    assert [int(path.name[:3]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        text = path.read_text(encoding="utf-8")
        title = text.splitlines()[0].partition(": ")[2]
        assert f"| [{path.name[:3]}]({path.name}) | {title} |" in index, path.name
        assert len(text.splitlines()) <= 60, f"{path.name} is longer than a page"
