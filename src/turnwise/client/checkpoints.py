"""The one home of checkpoints: where their files are, how they are written, found, checked and removed.

`tinker://<model_id>/<kind>/<name>` is `<data_dir>/checkpoints/<model_id>/<kind>/<name>`, with ':' in an id written as
'-'. A checkpoint is a directory of PEFT files, or of a whole Hugging Face model where all weights are trained, with
optimizer state in it when its kind is `weights`. Its `checkpoint.json` says which base model it belongs to and what
each file must hash to. Directories without that file, such as adapters that PEFT wrote, load by path.

A directory appears under its name complete or not at all: it is filled beside its place, synced and renamed. The
in-process client, the service and training runs all keep their checkpoints here. The service adds who may see them
(rows in its database), a run adds which ones it keeps (rows in its log).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast, get_args

from turnwise.errors import CheckpointError, ConfigError
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.runtime.checksum import sha256_of
from turnwise.runtime.suggest import nearest_names
from turnwise.types import LoraConfig

Kind = Literal["weights", "sampler_weights", "external_weights"]
"""`weights` is for further training, `sampler_weights` for sampling, `external_weights` for download."""

SCHEMES = ("tinker://", "mint://", "turnwise://")
INFO_FILE = "checkpoint.json"
CHECKSUMS_FILE = "checksums.json"
"""Holds the checksums of a directory that has no `checkpoint.json`."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MODEL_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]{0,199}")
_NUM_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What `checkpoint.json` says."""

    base_model: str
    """The name that the user gave the base model."""
    stored_model: str
    """The model that this name stood for; it differs from `base_model` if that is an alias."""
    model_directory: str
    lora: LoraConfig | None
    """The adapter's shape; None if the checkpoint holds all weights."""
    has_optimizer: bool
    created_at: str
    expires_at: str | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of each file, by file name; empty in checkpoints of early versions."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> CheckpointInfo:
        values: dict[str, Any] = json.loads(text)
        lora = values.pop("lora")
        return cls(lora=None if lora is None else LoraConfig(**lora), **values)

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The place of a checkpoint: whose it is, its kind and its name."""

    model_id: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"checkpoint name {self.name!r}; expected up to 200 letters, digits, '.', '_' and '-', not '.' first"
            )

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Read `tinker://<model_id>/<kind>/<name>`."""
        scheme = next((scheme for scheme in SCHEMES if path.startswith(scheme)), None)
        parts = path.removeprefix(scheme or "").split("/")
        is_path = len(parts) == 3 and parts[1] in KINDS and _MODEL_ID.fullmatch(parts[0]) and _NAME.fullmatch(parts[2])
        if scheme is None or not is_path:
            expected = f"{scheme or SCHEMES[0]}<model_id>/{'|'.join(KINDS)}/<name>"
            raise CheckpointError(f"{path[:200]} is no checkpoint path; expected {expected}")
        return cls(parts[0], cast("Kind", parts[1]), parts[2])

    @property
    def uri(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that exists on disk."""

    path: str
    """The path as the user wrote it."""
    directory: Path
    info: CheckpointInfo | None
    """None for a plain PEFT directory."""


def new_model_id() -> str:
    """Make a directory name that no other process makes; names sort by their time of creation."""
    return f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:12]}"


def expiry(ttl_seconds: int | None) -> str | None:
    """Return the time at which a checkpoint that is saved now expires."""
    if ttl_seconds is None:
        return None
    if ttl_seconds <= 0:
        raise ConfigError(f"ttl_seconds={ttl_seconds}; expected a positive number, or None to keep the checkpoint")
    return (datetime.now(UTC) + timedelta(seconds=ttl_seconds)).isoformat()


class CheckpointStore:
    """The checkpoints of one data directory; several processes may share it."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir / "checkpoints"

    def save(self, path: CheckpointPath, info: CheckpointInfo, fill: Callable[[Path], None], *, overwrite: bool) -> str:
        """Let `fill` write a checkpoint's files, move them into place, and return the `tinker://` path."""
        place = self._place(path)
        if place.exists() and not overwrite:
            raise CheckpointError(f"{path.uri} exists; choose another name")

        def seal(staged: Path) -> None:
            text = replace(info, checksums=checksums_of(staged)).to_json()
            (staged / INFO_FILE).write_text(text, encoding="utf-8")

        write_directory(place, fill, seal)
        return path.uri

    def directory(self, path: str) -> Path:
        """Return the directory of a checkpoint, whether or not it exists; `path` is a `tinker://` path or a
        directory."""
        if path.startswith(SCHEMES):
            return self._place(CheckpointPath.parse(path))
        if "://" in path:
            raise CheckpointError(f"{path}: unknown scheme; expected {', '.join(SCHEMES)} or a directory")
        return Path(path).expanduser().resolve()

    def has(self, path: str) -> bool:
        """Whether a checkpoint's files are in this store."""
        return self.directory(path).is_dir()

    def find(self, path: str) -> Checkpoint:
        """Find the checkpoint at a `tinker://` path or in a plain directory, and check that its files are complete."""
        directory = self.directory(path)
        if not directory.is_dir():
            raise CheckpointError(f"no checkpoint {path}; {self._suggestions(path)}")
        info = read_info(directory)
        if info is not None:
            if info.is_expired(datetime.now(UTC)):
                raise CheckpointError(f"{path} expired at {info.expires_at}; {self._suggestions(path)}")
            verify(directory)
        elif not (directory / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"{directory} holds neither {INFO_FILE} nor {ADAPTER_CONFIG}: not a checkpoint")
        return Checkpoint(path, directory, info)

    def delete(self, path: str) -> None:
        """Delete a checkpoint; do nothing if it does not exist."""
        remove_directory(self._place(CheckpointPath.parse(path)))

    def remove_expired(self) -> None:
        """Delete the checkpoints whose `ttl_seconds` have passed."""
        for directory in self._directories():
            try:
                info = read_info(directory)
            except (FileNotFoundError, CheckpointError):
                continue  # another process deleted it first, or `find` will report the problem
            if info is not None and info.is_expired(datetime.now(UTC)):
                remove_directory(directory)

    def keep_only(self, paths: Iterable[str], kinds: Iterable[Kind] = KINDS) -> None:
        """Delete every other checkpoint of these kinds, and the unfinished files of a process that died.

        If an overwrite set the old version aside and never wrote the new one, the old version is restored.
        """
        paths, kinds = list(paths), set(kinds)
        for aside in self._root.glob("*/*/.*.replaced"):
            place = aside.with_name(aside.name[1:].rsplit(".", 2)[0])  # `.<name>.<8 hex>.replaced`
            if not place.exists():
                aside.rename(place)
        known = {self.directory(path) for path in paths}
        for directory in self._root.glob("*/*/*"):
            if directory not in known and directory.parent.name in kinds:
                remove_directory(directory)
        for model in self._root.glob("*"):
            if not any(model.glob("*/*")):
                shutil.rmtree(model, ignore_errors=True)

    def _place(self, path: CheckpointPath) -> Path:
        return self._root / directory_name(path.model_id) / path.kind / path.name

    def _directories(self) -> list[Path]:
        return [place for kind in KINDS for place in self._root.glob(f"*/{kind}/*") if place.name[0] != "."]

    def _suggestions(self, path: str) -> str:
        newest_first = sorted(self._directories(), key=lambda place: place.stat().st_mtime, reverse=True)
        if not newest_first:
            return f"there are none yet in {self._root}"
        known = ["tinker://" + "/".join(place.parts[-3:]) for place in newest_first]
        nearest = nearest_names(path, known, count=_NUM_SUGGESTIONS) or known[:_NUM_SUGGESTIONS]
        return f"nearest of {len(known)} in {self._root}: {', '.join(nearest)}"


def directory_name(identity: str) -> str:
    """Write an id as a directory name."""
    return identity.replace(":", "-")


def read_info(directory: Path) -> CheckpointInfo | None:
    """Read `checkpoint.json`; None where there is none."""
    file = directory / INFO_FILE
    if not file.is_file():
        return None
    try:
        return CheckpointInfo.from_json(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError) as cause:
        raise CheckpointError(f"{file} is damaged ({cause!r}); save the checkpoint again") from cause


def write_checksums(directory: Path) -> None:
    """Write the hash of every file of a directory that has no `checkpoint.json`."""
    (directory / CHECKSUMS_FILE).write_text(json.dumps(checksums_of(directory), indent=2), encoding="utf-8")


def write_directory(place: Path, fill: Callable[[Path], None], seal: Callable[[Path], None] = write_checksums) -> None:
    """Let `fill` write a directory and move it into place, over an existing one; it appears complete or not at all."""
    staged = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}")
    staged.parent.mkdir(parents=True, exist_ok=True)
    try:
        fill(staged)
        staged.mkdir(exist_ok=True)
        seal(staged)
        for path in [*staged.iterdir(), staged]:
            _sync(path)
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


def remove_directory(directory: Path) -> None:
    """Remove a directory in such a way that nobody mistakes a half-removed one for a complete one."""
    if not directory.exists():
        return
    if not directory.name.startswith("."):
        aside = directory.with_name(f".{directory.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        directory = aside
    shutil.rmtree(directory, ignore_errors=True)


def verify(directory: Path) -> None:
    """Refuse a directory whose files have changed since they were written."""
    info = read_info(directory)
    expected: Mapping[str, str] = info.checksums if info is not None else {}
    if not expected:
        try:
            expected = cast("dict[str, str]", json.loads((directory / CHECKSUMS_FILE).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError) as cause:
            if info is None:
                raise CheckpointError(f"{directory} is damaged: its checksums are missing") from cause
    advice = f"delete {directory} to go on from the checkpoint before it"
    for name, digest in expected.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {advice}")
        if sha256_of(file) != digest:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in its checksums; {advice}")


def checksums_of(directory: Path) -> dict[str, str]:
    """Hash every file of a directory, except the two that hold checksums."""
    files = [file for file in sorted(directory.iterdir()) if file.is_file()]
    return {file.name: sha256_of(file) for file in files if file.name not in (INFO_FILE, CHECKSUMS_FILE)}


def weights_fingerprint(info: CheckpointInfo) -> str:
    """A short name of the weights of a checkpoint, without its optimizer: equal weights have equal names."""
    tensors = {name: one for name, one in info.checksums.items() if name.endswith(".safetensors")}
    weights = {name: one for name, one in tensors.items() if not name.startswith("optimizer")}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()[:16] if weights else ""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
