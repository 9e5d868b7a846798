"""Checkpoints on disk: `tinker://<model_id>/<kind>/<name>` is `<data_dir>/checkpoints/<model_id>/<kind>/<name>`.

A checkpoint is a directory of PEFT files, with optimizer state in it when its kind is `weights`, and a
`checkpoint.json` that says which base model it belongs to. It appears under its name complete or not at all: it is
filled beside its place and renamed. Directories without that file, such as adapters that PEFT wrote, load by path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import CheckpointError, ConfigError
from turnwise.runtime.suggest import nearest_names
from turnwise.types import LoraConfig

Kind = Literal["weights", "sampler_weights"]

SCHEMES = ("tinker://", "mint://", "turnwise://")
INFO_FILE = "checkpoint.json"
_KINDS = ("weights", "sampler_weights")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_NUM_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What `checkpoint.json` says."""

    base_model: str
    """The base model as its user named it."""
    stored_model: str
    """What that name stood for; differs from `base_model` when that is an alias."""
    model_directory: str
    lora: LoraConfig
    has_optimizer: bool
    created_at: str
    expires_at: str | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of each file, by name; empty where nobody wrote them down."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> CheckpointInfo:
        values: dict[str, Any] = json.loads(text)
        lora = LoraConfig(**values.pop("lora"))
        return cls(lora=lora, **values)

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Where a checkpoint belongs."""

    model_id: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"checkpoint name {self.name!r}; expected up to 200 letters, digits, '.', '_' and '-', not '.' first"
            )

    @property
    def uri(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found."""

    path: str
    """As its user wrote it."""
    directory: Path
    info: CheckpointInfo | None
    """None for a plain PEFT directory."""


def new_model_id() -> str:
    """A directory name that no other process comes up with, in the order of creation."""
    return f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:12]}"


def expiry(ttl_seconds: int | None) -> str | None:
    """When a checkpoint saved now with that time to live is deleted."""
    if ttl_seconds is None:
        return None
    if ttl_seconds <= 0:
        raise ConfigError(f"ttl_seconds={ttl_seconds}; expected a positive number, or None to keep the checkpoint")
    return (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


class CheckpointStore:
    """The checkpoints of one data directory; several processes may share it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, path: CheckpointPath, info: CheckpointInfo, fill: Callable[[Path], None], *, overwrite: bool) -> str:
        """Let `fill` write a checkpoint's files, put it in its place, and return its `tinker://` path."""
        place = self._root / path.model_id / path.kind / path.name
        if place.exists() and not overwrite:
            raise CheckpointError(f"{path.uri} exists; choose another name")
        staged = place.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        staged.parent.mkdir(parents=True, exist_ok=True)
        try:
            fill(staged)
            staged.mkdir(exist_ok=True)
            info = replace(info, checksums=_checksums(staged))
            (staged / INFO_FILE).write_text(info.to_json(), encoding="utf-8")
            sync_to_disk(staged)
            if place.exists():
                replaced = staged.with_name(f"{staged.name}.replaced")
                place.rename(replaced)
                staged.rename(place)
                shutil.rmtree(replaced)
            else:
                staged.rename(place)
            _sync(place.parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return path.uri

    def find(self, path: str) -> Checkpoint:
        """The checkpoint at a `tinker://` path or in a plain directory."""
        directory = self._directory(path)
        if not directory.is_dir():
            raise CheckpointError(f"no checkpoint {path}; {self._suggestions(path)}")
        if (directory / INFO_FILE).is_file():
            info = _read_info(directory)
            if info.is_expired(datetime.now(UTC)):
                raise CheckpointError(f"{path} expired at {info.expires_at}; {self._suggestions(path)}")
            _check_files(directory, info)
            return Checkpoint(path, directory, info)
        if not (directory / "adapter_config.json").is_file():
            raise CheckpointError(f"{directory} holds neither {INFO_FILE} nor adapter_config.json: not a checkpoint")
        return Checkpoint(path, directory, None)

    def remove_expired(self) -> None:
        """Delete what has outlived its `ttl_seconds`."""
        for info_file in self._root.glob(f"*/*/*/{INFO_FILE}"):
            try:
                is_expired = _read_info(info_file.parent).is_expired(datetime.now(UTC))
            except (FileNotFoundError, CheckpointError):
                continue  # another process was quicker, or `find` will complain about it
            if is_expired:
                shutil.rmtree(info_file.parent, ignore_errors=True)

    def _directory(self, path: str) -> Path:
        scheme = next((scheme for scheme in SCHEMES if path.startswith(scheme)), None)
        if scheme is None:
            if "://" in path:
                raise CheckpointError(f"{path}: unknown scheme; expected {', '.join(SCHEMES)} or a directory")
            return Path(path).expanduser().resolve()
        parts = path.removeprefix(scheme).split("/")
        if len(parts) != 3 or parts[1] not in _KINDS or not all(_NAME.fullmatch(part) for part in parts):
            raise CheckpointError(
                f"{path} is no checkpoint path; expected {scheme}<model_id>/{'|'.join(_KINDS)}/<name>"
            )
        return self._root.joinpath(*parts)

    def _suggestions(self, path: str) -> str:
        places = [place for kind in _KINDS for place in self._root.glob(f"*/{kind}/*") if place.name[0] != "."]
        if not places:
            return f"there are none yet in {self._root}"
        newest_first = sorted(places, key=lambda place: place.stat().st_mtime, reverse=True)
        known = ["tinker://" + "/".join(place.parts[-3:]) for place in newest_first]
        nearest = nearest_names(path, known, count=_NUM_SUGGESTIONS) or known[:_NUM_SUGGESTIONS]
        return f"nearest of {len(known)} in {self._root}: {', '.join(nearest)}"


def _checksums(directory: Path) -> dict[str, str]:
    return {file.name: _checksum(file) for file in sorted(directory.iterdir()) if file.is_file()}


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_files(directory: Path, info: CheckpointInfo) -> None:
    """Refuse files that are not those that were written."""
    for name, expected in info.checksums.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; delete {directory} to go on from the checkpoint before it")
        if _checksum(file) != expected:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is not the one in {INFO_FILE}; delete {directory} to go on from the "
                "checkpoint before it"
            )


def sync_to_disk(directory: Path) -> None:
    """Wait until the files of a directory, and their names, are on the disk."""
    for path in [*directory.iterdir(), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_info(directory: Path) -> CheckpointInfo:
    text = (directory / INFO_FILE).read_text(encoding="utf-8")
    try:
        return CheckpointInfo.from_json(text)
    except (ValueError, TypeError, KeyError) as cause:
        raise CheckpointError(f"{directory / INFO_FILE} is damaged ({cause!r}); save the checkpoint again") from cause
