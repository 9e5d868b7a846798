"""Virtual environments for tests that need packages which the extra `dev` leaves out. They are kept in `.venvs`.

One function makes them all: the first caller fills the environment, callers beside it wait for the lock, and a stamp
says that it is complete. An environment that was left half made is thrown away.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[1]
INSTALL_S = 1200.0
LIST = """
import re
from importlib.metadata import distributions

for found in reversed(list(distributions())):  # the first on the path is the one that is imported
    print(re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(), found.version.partition("+")[0])
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment without pip of its own; uv installs into it, which takes a tenth of pip's time."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def install(self, *arguments: str) -> None:
        """`uv pip install` with these arguments; bytecode is made where it is used, unless they ask for it."""
        _run_uv("install", "--python", str(self.python), *arguments)

    def install_missing(self, *packages: str, constraints: Path | None = None) -> None:
        """Install packages, and of what they need only what the search path does not have in that version yet.

        uv looks at an environment's own folder and not at what its search path ends with. So it resolves first, with
        what is there as its first choice, and then installs the rest.
        """
        there = self._installed()
        needs, resolved = self.folder / "needs.txt", self.folder / "resolved.txt"
        needs.write_text("\n".join(packages), encoding="utf-8")
        resolved.write_text("\n".join(f"{name}=={version}" for name, version in there.items()), encoding="utf-8")
        overrides = self.folder / "overrides.txt"
        overrides.write_text('torch; python_version < "3"', encoding="utf-8")  # any build will do: we have one
        files = ["--overrides", str(overrides), "--output-file", str(resolved)]
        files += ["--constraints", str(constraints)] if constraints is not None else []
        _run_uv("compile", str(needs), "--python", str(self.python), "--no-header", "--no-annotate", *files)
        pins = [line.split(";")[0].strip() for line in resolved.read_text(encoding="utf-8").splitlines()]
        missing = [pin for pin in pins if there.get(pin.partition("==")[0]) != pin.partition("==")[2]]
        if missing:
            self.install("--no-deps", *missing)

    def _installed(self) -> dict[str, str]:
        """{name: version} of everything that the environment's interpreter finds."""
        done = subprocess.run([str(self.python), "-c", LIST], capture_output=True, text=True, check=True)
        return dict(line.split() for line in done.stdout.splitlines())

    def write_constraints(self, *left_out: str) -> Path:
        """Our constraints.txt without the pins of some packages."""
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        file = self.folder / "constraints.txt"
        file.write_text("".join(pin for pin in pins if pin.partition("==")[0] not in left_out), encoding="utf-8")
        return file

    def end_with_ours(self, *, is_editable: bool = False) -> None:
        """Let the search path end with our packages, so that torch is not installed twice.

        Args:
            is_editable: also find what is installed with us as editable, such as turnwise itself.
        """
        ours = sysconfig.get_path("purelib")
        if is_editable:
            self.end_with(Path(ours))
        else:
            self._search(ours)

    def end_with(self, site_packages: Path) -> None:
        """Let the search path end with the packages of another environment, and with what those end with."""
        self._search(f"import site; site.addsitedir({str(site_packages)!r})")

    def _search(self, line: str) -> None:
        (self.site_packages / "zz_others.pth").write_text(line + "\n", encoding="utf-8")


def _run_uv(verb: str, *arguments: str) -> None:
    subprocess.run([find_uv_bin(), "pip", verb, "--quiet", *arguments], check=True, timeout=INSTALL_S)


def run_in(python: Path, *arguments: str, env: Mapping[str, str], timeout_s: float) -> str:
    """What a program prints in such an environment; it must end well."""
    done = subprocess.run(
        [str(python), *arguments], env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    print(done.stderr)
    return done.stdout


def make_environment(
    name: str, fill: Callable[[Environment], None], is_usable: Callable[[Path], bool] = lambda _: True
) -> Path:
    """The interpreter of the environment `.venvs/name`, which `fill` fills the first time.

    Args:
        is_usable: asked of the interpreter of one that is there already; if it says no, the environment is made again.
    """
    environment = Environment(ROOT / ".venvs" / name)
    folder, stamp = environment.folder, environment.folder / ".complete"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and is_usable(environment.python)):
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            fill(environment)
            stamp.touch()
    return environment.python
