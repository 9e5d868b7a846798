"""BM25 leaves the rest of the process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from turnwise.retriever.lexical import Bm25Index

assert Bm25Index.build(["a whale", "a train"]).search("whale", 1)[0][0] == 0
import jax  # it is still there for whoever wants it
"""


def test_an_installed_jax_is_not_started_by_an_index(tmp_path: Path) -> None:
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("print('started')\n")
    (package / "lax.py").write_text("raise SystemExit('bm25s started JAX, which takes the memory of a GPU')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started\n"
