"""Which GPUs a server of the run's own gets, on machines with a made-up number of them."""

from __future__ import annotations

import pytest
import torch

from turnwise.backends.servers import gpus
from turnwise.backends.servers.gpus import check_server_fits, choose_server_gpus, visible_gpus
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig

GIB = 1 << 30
ENGINE = EngineConfig(device="cuda")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 8)


def see(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda _: count)
    monkeypatch.setattr(gpus, "choose_device", lambda engine: (torch.device(engine.device), torch.bfloat16))


def vllm(**options: object) -> RolloutConfig:
    return RolloutConfig.model_validate({"backend": "vllm", **options})


def test_a_server_gets_the_gpus_after_the_learners() -> None:
    assert choose_server_gpus(ENGINE, ClusterConfig(), vllm()) == (1,)
    assert choose_server_gpus(ENGINE, ClusterConfig(learners=4), vllm(tensor_parallel_size=4)) == (4, 5, 6, 7)
    elsewhere = EngineConfig(device="cuda:6")
    assert choose_server_gpus(elsewhere, ClusterConfig(learners=2), vllm(tensor_parallel_size=2)) == (0, 1)
    assert choose_server_gpus(EngineConfig(device="cpu"), ClusterConfig(), vllm()) == ()
    assert choose_server_gpus(ENGINE, ClusterConfig(), vllm(url="http://127.0.0.1:8000")) == ()


@pytest.mark.parametrize("options", [
    {"placement": "colocated"},
    {"publish": "weights", "weight_transfer": "ipc"},
])  # fmt: skip
def test_a_server_that_shares_the_trainers_gpu_by_agreement_stays_there(options: dict[str, str]) -> None:
    assert choose_server_gpus(EngineConfig(device="cuda:2"), ClusterConfig(learners=2), vllm(**options)) == (2,)


def test_a_server_for_which_there_are_too_few_gpus_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=9, and this machine has 8 GPUs"):
        choose_server_gpus(ENGINE, ClusterConfig(), vllm(tensor_parallel_size=9))
    with pytest.raises(ConfigError, match=r"Ray gives the GPUs of this machine to learners.*rollout\.url"):
        choose_server_gpus(ENGINE, ClusterConfig(learners=2, address="auto"), vllm())


def test_a_server_without_a_gpu_of_its_own_has_to_fit_beside_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(learners: int, needed: int, **options: object) -> None:
        cluster = ClusterConfig(learners=learners)
        check_server_fits(ENGINE, cluster, vllm(**options), needed=needed * GIB, total=80 * GIB)

    check(4, 70)  # it has a GPU of its own
    check(8, 8)
    with pytest.raises(ConfigError, match=r"beside 1 learner on it. It takes 90% of .* 80\.0 GiB.*need 9\.0 GiB"):
        check(8, 9)
    check(8, 9, gpu_memory_utilization=0.5)
    check(8, 70, placement="colocated")
    see(monkeypatch, 1)
    check(1, 8)
    with pytest.raises(ConfigError, match=r"beside 2 learners on it\. .*need 10\.0 GiB"):
        check(2, 5)


def test_a_server_is_shown_its_gpus_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert visible_gpus(()) == {}
    assert visible_gpus((4, 5)) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv(gpus.VISIBLE, "GPU-a, GPU-b")
    assert visible_gpus((1,)) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
