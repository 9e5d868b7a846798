"""Every test runs with a model store of its own, no aliases and no way to a hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("TURNWISE_ALIASES", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the numerics tests run their engines: cpu or cuda")


@pytest.fixture(scope="session", autouse=True)
def turnwise_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The session's `TURNWISE_HOME`; a test that changes the store takes `own_home` instead."""
    home = tmp_path_factory.mktemp("turnwise_home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def _threads_end_soon() -> None:
    """Many tests wait until no thread of an env is left."""
    from turnwise.envs import sync

    sync.IDLE_S = 0.05


@pytest.fixture(scope="session")
def tiny_dir(turnwise_home: Path) -> Path:
    """The directory of `tiny`: two random layers and a real tokenizer. Read only."""
    from turnwise.model_store import fetch_model

    directory = fetch_model("tiny").directory
    assert turnwise_home in directory.parents
    return directory


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `TURNWISE_HOME` for one test."""
    home = tmp_path / "home"
    monkeypatch.setenv("TURNWISE_HOME", str(home))
    return home
