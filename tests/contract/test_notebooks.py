"""The notebooks of the tutorials run as they are, and what is stored in them was really produced.

They run in a real Jupyter kernel. Jupyter is not among the packages that tests need, so the kernel has an environment
of its own in `.venvs`, made on first use, with the packages of this environment behind it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service_process import ROOT, sdk_python

TUTORIALS = ROOT / "docs" / "tutorials"
KERNEL = ("nbclient", "0.11.0", ("ipykernel==7.4.0", "nbformat==5.10.4"))
VIEW_CELL = """
import turnwise as tw

watched = tw.train("guess_number", model="tiny", steps=2, warmup={"steps": 0}, eval={"tasks": 2})
"""
"""The same kernel runs it after the notebook's own cells: a run that nobody gave an observer."""

RUN_CELLS = """
import json, sys, nbclient, nbformat
notebook = nbformat.reads(sys.stdin.read(), as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", coalesce_streams=True).execute()
json.dump(notebook, sys.stdout)
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(notebook: dict[str, Any], directory: Path) -> list[list[dict[str, Any]]]:
    """What each code cell shows, and the view's cell after them, run in `directory`."""
    view = {"cell_type": "code", "id": "view", "metadata": {}, "source": VIEW_CELL, "outputs": []}
    whole = {**notebook, "cells": [*notebook["cells"], {**view, "execution_count": None}]}
    done = subprocess.run(
        [str(sdk_python(*KERNEL)), "-c", RUN_CELLS],
        input=json.dumps(whole),
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [cell["outputs"] for cell in code_cells(json.loads(done.stdout))]


def kinds(outputs: list[dict[str, Any]]) -> list[list[str]]:
    return [[output["output_type"], *sorted(output.get("data", {}))] for output in outputs]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored_in_it(path: Path, tmp_path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    *shown, view = run_notebook(notebook, tmp_path)
    for cell, outputs in zip(code_cells(notebook), shown, strict=True):
        source = "".join(cell["source"])
        assert kinds(cell["outputs"]) == kinds(outputs), (
            f"run the notebook again, this cell shows other things: {source}\n{outputs}"
        )
    pictures = [output for outputs in shown for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert pictures, "it plots the curve"
    assert any("assistant" in str(outputs) for outputs in shown), "it shows an attempt as a dialogue"

    assert kinds(view) == [["display_data", "text/html", "text/plain"]], "one block that is redrawn, and no warnings"
    (block,) = view
    page, text = (block["data"][kind] for kind in ("text/html", "text/plain"))
    assert page.startswith("<pre>held-out (start, step 0)")
    assert "step 2/2  reward" in text, "the last step stays when the run is over"
    assert "..." not in text.splitlines()[-2], "it does not say that a run which is over goes on"
