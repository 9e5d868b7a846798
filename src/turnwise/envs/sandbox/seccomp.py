"""The filter on system calls: a program in the sandbox makes no namespaces, no mounts, and finds no rare doors.

A user namespace inside the sandbox would give a program rights over namespaces of its own, and with them reach parts
of the kernel that it has no use for. So calls that make or enter namespaces, mount, load code into the kernel, or use
keys fail as they do for somebody without rights. `fallocate` fails too, because it takes disk space faster than anyone
can watch. Everything else is allowed. The filter is a program of the kernel's packet-filter machine.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_OTHER_ABI = 0x40000000
"""Numbers from here on belong to x86's 32-bit pointer interface, which nobody uses."""
_NAMESPACES = 0x7E020000
"""The flags of all namespaces: mount, cgroup, uts, ipc, user, pid, net."""

_COMMON = {
    **{name: 428 + place for place, name in enumerate(("open_tree", "move_mount", "fsopen", "fsconfig", "fsmount"))},
    "io_uring_setup": 425,
    "fspick": 433,
    "clone3": 435,
    "mount_setattr": 442,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    audit_number: int
    calls: Mapping[str, int]


_MACHINES = {
    "x86_64": _Machine(
        audit_number=0xC000003E,
        calls={
            **_COMMON,
            "clone": 56,
            "pivot_root": 155,
            "mount": 165,
            "umount2": 166,
            "init_module": 175,
            "delete_module": 176,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "unshare": 272,
            "fallocate": 285,
            "perf_event_open": 298,
            "open_by_handle_at": 304,
            "setns": 308,
            "finit_module": 313,
            "kexec_file_load": 320,
            "bpf": 321,
            "userfaultfd": 323,
        },
    ),
    "aarch64": _Machine(
        audit_number=0xC00000B7,
        calls={
            **_COMMON,
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "fallocate": 47,
            "unshare": 97,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "clone": 220,
            "perf_event_open": 241,
            "open_by_handle_at": 265,
            "setns": 268,
            "finit_module": 273,
            "bpf": 280,
            "userfaultfd": 282,
            "kexec_file_load": 294,
        },
    ),
}
_BY_FLAGS = ("clone", "unshare")
_ERRORS = {"clone3": errno.ENOSYS, "fallocate": errno.EOPNOTSUPP}
"""libc then does the same another way: with clone, whose flags can be read, and by writing zeros."""


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for this kind of machine. None if we have none, or the kernel takes no filters."""
    found = _MACHINES.get(machine or platform.machine())
    if found is None or (machine is None and not _kernel_takes_filters()):
        return None
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, found.audit_number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for name, number in found.calls.items():
        if name not in _BY_FLAGS:
            lines += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | _ERRORS.get(name, errno.EPERM))]
    lines += [
        (_IF_EQUAL, 2, 0, found.calls["clone"]),
        (_IF_EQUAL, 1, 0, found.calls["unshare"]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_IF_ANY_BIT, 0, 1, _NAMESPACES),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _kernel_takes_filters() -> bool:
    try:
        return "errno" in Path("/proc/sys/kernel/seccomp/actions_avail").read_text(encoding="ascii").split()
    except OSError:
        return False
