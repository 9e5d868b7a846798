"""A preparation: the files that it reads, with their checksums, and the folder that it writes, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from turnwise.envs.rows import Row, read_rows
from turnwise.errors import ConfigError
from turnwise.runtime.checksum import sha256_of

MANIFEST = "manifest.json"
_PART = re.compile(r"-\d+-of-\d+")


class Preparation:
    """Reads below `source` and writes below `target`, and remembers both for the manifest."""

    def __init__(self, name: str, source: Path, target: Path) -> None:
        self.name = name
        self.source = source
        self.target = target
        self.dropped: dict[str, int] = {}
        """Rows that were left out, by reason."""
        self._sources: dict[str, str] = {}
        self._rows: dict[str, int] = {}

    def find(self, *patterns: str, what: str) -> Path:
        """The file that matches the first pattern that one matches. Several files are refused: which one is meant?"""
        files = self._find_all(*patterns, what=what)
        if len(files) > 1:
            names = ", ".join(path.relative_to(self.source).as_posix() for path in files[:4])
            raise ConfigError(
                f"{self.name}: {len(files)} files could be its {what}: {names}; leave one in {self.source}"
            )
        return self.note(files[0])

    def _find_all(self, *patterns: str, what: str) -> list[Path]:
        for pattern in patterns:
            found = sorted(path for path in self.source.glob(pattern) if path.is_file())
            if found:
                return found
        raise ConfigError(f"{self.name}: no {what} in {self.source}; expected {' or '.join(patterns)}")

    def note(self, path: Path) -> Path:
        """Remember a file that is read."""
        self._sources[path.relative_to(self.source).as_posix()] = sha256_of(path)
        return path

    def rows(self, *patterns: str, what: str) -> tuple[Path, list[Row]]:
        """The rows of a file, or of all parts of it: the hub cuts large ones into `train-00000-of-00002.parquet`."""
        files = self._find_all(*patterns, what=what)
        if len(files) > 1 and len({(path.parent, _PART.sub("", path.name)) for path in files}) == 1:
            return files[0], [row for path in files for row in read_rows(self.note(path))]
        path = self.find(*patterns, what=what)
        return path, read_rows(path)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write JSON lines."""
        lines = [json.dumps(dict(row), ensure_ascii=False) for row in rows]
        if not lines:
            raise ConfigError(f"{self.name}: nothing is left for {name}; every row was dropped: {self.dropped}")
        place = self._place(name)
        place.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._rows[name] = len(lines)

    def write_list(self, name: str, rows: list[Row]) -> None:
        """Write one JSON list, as Spider and BIRD do."""
        self._place(name).write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
        self._rows[name] = len(rows)

    def link(self, path: Path, name: str) -> None:
        """Bring a file into the folder: the same file under a second name if the disk allows it, else a copy."""
        self.note(path)
        place = self._place(name)
        try:
            os.link(path, place)
        except OSError:
            shutil.copy2(path, place)

    def new_file(self, name: str, num_rows: int) -> Path:
        """A file that the caller writes."""
        self._rows[name] = num_rows
        return self._place(name)

    def write_manifest(self) -> dict[str, Any]:
        written = sorted(path for path in self.target.rglob("*") if path.is_file())
        manifest: dict[str, Any] = {
            "name": self.name,
            "sources": dict(sorted(self._sources.items())),
            "rows": self._rows,
            "dropped": self.dropped,
            "files": {path.relative_to(self.target).as_posix(): sha256_of(path) for path in written},
        }
        (self.target / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        return manifest

    def _place(self, name: str) -> Path:
        place = self.target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


@contextmanager
def whole_folder(target: Path, name: str) -> Generator[Path]:
    """A new folder that takes the place of `target` at the end. Only a folder of the same data set is replaced."""
    if target.is_file():
        raise ConfigError(f"--to {target} is a file; name a folder")
    if target.exists() and any(target.iterdir()) and _read_manifest(target).get("name") != name:
        raise ConfigError(f"{target} holds something else; name an empty folder with --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield fresh
        fresh.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        fresh.replace(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_folder(folder: Path) -> list[str]:
    """What is wrong with a prepared folder: files that are missing or changed. Empty if nothing is."""
    manifest = _read_manifest(folder)
    if "files" not in manifest:
        raise ConfigError(f"{folder} has no {MANIFEST}; expected a folder that `turnwise data prepare` wrote")
    problems: list[str] = []
    for name, expected in cast(dict[str, str], manifest["files"]).items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif sha256_of(path) != expected:
            problems.append(f"{name} was changed")
    return problems


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
