"""The notebooks of the tutorials run as they are, and what is stored in them was really produced.

There is no Jupyter among the packages that tests need. So the code cells of a notebook are executed in order, in one
namespace, in a process of their own, and what a cell shows is found as a notebook would find it: what it prints, and
its last expression as a picture where it has one, else as text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"

RUN_CELLS = """
import ast, contextlib, io, json, sys
namespace = {"__name__": "__main__"}
shown = []
for source in json.load(sys.stdin):
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
    outputs = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": repr(value)[:200] if hasattr(value, "_repr_svg_") else repr(value)}
        if hasattr(value, "_repr_svg_"):
            data["image/svg+xml"] = value._repr_svg_()
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    shown.append(outputs)
json.dump(shown, sys.stdout)
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(notebook: dict[str, Any], directory: Path) -> list[list[dict[str, Any]]]:
    """What each code cell shows, run in `directory`."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kinds(outputs: list[dict[str, Any]]) -> list[list[str]]:
    return [[output["output_type"], *sorted(output.get("data", {}))] for output in outputs]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored_in_it(path: Path, tmp_path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    shown = run_notebook(notebook, tmp_path)
    for cell, outputs in zip(code_cells(notebook), shown, strict=True):
        source = "".join(cell["source"])
        assert kinds(cell["outputs"]) == kinds(outputs), (
            f"run the notebook again, this cell shows other things: {source}"
        )
    pictures = [output for outputs in shown for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert pictures, "it plots the curve"
    assert any("assistant" in str(outputs) for outputs in shown), "it shows an attempt as a dialogue"
