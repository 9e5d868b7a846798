"""A real Ray for tests: an environment of its own, made on first use. Its search path ends with ours."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = "2.60.0"


def ray_python() -> Path:
    """The interpreter of a virtual environment with Ray, 450 MB, kept in `.venvs`."""
    venv = ROOT / ".venvs" / f"ray-{VERSION}"
    python, stamp = venv / "bin" / "python", venv / ".complete"
    venv.parent.mkdir(exist_ok=True)
    with (venv.parent / f".{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return python
        if not python.exists():
            shutil.rmtree(venv, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", f"ray[default]=={VERSION}", "psutil"], check=True
        )
        import torch

        site = next(venv.glob("lib/python*/site-packages"))
        (site / "zz_torch.pth").write_text(str(Path(torch.__file__).resolve().parents[1]) + "\n", encoding="utf-8")
        stamp.touch()
    return python
