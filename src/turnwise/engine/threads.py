"""How many threads an engine on the CPU uses, and why. Imports without torch, so that a plan can say it.

torch starts one thread for each core that the process may run on and ignores a cgroup's quota. In a container with a
quota of two CPUs on a machine with 64, torch would run 64 threads. The kernel would stop them for most of each period,
and every barrier would wait for the stopped ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

USERS_CHOICES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Environment variables; the first one that is set decides, as in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """The processor cores that a process may use."""

    num_online: int
    """Logical CPUs of the machine."""
    num_allowed: int
    """Logical CPUs that this process may run on, by its affinity."""
    num_physical: int
    """The cores that the allowed CPUs belong to; two hyperthreads share one."""
    quota: float | None = None
    """CPU time per second that its cgroups allow, in CPUs; None means no limit."""

    def line(self) -> str:
        shared = f" (on {self.num_physical} cores)" if self.num_physical < self.num_allowed else ""
        quota = "no cgroup quota" if self.quota is None else f"a cgroup quota of {self.quota:g}"
        return f"{self.num_allowed} of {self.num_online} CPUs allowed by affinity{shared}, {quota}"


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads and the reason for it."""

    count: int
    why: str


def choose_threads(cores: Cores, environment: Mapping[str, str]) -> Threads:
    """One thread for each core that affinity and quota allow; the user may ask for fewer, or for all cores."""
    for name in USERS_CHOICES:
        wanted = environment.get(name, "").partition(",")[0].strip()  # in OMP_NUM_THREADS=4,2 the 2 is for nested teams
        if wanted.isdigit() and int(wanted) > 0:
            return Threads(min(int(wanted), cores.num_physical), f"{name}={wanted} ({cores.line()})")
    # Round up: with a quota of 1.5, two threads use 1.5 CPUs and one thread only 1.
    paid = cores.num_physical if cores.quota is None else math.ceil(cores.quota)
    return Threads(max(1, min(cores.num_physical, paid)), cores.line())


def find_threads() -> Threads:
    """The number of threads for this process."""
    return choose_threads(find_cores(), os.environ)


def use_allowed_threads() -> None:
    """Limit torch to the threads of `find_threads`; keep a smaller number, because somebody asked for it."""
    import torch

    count = find_threads().count
    if torch.get_num_threads() > count:
        torch.set_num_threads(count)


def find_cores(root: Path = Path("/")) -> Cores:
    """What the kernel says; `root` is where /proc and /sys are."""
    num_online = os.cpu_count() or 1
    # Only Linux has affinity; elsewhere every CPU is allowed.
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(num_online)
    cores = {_core_of(root, cpu) for cpu in allowed}
    return Cores(
        num_online=num_online,
        num_allowed=len(allowed),
        num_physical=len(cores),
        quota=min(_quotas(root), default=None),
    )


def _core_of(root: Path, cpu: int) -> str:
    """A name that the hyperthreads of one core share."""
    siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings or f"cpu {cpu}"


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in CPUs, of the process's cgroups and their parents; for cgroup versions 1 and 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        mounts = ("",) if not controllers else ("cpu", "cpu,cpuacct") if "cpu" in controllers.split(",") else ()
        # In a container the path may be the host's and not exist; the mount itself is then the container's cgroup.
        path = Path(group.lstrip("/"))
        for mount in mounts:
            for folder in {root / "sys/fs/cgroup" / mount / one for one in (path, *path.parents)}:
                yield from _quota_of(folder)


def _quota_of(folder: Path) -> Iterator[float]:
    newer = (_read(folder / "cpu.max") or "").split()
    older = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    for quota, period in (newer or ["max", "0"], older):
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # "max" and -1: no limit
            yield int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
