"""A run's own vLLM server: what is refused before it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.backends.vllm import VllmPublisher
from turnwise.config.files import load_config
from turnwise.errors import ConfigError
from unit.backends.conftest import backend_setup


def test_a_model_that_vllm_cannot_run_on_a_cpu_is_refused_before_a_server_is_started(
    tiny_dir: Path, tmp_path: Path
) -> None:
    config = load_config("guess_number", ["engine.device=cpu"])
    setup = backend_setup(config, tiny_dir, tmp_path)
    with pytest.raises(ConfigError, match="attention heads of size 16; vLLM on a CPU needs 32 or more"):
        VllmPublisher(setup).server_command()
