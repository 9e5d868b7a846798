"""Virtual environments with large packages, made on first use and kept in `.venvs`, for tests that need them.

An environment ends its search path with the packages of this very one, so that torch and the like are not installed
twice. The packages come in the versions of constraints.txt.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
INSTALL_S, TESTS_S = 600.0, 500.0


def python_with(name: str, packages: Sequence[str], *, alone: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with these packages.

    Args:
        alone: packages that are installed without what they ask for.
    """
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = sorted(pin for pin in pins if pin.partition("==")[0] in packages)
    bare = sorted(pin for pin in pins if pin.partition("==")[0] in alone)
    ours = sysconfig.get_path("purelib")
    key = hashlib.sha256("\n".join([*wanted, *bare, ours, sys.version]).encode()).hexdigest()[:8]
    venv = ROOT / ".venvs" / f"{name}-{key}"
    python, stamp = venv / "bin" / "python", venv / ".complete"
    venv.parent.mkdir(exist_ok=True)
    with (venv.parent / f".{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and _has(python, [*packages, *alone]):
            return python
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = next(venv.glob("lib/python*/site-packages"))
        # Before pip runs: it sees what is there already. A path alone would not find what is installed as editable.
        (site / "zz_dev.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
        constraints = venv / "constraints.txt"  # any build of torch is fine: it is the one that we have
        constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
        pip += ["--disable-pip-version-check", "--constraint", str(constraints)]
        subprocess.run([*pip, *wanted], check=True, timeout=INSTALL_S)
        if bare:
            subprocess.run([*pip, "--no-deps", *bare], check=True, timeout=INSTALL_S)
        assert not (site / "torch").exists(), "torch was installed a second time"
        stamp.touch()
    return python


def _has(python: Path, packages: Sequence[str]) -> bool:
    """Some may have been ours when it was made, and be gone since."""
    look = f"from importlib.metadata import version; [version(name) for name in {list(packages)!r}]"
    return subprocess.run([str(python), "-c", look], capture_output=True, check=False).returncode == 0


def run_tests_with(python: Path, files: Sequence[str], folder: Path, *options: str) -> None:
    """Run test files in such an environment. All must pass, none may be skipped, and each must have a test."""
    report = folder / "report.xml"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, f"--basetemp={folder / 'tests'}", *options, *files],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: suite.get(name) for name in ("errors", "failures", "skipped")}
    assert counts == dict.fromkeys(counts, "0"), done.stdout[-2000:]
    ran = {str(case.get("classname")).replace(".", "/") + ".py" for case in suite.iter("testcase")}
    assert ran == set(files)
