"""Hooks of the documentation's site: the menu comes from docs/README.md, and links to code lead to a copy of the file.

`mkdocs.yml` names this file; mkdocs calls the functions below.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = "source"
"""Where the site keeps copies of files that are outside docs/."""

_copied: set[Path] = set()


def on_config(config: Any) -> Any:
    """Make the menu: the parts of docs/README.md, each with its pages."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    menu: list[Any] = [{"Start": "README.md"}]
    seen = {"README.md"}
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        title = heading.partition(":")[0].strip(" .")
        entries: list[Any] = []
        for name, target in LINK.findall(body):
            page = target.partition("#")[0]
            if not page.endswith(".md") or page in seen:
                continue
            folder = (DOCS / page).parent
            if folder in (DOCS, DOCS / title.lower()) or not _opens_folder(DOCS / page):
                entries.append({name.strip("`"): page})
                seen.add(page)
                continue
            others = sorted(str(path.relative_to(DOCS)) for path in folder.glob("*.md"))
            entries.append({folder.name.capitalize(): [other for other in others if other not in seen]})
            seen.update(others)
        menu.append({title: entries})
    config["nav"] = menu
    return config


def _opens_folder(page: Path) -> bool:
    """Whether a link to this page brings its whole folder into the menu: it is the folder's start, or there is none."""
    starts = [start for start in ("README.md", "index.md") if (page.parent / start).is_file()]
    return not starts or page.name in starts


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at copies of the files; text in code blocks stays as it is."""
    here = (DOCS / page.file.src_uri).parent

    def rewrite(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if target.startswith(("http", "#", "mailto:")):
            return found[0]
        path = Path(os.path.normpath(here / target.partition("#")[0]))
        if path.is_dir() and not path.is_relative_to(DOCS):
            return text
        if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT) or not path.is_file():
            return found[0]  # mkdocs itself says which of these are dead
        _copied.add(path)
        up = "../" * len(Path(page.url).parts)
        return f'<a href="{up}{CODE}/{path.relative_to(ROOT)}">{text}</a>'

    return _outside_fences(markdown, lambda text: LINK.sub(rewrite, text))


def _outside_fences(markdown: str, change: Any) -> str:
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def on_post_build(config: Any) -> None:
    """Copy the files that pages link to."""
    for path in _copied:
        target = Path(config["site_dir"]) / CODE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
