"""Environments with large packages in the versions of constraints.txt, and tests that run in them.

Such an environment ends its search path with the packages of this very one, so that torch and the like are not
installed twice.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from environments import ROOT, Environment, make_environment

TESTS_S = 500.0


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

    def fill(environment: Environment) -> None:
        environment.end_with_ours(is_editable=True)
        environment.install_missing(*wanted, constraints=environment.write_constraints())
        if bare:
            environment.install("--no-deps", *bare)
        assert not (environment.site_packages / "torch").exists(), "torch was installed a second time"

    def has_all(python: Path) -> bool:
        """Some may have been ours when it was made, and be gone since."""
        look = f"from importlib.metadata import version; [version(name) for name in {[*packages, *alone]!r}]"
        return subprocess.run([str(python), "-c", look], capture_output=True, check=False).returncode == 0

    return make_environment(f"{name}-{key}", fill, has_all)


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
