"""`sandbox: subprocess`: a process with limits but without isolation. Users must ask for it.

These limits hold: CPU time, address space, file size, output and the deadline; the environment is empty and the program
has its own folder. But the program can read what its user can read, reach the network, signal its user's processes, and
leave processes behind if they start a new session. If root starts it, it runs under a user id drawn for it alone,
provided that this user can reach the interpreter; then processes are limited too and none are left behind. A job that
is shown files of the host keeps its user, who can read them.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from turnwise.envs.sandbox.bubblewrap import drop_command, limit_command
from turnwise.envs.sandbox.detect import find_tool, num_mapped_ids
from turnwise.envs.sandbox.files import FileTree
from turnwise.envs.sandbox.process import Launch, SandboxJob

_OTHERS_MAY_ENTER = 0o001


class PlainBackend:
    """Turns jobs into commands that run without isolation."""

    has_own_pids = False
    has_overlay = False

    def __init__(self) -> None:
        self._prlimit = find_tool("prlimit")
        self._setpriv = find_tool("setpriv")
        self._is_dropped = os.geteuid() == 0 and num_mapped_ids() > 65536 and _is_reachable(Path(sys.base_prefix))

    def draw_user_id(self) -> int:
        return random.SystemRandom().randrange(1 << 30, 1 << 31) if self._is_dropped else os.geteuid()

    def launch(self, job: SandboxJob, stack: ExitStack) -> Launch:
        is_dropped = self._is_dropped and not job.shown
        drawn_id = job.user_id if job.user_id is not None else self.draw_user_id()
        user_id = drawn_id if is_dropped else os.geteuid()
        if job.directory is None:
            directory = Path(
                stack.enter_context(TemporaryDirectory(prefix="turnwise-run-", ignore_cleanup_errors=True))
            )
            directory.chmod(0o777)
            FileTree(directory, user_id).write_all(job.files)
        else:
            directory = job.directory
        limits = limit_command(self._prlimit, job)
        if not is_dropped:  # the limit would count the user's other processes too
            limits = [option for option in limits if not option.startswith("--nproc")]
        drop = drop_command(self._setpriv, user_id) if is_dropped else []
        return Launch(
            argv=(*limits, *drop, *job.argv),
            environment={
                "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(directory),
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                **({"PYTHONPATH": _package_path(job)} if job.packages else {}),
            },
            directory=str(directory),
            user_id=user_id if is_dropped else None,
        )


def _package_path(job: SandboxJob) -> str:
    return os.pathsep.join(dict.fromkeys(str(place.parent) for place in job.packages.values()))


def _is_reachable(place: Path) -> bool:
    """Whether every user may enter this path."""
    return all(folder.stat().st_mode & _OTHERS_MAY_ENTER for folder in [place, *place.parents])
