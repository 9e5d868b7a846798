"""Every link in the docs leads to a file, and every name that links to code is defined there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("tour.md", "config.md", "glossary.md")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def _links(page: str) -> list[tuple[str, str]]:
    return _LINK.findall((DOCS / page).read_text(encoding="utf-8"))


def _defined_names(path: Path) -> set[str]:
    """Functions, classes and their members, assigned names: `Loop`, `Loop.run`."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


@pytest.mark.parametrize("page", PAGES)
def test_every_linked_file_exists(page: str) -> None:
    missing = [
        target
        for _, target in _links(page)
        if not target.startswith("http") and not (DOCS / target.partition("#")[0]).exists()
    ]
    assert missing == []


def test_every_linked_name_is_defined_in_its_file() -> None:
    code = [(text.strip("`"), target) for text, target in _links("tour.md") if target.endswith(".py")]
    assert len(code) > 30
    missing = [(name, target) for name, target in code if name not in _defined_names((DOCS / target).resolve())]
    assert missing == []


def test_the_tour_stops_at_all_eleven_places() -> None:
    text = (DOCS / "tour.md").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^### (\d+)\.", text, re.MULTILINE)] == list(range(1, 12))


def _files_of(part: str) -> set[str]:
    """The source files that one part of the tour visits; kernels are behind `engine/ops` and not counted."""
    text = (DOCS / "tour.md").read_text(encoding="utf-8")
    own = text.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    targets = [target for _, target in _LINK.findall(own) if target.endswith(".py")]
    return {target for target in targets if "/engine/ops/" not in target}


def test_the_walk_is_short() -> None:
    set_up = _files_of("Set-up")
    assert 8 <= len(set_up) <= 12
    assert 15 <= len(_files_of("One step") - set_up) <= 25
    assert 10 <= len(_files_of("A gradient over HTTP")) <= 15
