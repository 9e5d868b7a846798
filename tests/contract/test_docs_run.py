"""Every Python block of the README and of docs/ runs as it is printed.

The blocks of one file share a namespace, in order, and run in a process of their own with a tiny model in the place of
`Qwen/Qwen3-0.6B`. A traceback names the file and the line in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm_start import WarmPopen

ROOT = Path(__file__).parents[2]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.is_file()]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

RUN_BLOCKS = """
import json, linecache, sys
page, blocks = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
lines = open(page, encoding="utf-8").readlines()
linecache.cache[page] = (None, None, lines, page)
for code in blocks:
    exec(compile(code, page, "exec"), namespace)
"""


def python_blocks(text: str) -> list[str]:
    """The blocks, each with as many empty lines before it as the page has."""
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in BLOCK.finditer(text)]


PAGES_WITH_CODE = [page for page in PAGES if python_blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.usefixtures("tiny_dir")  # makes the model once for all
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_a_page_run_as_they_are(page: Path, turnwise_home: Path, tmp_path: Path) -> None:
    request = json.dumps([str(page), python_blocks(page.read_text(encoding="utf-8"))])
    env = {**os.environ, "TURNWISE_ALIASES": "Qwen/Qwen3-0.6B=tiny", "TURNWISE_HOME": str(turnwise_home)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with WarmPopen([sys.executable, "-c", RUN_BLOCKS], cwd=tmp_path, env=env, text=True, **pipes) as process:
        try:
            _, complaints = process.communicate(request, timeout=280)
        finally:
            process.kill()
    assert process.returncode == 0, f"{page.relative_to(ROOT)}:\n{complaints}"


def test_the_training_api_page_has_code() -> None:
    assert ROOT / "docs" / "training_api.md" in PAGES_WITH_CODE


def test_an_env_of_your_own_takes_30_lines() -> None:
    text = (ROOT / "docs" / "envs.md").read_text(encoding="utf-8")
    first = next(BLOCK.finditer(text))
    assert text[: first.start()].count("## ") == 1, "it is the first thing on the page"
    assert "## Your own env in 30 lines" in text[: first.start()]
    assert len(first[1].splitlines()) <= 30


def test_a_block_that_fails_is_named_by_its_line_in_the_page() -> None:
    text = "# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\n\nraise ValueError(x)\n```\n"
    namespace: dict[str, object] = {}
    first, second = python_blocks(text)
    exec(compile(first, "page.md", "exec"), namespace)  # noqa: S102 - it is ours
    with pytest.raises(ValueError, match="1") as caught:
        exec(compile(second, "page.md", "exec"), namespace)  # noqa: S102
    assert caught.traceback[-1].lineno + 1 == 11
