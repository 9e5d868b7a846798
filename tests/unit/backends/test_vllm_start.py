"""A run's own vLLM server: what is refused before it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.backends.servers.http import KEY_VARIABLE
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


def test_a_server_of_the_runs_own_has_no_api_key_whatever_the_shell_says(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    publisher = VllmPublisher(backend_setup(load_config("guess_number", ["engine.device=cpu"]), tiny_dir, tmp_path))
    assert publisher.environment()["VLLM_API_KEY"] == "", "an empty one is none to vLLM"
    monkeypatch.setenv(KEY_VARIABLE, "of-servers-elsewhere")
    assert publisher.server_key == ""
