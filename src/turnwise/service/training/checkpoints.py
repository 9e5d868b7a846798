"""Checkpoints of the service: files under the data directory, rows in the store, and who may see them.

`tinker://<run>/<kind>/<name>` is `<data_dir>/checkpoints/<run>/<kind>/<name>`, with ':' in a run's id written as '-'.
A directory is filled beside its place, hashed, synced and renamed; its row is written after. So a row stands for a
whole directory, and a directory without a row is the rest of something that was cut short: it is removed at start.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from turnwise.client.checkpoints import (
    INFO_FILE,
    SCHEMES,
    CheckpointInfo,
    CheckpointPath,
    CheckpointStore,
    Kind,
    sync_to_disk,
)
from turnwise.errors import CheckpointError
from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.store.store import CheckpointRow, Store

KINDS = ("weights", "sampler_weights", "external_weights")
TYPE_OF = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
CHECKSUMS = "checksums.json"

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]{0,199}")


def flat(identity: str) -> str:
    """An id as a directory name."""
    return identity.replace(":", "-")


def parse_path(path: str) -> tuple[str, str, str]:
    """`tinker://run/kind/name` in parts."""
    scheme = next((scheme for scheme in SCHEMES if path.startswith(scheme)), None)
    parts = path.removeprefix(scheme or "").split("/")
    if scheme is None or len(parts) != 3 or parts[1] not in KINDS or not all(_PART.fullmatch(part) for part in parts):
        raise HttpFailure(
            400, f"{path[:200]!r} is no checkpoint path; expected tinker://<run>/{'|'.join(KINDS)}/<name>"
        )
    return parts[0], parts[1], parts[2]


class Checkpoints:
    """Saves, finds and removes checkpoints."""

    def __init__(self, store: Store, data_dir: Path) -> None:
        self._store = store
        self._root = data_dir / "checkpoints"
        self._files = CheckpointStore(self._root)

    def directory(self, row: CheckpointRow) -> Path:
        return self._root / flat(row.model_id) / row.kind / row.name

    def find(self, path: str, owner: str) -> CheckpointRow:
        """What `owner` may read under that path: its own, and what others have published."""
        return self.get(*parse_path(path), owner, may_be_public=True)

    def get(self, model_id: str, kind: str, name: str, owner: str, *, may_be_public: bool = False) -> CheckpointRow:
        row = self._store.checkpoint(model_id, kind, name)
        is_there = row is not None and (row.expires_at is None or row.expires_at > time.time())
        if row is None or not is_there or not (row.owner == owner or (row.is_public and may_be_public)):
            raise not_found("checkpoint")
        return row

    def by_link(self, path: str) -> CheckpointRow:
        """What a signed link stands for: it was made for somebody who may read it."""
        row = self._store.checkpoint(*parse_path(path))
        if row is None or (row.expires_at is not None and row.expires_at <= time.time()):
            raise not_found("checkpoint")
        return row

    def check_name(self, row: CheckpointRow, *, overwrite: bool) -> None:
        """Refuse a name that cannot be used; asking again for one's own request is fine."""
        CheckpointPath(flat(row.model_id), cast(Kind, row.kind), row.name)
        there = self._store.checkpoint(row.model_id, row.kind, row.name)
        is_live = there is not None and (there.expires_at is None or there.expires_at > time.time())
        if there is not None and is_live and not overwrite and there.request_id != row.request_id:
            raise HttpFailure(400, f"{row.path} exists; choose another name, or delete it first")

    def write(self, row: CheckpointRow, model_dir: str, fill: Callable[[Path], None]) -> CheckpointRow:
        """Write the files; runs on the engine's thread. The caller records the row that comes back."""
        place = CheckpointPath(flat(row.model_id), cast(Kind, row.kind), row.name)
        info = CheckpointInfo(
            base_model=row.base_model,
            stored_model=row.base_model,
            model_directory=model_dir,
            lora=row.lora,
            has_optimizer=row.has_optimizer,
            created_at=iso(row.created_at),
            user_metadata=row.user_metadata,
        )

        def fill_and_hash(directory: Path) -> None:
            fill(directory)
            _name_base(directory / "adapter_config.json", row.base_model)
            write_checksums(directory)

        self._files.save(place, info, fill_and_hash, overwrite=True)
        size = sum(path.stat().st_size for path in self.directory(row).iterdir())
        return replace(row, size_bytes=size)

    def delete(self, row: CheckpointRow) -> None:
        self._store.delete_checkpoint(row)
        remove_directory(self.directory(row))

    def sweep(self) -> None:
        """Delete what has outlived its time."""
        for row in self._store.expired_checkpoints(time.time()):
            self.delete(row)

    def clean(self) -> None:
        """At start: put back what an overwrite had set aside, and remove what was never finished."""
        for aside in self._root.glob("*/*/.*.replaced"):
            place = aside.with_name(_original(aside.name))
            if not place.exists():
                aside.rename(place)
        known = {self.directory(row) for row in self._store.all_checkpoints()}
        for directory in self._root.glob("*/*/*"):
            if directory not in known:
                remove_directory(directory)

    def copy(self, row: CheckpointRow, target: CheckpointRow) -> CheckpointRow:
        source = self.directory(row)
        verify(source)

        def fill(directory: Path) -> None:
            shutil.copytree(source, directory, ignore=shutil.ignore_patterns(INFO_FILE, CHECKSUMS))

        return self.write(target, json.loads((source / INFO_FILE).read_text())["model_directory"], fill)


def _original(name: str) -> str:
    """`.<name>.<8 hex>.replaced` -> `<name>`, which may hold dots of its own."""
    return name[1:].rsplit(".", 2)[0]


def _name_base(config_file: Path, base_model: str) -> None:
    """Say in PEFT's file which base an adapter is for by the name that clients know, not by our directory."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config_file.write_text(json.dumps({**config, "base_model_name_or_path": base_model}, indent=2), encoding="utf-8")


def exported_files(directory: Path) -> list[Path]:
    """What leaves the machine when a checkpoint is downloaded: everything but the service's own notes."""
    return [path for path in sorted(directory.iterdir()) if path.name not in (INFO_FILE, CHECKSUMS)]


def write_checksums(directory: Path) -> None:
    """Write down what every file of a directory must hash to."""
    sums = {path.name: _sha256(path) for path in sorted(directory.iterdir()) if path.name != CHECKSUMS}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2), encoding="utf-8")


def verify(directory: Path) -> None:
    """Refuse a directory whose files are not what was written."""
    try:
        sums: dict[str, Any] = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
        for name, expected in sums.items():
            if _sha256(directory / name) != expected:
                raise CheckpointError(f"{name} of this checkpoint is damaged: its checksum is wrong")
    except (FileNotFoundError, ValueError) as cause:
        raise CheckpointError("this checkpoint is damaged: files are missing") from cause


def put_in_place(staged: Path, place: Path) -> None:
    """Hash, sync and rename a directory that is not there yet."""
    write_checksums(staged)
    sync_to_disk(staged)
    staged.rename(place)


def remove_directory(directory: Path) -> None:
    """Remove a directory so that a half-removed one cannot be taken for a whole one."""
    if directory.exists():
        aside = directory.with_name(f".{directory.name}.removed")
        if not directory.name.startswith("."):
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
            directory = aside
        shutil.rmtree(directory, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()
