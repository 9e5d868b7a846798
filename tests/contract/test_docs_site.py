"""The documentation as a site: its reference is made from the code, every page is in it, and dead links fail."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service_process import sdk_python

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = "9.8.1"


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(sdk_python("mkdocs-material", MKDOCS)), "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The parts of the repository that the site is made of, to plant mistakes in."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for name in ("src", "tests", "README.md", "CONTRIBUTING.md", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_pages_made_from_the_code_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "site" / "pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_says_what_it_does() -> None:
    commands = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(commands) > 30
    second = {text.partition("\n")[0]: text.partition("```text\n")[2].split("\n\n")[1] for text in commands}
    assert [name for name, text in second.items() if text.startswith(("positional arguments:", "options:"))] == []
    assert [name for name, text in second.items() if "%%" in text] == []


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = build(checkout, site)
    assert done.returncode == 0, done.stderr
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    names = [path.with_name("index.md") if path.name == "README.md" else path for path in pages]
    assert [name for name in names if not (site / name.with_suffix(".html")).is_file()] == []
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="http' not in start
    assert 'rel="stylesheet" href="http' not in start
    assert (site / "source" / "src" / "turnwise" / "recipes" / "first_rl.py").is_file()


def test_every_page_is_in_the_menu_once() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    found = list(_pages_of(hooks["on_config"]({})["nav"]))
    assert sorted(found) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def _pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from _pages_of(below)


def test_a_dead_link_fails_the_build(checkout: Path, tmp_path: Path) -> None:
    page = checkout / "docs" / "glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[gone](no_such_page.md)\n", encoding="utf-8")
    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    assert "no_such_page.md" in done.stderr
