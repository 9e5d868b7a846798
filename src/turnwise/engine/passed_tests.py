"""Which models passed the self-test on this machine, so that a large one is tested once and not at every load.

A record stands for one model (its config and the sizes and times of its files), one version of our code, of torch and
of transformers, one device and one dtype. A test that takes no time leaves no record and runs at every load.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
import transformers

import turnwise
from turnwise.engine.device_info import device_name
from turnwise.models.directories import home

log = logging.getLogger(__name__)

LONG_SECONDS = 0.5
"""A test that took longer is not repeated."""
TESTED_ROOMS = ("engine", "models")
"""The folders of our code that a record depends on."""


class PassedTests:
    """The record of one model, which may exist."""

    def __init__(self, model_dir: Path, device: torch.device, dtype: torch.dtype, how: str = "") -> None:
        """`how` says what else decides how the engine computes, in words."""
        self._facts = computing_facts(model_dir, device, dtype) | {"how": how}
        key = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:24]
        self.file = home() / "self_tests" / f"{key}.json"

    def has_record(self) -> bool:
        return self.file.is_file()

    def record(self, seconds: float) -> None:
        """Note that the test passed; a full or read-only disk costs only a repetition."""
        if seconds < LONG_SECONDS:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({**self._facts, "seconds": round(seconds, 3)}), encoding="utf-8")
        except OSError as cause:
            log.info("the passed self-test was not recorded: %s", cause)


def computing_facts(model_dir: Path, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """What decides how a model computes here, in names: its files, our code, libraries, device and dtype."""
    return {
        "model": model_fingerprint(model_dir),
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(device),
        "dtype": str(dtype),
    }


def model_fingerprint(directory: Path) -> str:
    """Names a model by its config and the sizes and times of its files."""
    digest = hashlib.sha256((directory / "config.json").read_bytes() if (directory / "config.json").is_file() else b"")
    for file in sorted(directory.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def code_fingerprint() -> str:
    """Names the version of our code that computes with a model."""
    digest = hashlib.sha256(turnwise.__version__.encode())
    root = Path(turnwise.__file__).parent
    for file in sorted(file for room in TESTED_ROOMS for file in (root / room).rglob("*.[pch]*") if file.is_file()):
        if file.suffix in (".py", ".c", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
