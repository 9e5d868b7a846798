"""Applies unified diffs, as `git diff` writes them, to files in memory. Parsing is strict; hunks may have moved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnwise.errors import DataError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NOWHERE = "/dev/null"


@dataclass(slots=True)
class _Hunk:
    start: int
    """Line number in the old file, from 1."""
    old: list[str] = field(default_factory=list[str])
    new: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _FilePatch:
    old_path: str
    new_path: str
    hunks: list[_Hunk] = field(default_factory=list[_Hunk])


def apply_patch(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """Return the files after the patch. `DataError` if a hunk does not fit."""
    changed = dict(files)
    for file_patch in _parse(patch):
        lines = [] if file_patch.old_path == _NOWHERE else _lines(changed, file_patch.old_path)
        offset = 0
        for hunk in file_patch.hunks:
            place = _find(lines, hunk, offset)
            if place is None:
                raise DataError(f"a hunk at line {hunk.start} of {file_patch.old_path} does not fit the file")
            lines[place : place + len(hunk.old)] = hunk.new
            offset = place + len(hunk.new) - (hunk.start - 1) - len(hunk.old)
        if file_patch.old_path not in (_NOWHERE, file_patch.new_path):
            changed.pop(file_patch.old_path, None)
        if file_patch.new_path != _NOWHERE:
            changed[file_patch.new_path] = "\n".join(lines).encode("utf-8", "surrogateescape")
    return changed


def patched_paths(patch: str) -> list[str]:
    """The paths of the files that a patch adds or changes."""
    return [each.new_path for each in _parse(patch) if each.new_path != _NOWHERE]


def _lines(files: Mapping[str, bytes], path: str) -> list[str]:
    if path not in files:
        raise DataError(f"the patch changes {path}, which is not in the repo")
    return files[path].decode("utf-8", "surrogateescape").split("\n")


def _parse(patch: str) -> list[_FilePatch]:
    """Parse a patch. Hunks give their length, so a removed line that looks like a header is not taken for one."""
    found: list[_FilePatch] = []
    old_path, num_old, num_new = "", 0, 0
    for line in patch.split("\n"):
        if num_old > 0 or num_new > 0:
            hunk = found[-1].hunks[-1]
            if line.startswith(("-", " ")) or not line:
                hunk.old.append(line[1:])
                num_old -= 1
            if line.startswith(("+", " ")) or not line:
                hunk.new.append(line[1:])
                num_new -= 1
        elif line.startswith("--- "):
            old_path = _path(line)
        elif line.startswith("+++ "):
            found.append(_FilePatch(old_path, _path(line)))
        elif (start := _HUNK.match(line)) and found:
            found[-1].hunks.append(_Hunk(max(1, int(start[1]))))
            num_old, num_new = int(start[2] or 1), int(start[3] or 1)
    return found


def _path(line: str) -> str:
    """Turn `--- a/dir/file.py<tab>time` into `dir/file.py`."""
    path = line[4:].split("\t", maxsplit=1)[0].strip().strip('"')
    return path if path == _NOWHERE else re.sub(r"^[abciw]/", "", path)


def _find(lines: list[str], hunk: _Hunk, offset: int) -> int | None:
    """Find the hunk's old lines at its line number, or as near to it as possible."""
    expected = hunk.start - 1 + offset
    size = len(hunk.old)
    if not size:
        return min(max(expected, 0), len(lines))
    places = [place for place in range(len(lines) - size + 1) if lines[place : place + size] == hunk.old]
    return min(places, key=lambda place: abs(place - expected)) if places else None
