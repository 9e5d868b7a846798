"""One real vLLM server for all tests of this folder that do not break it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.backends import BackendSetup
from turnwise.backends.servers.launch import OwnServer
from turnwise.backends.vllm import VllmPublisher
from turnwise.engine.config import EngineConfig
from turnwise.rollout.config import RolloutConfig
from vllm_server import RANK, Served, make_model, vllm_python


@pytest.fixture(scope="session", autouse=True)
def one_process_per_engine() -> Iterator[None]:
    """vLLM's worker runs in its engine's process: one Python less that imports vLLM, at every start of a server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(scope="session")
def server_python() -> Path:
    return vllm_python()


@pytest.fixture(scope="session")
def model(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` with heads that vLLM runs on a CPU."""
    return make_model(tiny_dir, tmp_path_factory.mktemp("models") / "tiny-wide")


MEMORY_PLUGIN = Path(__file__).with_name("cpu_memory")


@pytest.fixture(scope="session")
def vllm(server_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that `VllmPublisher` starts, as a run does. It also takes weights out of this process's memory."""
    directory = tmp_path_factory.mktemp("vllm")
    rollout = RolloutConfig(backend="vllm", server_python=str(server_python), max_trajectory_tokens=1024)
    engine = EngineConfig(device="cpu", dtype="float32")
    setup = BackendSetup(
        rollout=rollout,
        model_directory=model,
        run_directory=directory,
        engine=engine,
        lora_rank=RANK,
        weight_transfer="ipc",
    )
    command = VllmPublisher(setup).server_command()
    command = dataclasses.replace(command, environment={**command.environment, "PYTHONPATH": str(MEMORY_PLUGIN)})
    server = OwnServer(command, directory / "vllm.log", start_s=600)
    asyncio.run(server.start())
    yield Served(url=server.url, model=model, log=server.log)
    asyncio.run(server.stop())
