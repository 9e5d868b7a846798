"""The adapters' tests that need the large libraries, in an environment that has them.

They drag in 390 MB, so the extra `dev` leaves them out and those tests are skipped where they are collected. Here they
run in `.venvs/adapters-...`: made on first use, with the libraries in the versions of constraints.txt, and with the
packages of this very environment behind them, so that torch and the like are not installed twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the libraries

ROOT = Path(__file__).parents[2]
LIBRARIES = ("openenv-core", "reasoning-gym", "verifiers")
FILES = (
    "tests/unit/envs/adapters/test_openenv.py",
    "tests/unit/envs/adapters/test_reasoning_gym.py",
    "tests/unit/envs/adapters/test_verifiers.py",
    "tests/contract/test_adapters_check.py",
    "tests/e2e/test_adapters.py",
)
CHOSEN = "openenv or reasoning_gym or verifiers"
INSTALL_S, TESTS_S = 600.0, 500.0


def adapters_python() -> Path:
    """The interpreter of that environment."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = sorted(pin for pin in pins if pin.partition("==")[0] in LIBRARIES)
    ours = sysconfig.get_path("purelib")
    key = hashlib.sha256("\n".join([*wanted, ours, sys.version]).encode()).hexdigest()[:8]
    venv = ROOT / ".venvs" / f"adapters-{key}"
    python, stamp = venv / "bin" / "python", venv / ".complete"
    venv.parent.mkdir(exist_ok=True)
    with (venv.parent / f".{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and _has_libraries(python):
            return python
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        site = next(venv.glob("lib/python*/site-packages"))
        # Before pip runs: it sees what is there already. A path alone would not find what is installed as editable.
        (site / "zz_dev.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
        constraints = venv / "constraints.txt"  # any build of torch is fine: it is the one that we have
        constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
        pip += ["--disable-pip-version-check", "--constraint", str(constraints), *wanted]
        subprocess.run(pip, check=True, timeout=INSTALL_S)
        assert not (site / "torch").exists(), "torch was installed a second time"
        stamp.touch()
    return python


def _has_libraries(python: Path) -> bool:
    """Some may have been ours when it was made, and be gone since."""
    look = f"from importlib.metadata import version; [version(name) for name in {LIBRARIES!r}]"
    return subprocess.run([str(python), "-c", look], capture_output=True, check=False).returncode == 0


def test_every_test_of_a_large_library_runs_and_none_is_skipped(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [str(adapters_python()), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'tests'}", "-k", CHOSEN, *FILES],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    assert {name: suite.get(name) for name in ("errors", "failures", "skipped")} == dict.fromkeys(
        ("errors", "failures", "skipped"), "0"
    )
    ran = {str(case.get("classname")).replace(".", "/") + ".py" for case in suite.iter("testcase")}
    assert ran == set(FILES)
