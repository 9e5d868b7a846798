"""Reads and writes files in a folder where a program may have set traps, such as links that lead out or endless pipes.

Each folder of a path is opened relative to the one before it, without following links. So it does not help a program to
put a link in place between a check and a read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Mapping
from pathlib import Path, PurePosixPath

from turnwise.errors import DataError

ENTRY_BYTES = 512
"""What a file counts for being there, so that empty files have a limit too."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check_names(files: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """Check that all paths stay below the working directory, and encode text as UTF-8."""
    checked: dict[str, bytes] = {}
    for name, data in files.items():
        checked[str(relative_path(name))] = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    return checked


def relative_path(name: str, root: str = "/work") -> PurePosixPath:
    """Return the path relative to the working directory. `DataError` if it leads out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        raise DataError(f"path {name[:80]!r}; expected the path of a file in {root}")
    return path


class FileTree:
    """A folder of the host that a sandbox uses as its working directory."""

    def __init__(self, root: Path, owner: int | None = None) -> None:
        self.root = root
        self._owner = owner

    def read(self, name: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a regular file. `OSError` for anything else, links included."""
        path = relative_path(name)
        with self._folder(path.parent, is_made=False) as folder:
            return _read_regular(path.name, folder, max_bytes)

    def write(self, name: str, data: bytes) -> None:
        """Write a regular file. Replace whatever was there, and make folders as needed."""
        path = relative_path(name)
        with self._folder(path.parent, is_made=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            descriptor = os.open(path.name, _WRITE, 0o666, dir_fd=folder)
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(data)
                if self._owner is not None:
                    os.fchown(descriptor, self._owner, self._owner)
            finally:
                os.close(descriptor)

    def write_all(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self.write(name, data)

    def remove(self, name: str) -> None:
        path = relative_path(name)
        with self._folder(path.parent, is_made=False) as folder:
            os.unlink(path.name, dir_fd=folder)

    def read_all(self, *, max_bytes: int, skip_folders: frozenset[str] = frozenset()) -> dict[str, bytes]:
        """Read every regular file, by path. Skip links, pipes and devices. `DataError` beyond `max_bytes`."""
        found: dict[str, bytes] = {}
        left = max_bytes
        for folder, folders, names, descriptor in os.fwalk(self.root, follow_symlinks=False):
            folders[:] = sorted(name for name in folders if name not in skip_folders)
            for name in sorted(names):
                if not stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    continue
                with contextlib.suppress(PermissionError):
                    data = _read_regular(name, descriptor, left + 1)
                    left -= len(data)
                    if left < 0:
                        raise DataError(f"more than {max_bytes} bytes in files; remove what is not needed")
                    found[str(PurePosixPath(folder).relative_to(self.root) / name)] = data
        return found

    def num_bytes(self) -> int:
        """The size of all files on disk, empty ones with a little. Files that vanish meanwhile do not count."""
        total = 0
        with contextlib.suppress(OSError):
            for _, folders, names, descriptor in os.fwalk(self.root, follow_symlinks=False):
                total += ENTRY_BYTES * (len(folders) + len(names))
                for name in names:
                    with contextlib.suppress(OSError):
                        total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
        return total

    @contextlib.contextmanager
    def _folder(self, path: PurePosixPath, *, is_made: bool) -> Generator[int, None, None]:
        descriptor = os.open(self.root, _FOLDER)
        try:
            for part in path.parts:
                if is_made:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o777, dir_fd=descriptor)
                        if self._owner is not None:
                            os.chown(part, self._owner, self._owner, dir_fd=descriptor, follow_symlinks=False)
                inner = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


def _read_regular(name: str, folder: int, max_bytes: int) -> bytes:
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{name} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)
