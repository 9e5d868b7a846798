"""How whole weights reach a server: chosen, or refused with a reason, before anything is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.config.files import load_config
from turnwise.engine.device_info import DeviceInfo
from turnwise.errors import ConfigError
from turnwise.models.facts import ModelFacts, read_facts
from turnwise.training import weight_transfer
from turnwise.training.weight_transfer import choose_weight_transfer

WEIGHTS = ("rollout.backend=vllm", "rollout.publish=weights")
IPC = "rollout.weight_transfer=ipc"


@pytest.fixture
def facts(tiny_dir: Path) -> ModelFacts:
    return read_facts(tiny_dir)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=2**34, total_bytes=2**34)
    monkeypatch.setattr(weight_transfer, "find_device", lambda _: device)


def choose(facts: ModelFacts, *options: str) -> str:
    return choose_weight_transfer(load_config("guess_number", list(options)), facts)


@pytest.mark.usefixtures("on_a_gpu")
def test_weights_travel_by_disk_unless_the_trainers_memory_is_asked_for(facts: ModelFacts) -> None:
    assert choose(facts, *WEIGHTS) == choose(facts, "rollout.backend=vllm") == "disk"
    for server in ((), ("rollout.url=http://127.0.0.1:8000",), ("rollout.backend=vllm_in_process",)):
        assert choose(facts, *WEIGHTS, *server, IPC) == "ipc", server


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout.tensor_parallel_size=2", "spreads the server over several GPUs"),
        ("rollout.server_args=-pp 2", "-pp in rollout.server_args spreads the server over several GPUs"),
        ("rollout.url=http://gpu2:8000", "the server at http://gpu2:8000 is on another machine"),
        ("model.base_url=http://trainer:8000", "the trainer is at http://trainer:8000"),
        (
            "engine.device=cuda:1",
            "the trainer is on cuda:1, and its own server reads memory of the first GPU",
        ),
        ("rollout.backend=mine:Publisher", "rollout.backend=mine:Publisher reads weights from files"),
    ],
)
def test_memory_that_no_server_can_read_is_refused_by_name(facts: ModelFacts, option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.weight_transfer=ipc: ") as caught:
        choose(facts, *WEIGHTS, option, IPC)
    assert words in str(caught.value)
    assert "use rollout.weight_transfer=disk" in str(caught.value)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_tied_head_that_the_adapter_changes_alone_does_not_travel_by_memory(tiny_dir: Path, tmp_path: Path) -> None:
    config = (tiny_dir / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    (tmp_path / "model.safetensors").symlink_to(next(tiny_dir.glob("*.safetensors")))
    tied = read_facts(tmp_path)
    assert choose(tied, *WEIGHTS, IPC, "model.train_unembed=false") == "ipc"
    assert choose(tied, *WEIGHTS, IPC, "model.train=full") == "ipc", "all weights stay tied"
    with pytest.raises(ConfigError, match=r"the adapter changes the head alone.*set model\.train_unembed=false"):
        choose(tied, *WEIGHTS, IPC)


def test_memory_is_shared_on_a_gpu_only(facts: ModelFacts) -> None:
    with pytest.raises(ConfigError, match="the trainer's weights are on the cpu, and memory is shared on a GPU only"):
        choose(facts, *WEIGHTS, "engine.device=cpu", IPC)
