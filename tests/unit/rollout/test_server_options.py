"""Options of servers: what they may look like, and where nothing would read them."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.config.config import Config
from turnwise.config.files import left_out, load_config, override_config
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig


def test_arguments_of_a_server_are_a_text_a_list_or_a_mapping() -> None:
    same: list[Any] = [
        "--seed 3 --enforce-eager",
        ["--seed", "3", "--enforce-eager"],
        {"seed": 3, "enforce_eager": True},
    ]
    for given in same:
        assert RolloutConfig(backend="vllm", server_args=given).server_args == ("--seed", "3", "--enforce-eager")
    no: Any = {"enable_x": False}
    assert RolloutConfig(backend="vllm", server_args=no).server_args == ("--no-enable-x",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://a:1"}, "url is not read with backend=local"),
        ({"publish": "weights"}, "publish is not read with backend=local"),
        ({"server_args": "--seed 3"}, "server_args is not read with backend=local"),
        ({"backend": "vllm", "url": "http://a:1", "max_num_seqs": 4}, "max_num_seqs is not read with url"),
        ({"backend": "vllm", "url": "http://a:1", "server_python": "x"}, "server_python is not read with url"),
        ({"backend": "vllm", "url": "a:1"}, "is no address"),
        ({"backend": "vllm", "weight_transfer": "ipc"}, "weight_transfer is not read with publish=adapter"),
        ({"weight_transfer": "ipc", "publish": "weights"}, "publish is not read with backend=local"),
        ({"backend": "vllm", "publish": "weights", "weight_transfer": "nccl"}, "weight_transfer=nccl is not offered"),
        ({"backend": "vllm", "deterministic": True}, "deterministic is not read with backend=vllm"),
        ({"backend": "vllm_in_process", "deterministic": True}, "deterministic is not read with backend=vllm_in_proc"),
    ],
)
def test_an_option_of_servers_that_nothing_would_read_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RolloutConfig(**options)


def test_skyrls_sizes_reach_the_sampler_whichever_it_is() -> None:
    sizes = ["generator.max_num_seqs=32", "generator.gpu_memory_utilization=0.7"]
    here = load_config("guess_number", sizes)
    assert (here.engine_in_use.max_num_seqs, here.engine_in_use.gpu_memory_utilization) == (32, 0.7)
    server = load_config(
        "guess_number", [*sizes, "generator.backend=vllm", "generator.inference_engine_tensor_parallel_size=2"]
    )
    rollout = server.rollout
    assert (rollout.max_num_seqs, rollout.gpu_memory_utilization, rollout.tensor_parallel_size) == (32, 0.7, 2)
    assert server.engine_in_use.max_num_seqs == Config().engine.max_num_seqs, "the trainer's engine is another one"
    with pytest.raises(ConfigError, match=r"rollout\.max_num_seqs=32 and engine\.max_num_seqs=8 are one option"):
        load_config("guess_number", [*sizes, "engine.max_num_seqs=8"])


def test_all_weights_are_published_as_weights_where_the_sampler_takes_them() -> None:
    for backend in ("vllm", "vllm_in_process"):
        with pytest.raises(ConfigError, match=r"set rollout\.publish=weights"):
            load_config("guess_number", [f"rollout.backend={backend}", "model.train=full"])


def test_a_run_that_sampled_on_servers_can_be_played_elsewhere() -> None:
    own = [
        "rollout.backend=vllm",
        "rollout.server_python=/x/python",
        "rollout.max_num_seqs=7",
        "rollout.publish=weights",
    ]
    run = load_config("guess_number", own)
    here = override_config(run, ["rollout.backend=local"]).rollout
    assert (here.server_python, here.publish, here.max_num_seqs) == ("", "adapter", 7)
    there = override_config(run, ["rollout.url=http://a:1"]).rollout
    assert (there.server_python, there.publish, there.max_num_seqs) == ("", "weights", 0)
    other = override_config(run, ["rollout.backend=sglang", "rollout.server_python=/x/python"]).rollout
    assert (other.server_python, other.publish) == ("/x/python", "adapter")
    assert override_config(run, ["rollout.temperature=0.5"]).rollout.server_python == "/x/python"
    (note,) = left_out(run, ["rollout.backend=local"])
    assert note.endswith("for other servers: rollout.publish=weights, rollout.server_python=/x/python")
    with pytest.raises(ConfigError, match="server_python is not read with backend=local"):
        override_config(run, ["rollout.backend=local", "rollout.server_python=/x/python"])


def test_a_server_gets_longer_for_replies_that_may_be_longer() -> None:
    def deadline_s(*options: str) -> float:
        return load_config("guess_number", ["rollout.backend=vllm", *options]).rollout.reply_deadline_s

    assert deadline_s() == 120
    assert deadline_s("rollout.max_tokens_per_turn=1024") == 256
    assert deadline_s("rollout.max_tokens_per_turn=1024", "rollout.server_deadline_s=30") == 30
