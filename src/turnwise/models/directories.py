"""The directories of models on this machine. This module only looks; `store.py` makes, converts and downloads."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of the two files of an adapter."""


def home() -> Path:
    """The directory that holds all models: `$TURNWISE_HOME`, or `~/.cache/turnwise`."""
    configured = os.environ.get("TURNWISE_HOME")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "turnwise"


def models_directory() -> Path:
    """The directory of models by name."""
    return home() / "models"


def converted_directory(gguf: Path) -> Path:
    """The directory of a GGUF file's model after conversion."""
    status = gguf.stat()
    key = hashlib.sha256(f"{gguf}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:16]
    return home() / "converted" / f"{gguf.stem}-{key}"


def is_complete(directory: Path) -> bool:
    """Whether a directory holds a whole model: its config and its weights."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def find_local(name: str) -> Path | None:
    """The directory of a model by name or path, without downloading or converting; None if there is none yet."""
    path = Path(name).expanduser()
    if is_complete(path):
        return path.resolve()
    if path.suffix.lower() == ".gguf":
        return converted_directory(path.absolute()).resolve() if path.is_file() else None
    if ".." not in path.parts and is_complete(models_directory() / name):
        return (models_directory() / name).resolve()
    return _find_in_hub_cache(name)


def is_same_model(one: str, other: str) -> bool:
    """Whether two names or paths lead to the same model on this machine."""
    return one == other or (find_local(one) or one) == (find_local(other) or other)


def _find_in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True)).resolve()
    except (HFValidationError, OSError):
        return None
