"""What a backend is given, as a run gives it."""

from __future__ import annotations

from pathlib import Path

from turnwise.backends import BackendSetup
from turnwise.config.config import Config


def backend_setup(config: Config, model: Path, directory: Path) -> BackendSetup:
    return BackendSetup(
        rollout=config.rollout,
        model_directory=model,
        run_directory=directory,
        engine=config.engine_in_use,
        lora_rank=16,
    )
