"""What the engines of a run leave each other on one machine, with made-up numbers of cores, GPUs and processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turnwise.engine import device_info, machine_share
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import GPU_SHARE_VARIABLE, DeviceInfo
from turnwise.engine.learners import places, torchrun
from turnwise.engine.learners.places import LearnerPlaces
from turnwise.engine.machine_share import MachineShare, count_here, gpu_share
from turnwise.engine.samplers import launcher
from turnwise.engine.samplers.launcher import SamplerLauncher
from turnwise.engine.threads import Threads
from turnwise.errors import ConfigError
from turnwise.runtime.torchrun import TorchrunWorld, read_world
from turnwise.training import setup as training_setup
from turnwise.training.setup import Setup, read_config, set_up_new

GIB = 1 << 30
TWO_MACHINES = {
    "TORCHELASTIC_RUN_ID": "run",
    "RANK": "0",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
}
"""What torchrun tells the first of eight processes on each of two machines."""
SIXTEEN = ClusterConfig(learners=16)


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(machine_share, "find_threads", lambda: Threads(4, ""))
    monkeypatch.delenv(GPU_SHARE_VARIABLE, raising=False)
    yield
    torch.set_num_threads(before)


def _see_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device_info, places, launcher, torchrun):
        monkeypatch.setattr(module, "num_gpus", lambda _: count)
    for module in (places, launcher, torchrun):
        monkeypatch.setattr(module, "choose_device", lambda one: (torch.device(one.device), torch.bfloat16))


def _join_torchrun(monkeypatch: pytest.MonkeyPatch) -> TorchrunWorld:
    for name, value in TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    world = read_world()
    assert world is not None
    return world


def test_only_engines_of_this_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_here(16, SIXTEEN) == 16
    assert count_here(16, ClusterConfig(learners=16, address="auto")) == 1, "Ray gives each a GPU of its own"
    _join_torchrun(monkeypatch)
    assert count_here(16, SIXTEEN) == 8


def test_learners_of_two_machines_with_a_gpu_each_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(8, monkeypatch)
    _join_torchrun(monkeypatch)
    found = LearnerPlaces(EngineConfig(device="cuda"), SIXTEEN)
    assert GPU_SHARE_VARIABLE not in os.environ
    assert [found.config_of(rank).device for rank in (1, 7)] == ["cuda:1", "cuda:7"]
    found.close()


def test_a_rank_of_another_machine_takes_its_own_gpu_there_or_a_share_of_too_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, given = replace(_join_torchrun(monkeypatch), rank=11, local_rank=3), EngineConfig(device="cuda:11")
    for gpus, device, share in ((8, "cuda:3", None), (2, "cuda:1", "0.1250")):
        _see_gpus(gpus, monkeypatch)
        taken = MachineShare()
        assert torchrun.own_engine(given, world, taken).device == device
        assert os.environ.get(GPU_SHARE_VARIABLE) == share
        taken.give_back()


def test_a_share_is_given_back_with_the_engine_that_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(2, monkeypatch)
    for before, shared in ((None, "0.2500"), ("0.5", "0.1250")):
        if before is not None:
            monkeypatch.setenv(GPU_SHARE_VARIABLE, before)
        first, second = (LearnerPlaces(EngineConfig(device="cuda"), ClusterConfig(learners=4)) for _ in range(2))
        assert os.environ[GPU_SHARE_VARIABLE] == gpu_share(4) == shared, "of what this process had, not of a share"
        first.close()
        assert os.environ[GPU_SHARE_VARIABLE] == shared
        second.close()
        assert os.environ.get(GPU_SHARE_VARIABLE) == before


def test_threads_are_given_back_with_the_engine_that_left_them_to_others() -> None:
    found = LearnerPlaces(EngineConfig(device="cpu"), ClusterConfig(learners=2))
    assert torch.get_num_threads() == 2
    found.close()
    assert torch.get_num_threads() == 4


def test_the_engine_that_leaves_the_most_room_decides() -> None:
    two, four = MachineShare(), MachineShare()
    four.take_threads(4)
    two.take_threads(2)
    assert torch.get_num_threads() == 1
    four.give_back()
    assert torch.get_num_threads() == 2
    two.give_back()
    two.give_back()
    assert torch.get_num_threads() == 4


def test_samplers_share_a_gpu_only_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    _see_gpus(1, monkeypatch)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(launcher, "start_sampler", lambda _, environment: started.append(environment))
    SamplerLauncher(ClusterConfig(placement="separate", samplers=3), EngineConfig(device="cuda")).start(0)
    assert started == [{GPU_SHARE_VARIABLE: "0.2500"}]


@pytest.fixture
def setup(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:  # noqa: ARG001
    _join_torchrun(monkeypatch)
    overrides = ["model=tiny", "eval.tasks=0", "cluster.learners=16"]
    return set_up_new(read_config("guess_number", overrides))


def test_the_plan_of_two_machines_gives_each_learner_a_whole_card(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=131 * GIB, total_bytes=131 * GIB)
    monkeypatch.setattr(training_setup, "find_device", lambda _: card)
    monkeypatch.setattr(device_info, "num_gpus", lambda _: 8)
    memory = setup.make_plan().memory
    assert memory is not None
    assert memory.device == card


def test_the_hosts_memory_is_asked_for_the_learners_of_this_machine(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = setup.make_plan().memory
    assert memory is not None
    monkeypatch.setattr("turnwise.training.memory.machine_bytes", lambda: 8 * memory.num_fixed)
    memory.check_fits()
    monkeypatch.setattr("turnwise.training.memory.machine_bytes", lambda: 8 * memory.num_fixed - 1)
    with pytest.raises(ConfigError, match="of 8 learners need"):
        memory.check_fits()
