"""Where models lie on this machine. Looks only: `model_store` makes, converts and downloads."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def home() -> Path:
    """Where models are kept: `$TURNWISE_HOME`, or `~/.cache/turnwise`."""
    configured = os.environ.get("TURNWISE_HOME")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "turnwise"


def models_directory() -> Path:
    return home() / "models"


def converted_directory(gguf: Path) -> Path:
    """Where the model of a GGUF file is kept once it was converted."""
    status = gguf.stat()
    key = hashlib.sha256(f"{gguf}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:16]
    return home() / "converted" / f"{gguf.stem}-{key}"


def is_complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def find_local(name: str) -> Path | None:
    """The directory that a model's name or path leads to without any work; None where there is none yet."""
    path = Path(name).expanduser()
    if is_complete(path):
        return path.resolve()
    if path.suffix.lower() == ".gguf":
        return converted_directory(path.absolute()).resolve() if path.is_file() else None
    if ".." not in path.parts and is_complete(models_directory() / name):
        return (models_directory() / name).resolve()
    return _find_in_hub_cache(name)


def _find_in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True)).resolve()
    except (HFValidationError, OSError):
        return None
