"""The documentation is one house: every page is reached from its index, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def _targets(page: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = pattern.findall(page.read_text(encoding="utf-8"))
    return [(page.parent / target.partition("#")[0]).resolve() for target in found if _is_local(target)]


def _is_local(target: str) -> bool:
    return not target.startswith(("http", "#"))


def test_every_link_and_picture_of_every_page_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for pattern in (_LINK, _PICTURE)
        for target in _targets(page, pattern)
        if not target.exists()
    ]
    assert missing == []


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        waiting += [target for target in _targets(page, _LINK) if target.suffix == ".md" and target.exists()]
    assert sorted(str(page.relative_to(DOCS)) for page in set(DOCS.rglob("*.md")) - reached) == []


def test_the_index_has_four_parts() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 4


def test_the_readme_is_one_screen_and_a_half() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert sum(len(line.split()) for line in lines) <= 700


def test_contributing_names_thirteen_changes_and_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = text.partition("## Where do I change ...")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith("| To add")]
    assert len(rows) == 13
    named = re.findall(r"`([\w/]+(?:\.py|/))`", part)
    bases = (ROOT, ROOT / "src" / "turnwise")
    assert [name for name in named if not any((base / name).exists() for base in bases)] == []
