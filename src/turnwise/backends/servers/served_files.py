"""Files of a publication: an adapter's, or those of a whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from turnwise.errors import CheckpointError
from turnwise.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def read_rank(adapter: Path) -> int:
    """The rank of an adapter's files."""
    try:
        return int(json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise CheckpointError(f"{adapter} holds no adapter in PEFT's format: {cause!r}") from cause


def copy_files(source: Path, target: Path) -> None:
    """Copy PEFT files or a whole model, without the optimizer's state that a checkpoint holds beside them."""
    from turnwise.engine.training.full_files import export_weights, is_full

    target.mkdir()
    if is_full(source):
        export_weights(source, target)
        return
    for file in (source / ADAPTER_CONFIG, source / ADAPTER_WEIGHTS):
        shutil.copy(file, target)
