"""Builds the command line of a sandbox: what it can see, which user it is, what it may use.

    /usr, /bin, /lib     read-only, without installed Python packages
    /opt/python          the host's interpreter, read-only; /opt/bin holds python and python3
    /work                the working directory: files of the job, writable, of limited size
    /tmp, /dev/shm       its own, of limited size
    /proc, /dev          its own processes, harmless devices
    what is shown        files and folders that the job names, read-only
    everything else      not there

A filter on system calls (`seccomp.py`) keeps it from making namespaces of its own.

The program inherits nothing: no environment, no network except an empty loopback, no terminal, no open file. If root
starts it, it runs under a user id drawn for it alone, because the limit on processes counts per user and does not apply
to root. Otherwise it runs in a new user namespace.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from turnwise.envs.sandbox.detect import Bubblewrap, num_mapped_ids
from turnwise.envs.sandbox.process import Launch, SandboxJob, data_to_fd

WORK = "/work"

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
_INSIDE_ID = 1000
_SHM_BYTES = 16 << 20
_FIRST_PROCESS = ("/bin/sh", "-c", '"$@"; exit $?', "sandbox")
"""The sandbox's first process: it waits for the program and for orphans, and when it ends, everything ends. It is a
child of bubblewrap, which waits for it. The first process that bubblewrap itself would add is left to the host's first
process, and not every host's first process waits for it."""
_HIGH_IDS = 1 << 30
_SHARED_BY = 8
"""Sessions with the same base have the same user, whose processes the kernel counts together. So its limit is this much
higher, and the limit of each session is watched from outside."""


class BubblewrapBackend:
    """Turns jobs into commands that run under bubblewrap."""

    has_own_pids = True

    def __init__(self, found: Bubblewrap) -> None:
        self._found = found
        self.has_overlay = found.has_overlay
        self._random = random.SystemRandom()

    def launch(self, job: SandboxJob, stack: ExitStack) -> Launch:
        """Make the command and open the descriptors that it needs. They are closed with `stack`."""
        user_id = job.user_id if job.user_id is not None else self.draw_user_id()
        status_read, status_write = os.pipe()
        stack.callback(os.close, status_read)
        pass_fds = [status_write]
        options = [*self._options(job, user_id, pass_fds, stack), "--json-status-fd", str(status_write)]
        options_fd = data_to_fd("\0".join(options).encode() + b"\0", stack)
        argv = [self._found.executable, "--args", str(options_fd), "--", *_FIRST_PROCESS]
        argv += [*self._limited(job, user_id), *job.argv]
        return Launch(
            argv=tuple(argv),
            pass_fds=(*pass_fds, options_fd),
            status_fd=status_read,
            close_after_start=(status_write,),
            environment={},
            directory="/",
        )

    def draw_user_id(self) -> int:
        """Draw a user id that nobody has, so that its processes can be counted. Two sandboxes may share one."""
        if not self._found.is_root:
            return os.geteuid()
        num_ids = num_mapped_ids()
        low = _HIGH_IDS if num_ids > 2 * _HIGH_IDS else num_ids // 2
        return self._random.randrange(low, min(num_ids, 2 * _HIGH_IDS) - 1)

    def _options(self, job: SandboxJob, user_id: int, pass_fds: list[int], stack: ExitStack) -> Iterator[str]:
        yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
        yield from ("--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL")
        if self._found.is_root:
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):  # given up by setpriv
                yield from ("--cap-add", capability)
        else:
            yield from ("--unshare-user", "--uid", str(_INSIDE_ID), "--gid", str(_INSIDE_ID))
            if self._found.can_disable_userns:
                yield "--disable-userns"
        if self._found.filter_program is not None:
            pass_fds.append(data_to_fd(self._found.filter_program, stack))
            yield from ("--seccomp", str(pass_fds[-1]))
        inside_id = user_id if self._found.is_root else _INSIDE_ID
        yield from self._system(inside_id, pass_fds, stack)
        yield from self._python(job.packages)
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from _tmpfs("/dev/shm", _SHM_BYTES, "1777")
        yield from ("--remount-ro", "/dev")
        yield from ("--bind", str(job.tmp), "/tmp") if job.tmp else _tmpfs("/tmp", job.limits.disk_bytes, "1777")
        yield from self._work(job, pass_fds, stack)
        yield from _show(job.shown)
        yield from ("--remount-ro", "/", "--chdir", WORK, "--clearenv")
        for name, value in self._environment(job).items():
            yield from ("--setenv", name, value)

    def _system(self, inside_id: int, pass_fds: list[int], stack: ExitStack) -> Iterator[str]:
        yield from ("--ro-bind", "/usr", "/usr")
        for name in _LINKS:
            place = Path("/", name)
            if place.is_symlink():
                yield from ("--symlink", str(place.readlink()), str(place))
            elif place.is_dir():
                yield from ("--ro-bind", str(place), str(place))
        yield from ("--perms", "0755", "--dir", "/etc")
        for name in _ETC:
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
        users = {
            "passwd": f"root:x:0:0:::/bin/false\nagent:x:{inside_id}:{inside_id}::{WORK}:/bin/bash\n",
            "group": f"root:x:0:\nagent:x:{inside_id}:\n",
        }
        for name, text in users.items():
            pass_fds.append(data_to_fd(text.encode(), stack))
            yield from ("--perms", "0644", "--file", str(pass_fds[-1]), f"/etc/{name}")

    def _python(self, packages: Mapping[str, Path]) -> Iterator[str]:
        python = self._found.python
        yield from ("--perms", "0755", "--dir", "/opt", "--perms", "0755", "--dir", "/opt/bin")
        if python.source is not None:
            for parent in reversed(python.prefix.parents[:-1]):
                yield from ("--perms", "0755", "--dir", str(parent))
            yield from ("--ro-bind", str(python.source), str(python.prefix))
        for place in python.hidden:
            yield from ("--tmpfs", str(place), "--remount-ro", str(place))
        for name in ("python", "python3"):
            yield from ("--symlink", str(python.executable), f"/opt/bin/{name}")
        for library in python.libraries:
            yield from ("--perms", "0755", "--dir", "/opt/lib", "--symlink", str(library), f"/opt/lib/{library.name}")
        if packages:
            yield from ("--perms", "0755", "--dir", "/opt/packages")
        for name, place in packages.items():
            yield from ("--ro-bind", str(place), f"/opt/packages/{name}")

    def _work(self, job: SandboxJob, pass_fds: list[int], stack: ExitStack) -> Iterator[str]:
        if job.base is not None:
            yield from ("--overlay-src", str(job.base), "--overlay", str(job.directory), str(job.scratch), WORK)
            return
        if job.directory is not None:
            yield from ("--bind", str(job.directory), WORK)
            return
        yield from _tmpfs(WORK, job.limits.disk_bytes, "0777")
        folders = {parent for name in job.files for parent in Path(name).parents[:-1]}
        for folder in sorted(folders):
            yield from ("--perms", "0777", "--dir", f"{WORK}/{folder}")
        for name, data in job.files.items():
            pass_fds.append(data_to_fd(data, stack))
            yield from ("--perms", "0666", "--file", str(pass_fds[-1]), f"{WORK}/{name}")

    def _environment(self, job: SandboxJob) -> dict[str, str]:
        paths = {"PYTHONPATH": "/opt/packages"} if job.packages else {}
        if self._found.python.libraries:
            paths["LD_LIBRARY_PATH"] = "/opt/lib"
        return {
            "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": WORK,
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
            **paths,
        }

    def _limited(self, job: SandboxJob, user_id: int) -> Iterator[str]:
        if self._found.is_root and job.base is not None:
            limits = replace(job.limits, processes=_SHARED_BY * job.limits.processes)
            job = replace(job, limits=limits)
        yield from limit_command(self._found.prlimit, job)
        if self._found.is_root:
            yield from drop_command(self._found.setpriv, user_id)


def limit_command(prlimit: str, job: SandboxJob) -> list[str]:
    """The `prlimit` command up to its program. The soft CPU limit comes first, so that its signal tells the reason."""
    limits = job.limits
    return [
        prlimit,
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        f"--nproc={limits.processes}",
        "--nofile=256",
        "--core=0",
        "--",
    ]


def drop_command(setpriv: str, user_id: int) -> list[str]:
    """The `setpriv` command up to its program: the program is not root and keeps none of root's rights."""
    identity = [f"--reuid={user_id}", f"--regid={user_id}", "--clear-groups"]
    return [setpriv, *identity, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]


def _show(places: Mapping[str, Path]) -> Iterator[str]:
    for folder in sorted({parent for inside in places for parent in Path(inside).parents[:-1]}):
        yield from ("--perms", "0755", "--dir", str(folder))
    for inside, place in places.items():
        yield from ("--ro-bind", str(place), inside)


def _tmpfs(place: str, num_bytes: int, perms: str) -> tuple[str, ...]:
    return ("--perms", perms, "--size", str(num_bytes), "--tmpfs", place)
