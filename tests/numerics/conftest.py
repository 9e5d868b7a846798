"""Tiny random models of each supported architecture, and an engine on each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from naive import make_model
from turnwise.bench import family_samples
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine

VOCAB = family_samples.VOCAB
SHAPE: dict[str, Any] = {**family_samples.SHAPE, "max_position_embeddings": 512}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(config(), root / name) for name, config in CONFIGS.items()}


@pytest.fixture(scope="session", params=list(CONFIGS))
def arch_dir(request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> Path:
    return model_dirs[request.param]


@pytest.fixture(scope="session")
def llama_dir(model_dirs: dict[str, Path]) -> Path:
    return model_dirs["llama"]


@pytest.fixture
def make_engine(llama_dir: Path, pytestconfig: pytest.Config) -> Callable[..., Engine]:
    def build(directory: Path | None = None, **settings: object) -> Engine:
        settings = {
            "device": pytestconfig.getoption("--device"),
            "dtype": "float32",
            "kv_cache_gib": 0.01,
            "seed": 3,
            **settings,
        }
        return Engine(directory or llama_dir, EngineConfig(**settings), name="test")  # type: ignore[arg-type]

    return build
