"""Checkpoints of the service: who owns them, who may see them, and what leaves the machine.

A `CheckpointStore` holds the files; this module adds a database row for each checkpoint. Files are written before the
row, so a row always has a complete directory. A directory without a row is left over from an interrupted save; it is
removed at start.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from turnwise.client.checkpoints import (
    CHECKSUMS_FILE,
    INFO_FILE,
    CheckpointInfo,
    CheckpointPath,
    CheckpointStore,
    read_info,
    verify,
)
from turnwise.errors import CheckpointError
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.store.store import OwnedCheckpointRow, Store, iso

TYPE_OF = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
CHUNK = 1 << 20
OWN_NOTES = (INFO_FILE, CHECKSUMS_FILE)
"""Files that are not copied or downloaded with a checkpoint."""


class OwnedCheckpoints:
    """Saves, finds and removes checkpoints for their owners."""

    def __init__(self, store: Store, data_dir: Path) -> None:
        self._store = store
        self._files = CheckpointStore(data_dir)

    def directory(self, row: OwnedCheckpointRow) -> Path:
        return self._files.directory(row.path)

    def find(self, path: str, owner: str) -> OwnedCheckpointRow:
        """Find a checkpoint that `owner` may read: its own, or one that somebody published."""
        asked = _parse(path)
        return self.get(asked.model_id, asked.kind, asked.name, owner, may_be_public=True)

    def get(
        self, model_id: str, kind: str, name: str, owner: str, *, may_be_public: bool = False
    ) -> OwnedCheckpointRow:
        row = self._live_row(model_id, kind, name)
        if row is None or not (row.owner == owner or (row.is_public and may_be_public)):
            raise not_found("checkpoint")
        return row

    def by_link(self, path: str) -> OwnedCheckpointRow:
        """Find the checkpoint of a signed link; everybody who has the link may read it."""
        asked = _parse(path)
        row = self._live_row(asked.model_id, asked.kind, asked.name)
        if row is None:
            raise not_found("checkpoint")
        return row

    def check_name(self, row: OwnedCheckpointRow, *, overwrite: bool) -> None:
        """Refuse a name that is in use, except by the same request."""
        CheckpointPath(row.model_id, row.kind, row.name)
        there = self._live_row(row.model_id, row.kind, row.name)
        if there is not None and not overwrite and there.request_id != row.request_id:
            raise HttpFailure(400, f"{row.path} exists; choose another name, or delete it first")

    def write(self, row: OwnedCheckpointRow, model_dir: str, fill: Callable[[Path], None]) -> OwnedCheckpointRow:
        """Write the files, on the engine's thread. The caller stores the returned row."""
        info = CheckpointInfo(
            base_model=row.base_model,
            stored_model=row.base_model,
            model_directory=model_dir,
            lora=row.lora,
            has_optimizer=row.has_optimizer,
            created_at=iso(row.created_at),
            user_metadata=row.user_metadata,
        )

        def fill_for_clients(directory: Path) -> None:
            fill(directory)
            # Clients know the base model by its name; PEFT's file would tell them our directory.
            file = directory / ADAPTER_CONFIG
            config = {**json.loads(file.read_text(encoding="utf-8")), "base_model_name_or_path": row.base_model}
            file.write_text(json.dumps(config, indent=2), encoding="utf-8")

        self._files.save(CheckpointPath(row.model_id, row.kind, row.name), info, fill_for_clients, overwrite=True)
        size = sum(path.stat().st_size for path in self.directory(row).iterdir())
        return replace(row, size_bytes=size)

    def copy(self, row: OwnedCheckpointRow, target: OwnedCheckpointRow) -> OwnedCheckpointRow:
        """Copy the files to another place. The caller stores the returned row."""
        source = self.directory(row)
        verify(source)
        info = read_info(source)
        assert info is not None, "the service writes it into every checkpoint"

        def fill(directory: Path) -> None:
            shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*OWN_NOTES))

        return self.write(target, info.model_directory, fill)

    def delete(self, row: OwnedCheckpointRow) -> None:
        self._store.delete_checkpoint(row)
        self._files.delete(row.path)

    def sweep(self) -> None:
        """Delete expired checkpoints."""
        for row in self._store.expired_checkpoints(time.time()):
            self.delete(row)

    def clean(self) -> None:
        """At start: put back what an overwrite had set aside, and remove what was never finished."""
        self._files.keep_only(row.path for row in self._store.all_checkpoints())

    def _live_row(self, model_id: str, kind: str, name: str) -> OwnedCheckpointRow | None:
        row = self._store.checkpoint(model_id, kind, name)
        is_live = row is not None and (row.expires_at is None or row.expires_at > time.time())
        return row if is_live else None


def _parse(path: str) -> CheckpointPath:
    try:
        return CheckpointPath.parse(path)
    except CheckpointError as error:
        raise HttpFailure(400, str(error)) from error


def exported_files(directory: Path) -> list[Path]:
    """Return what leaves the machine when a checkpoint is downloaded: everything but the service's own notes."""
    return [path for path in sorted(directory.iterdir()) if path.name not in OWN_NOTES]


def stream_tar(directory: Path) -> Iterator[bytes]:
    """Stream a checkpoint's files as a tar, without a copy on disk; uncompressed, because weights do not shrink."""
    for path in exported_files(directory):
        info = tarfile.TarInfo(path.name)
        info.size = path.stat().st_size
        info.mtime = int(path.stat().st_mtime)
        yield info.tobuf(tarfile.PAX_FORMAT)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
        yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
    yield b"\0" * tarfile.BLOCKSIZE * 2
