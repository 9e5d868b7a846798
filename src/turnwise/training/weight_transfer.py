"""How whole weights reach a server: as files, or out of the trainer's memory."""

from __future__ import annotations

from typing import Literal

from turnwise.config.config import Config
from turnwise.engine.device_info import find_device
from turnwise.errors import ConfigError
from turnwise.models.facts import ModelFacts, is_tied
from turnwise.rollout.server_options import NO_OTHER, OTHER_SAMPLERS
from turnwise.runtime.network import is_on_this_machine

SPREADS = ("--pipeline-parallel", "-pp", "--pipeline_parallel", "--data-parallel", "--data_parallel", "-dp")
"""Arguments of vLLM that need several GPUs begin so."""


def choose_weight_transfer(config: Config, facts: ModelFacts) -> Literal["disk", "ipc"]:
    """What `rollout.weight_transfer` means for a run; raises a ConfigError where `ipc` was asked for and cannot be."""
    if config.rollout.publish != "weights" or config.rollout.weight_transfer == "disk":
        return "disk"
    if why_not := _why_not_ipc(config, facts):
        raise ConfigError(f"rollout.weight_transfer=ipc: {why_not}; use rollout.weight_transfer=disk")
    return "ipc"


def _why_not_ipc(config: Config, facts: ModelFacts) -> str:
    """Why no server can read the trainer's memory; empty where one can."""
    rollout, model = config.rollout, config.model
    if not OTHER_SAMPLERS.get(rollout.backend, NO_OTHER).reads_memory:
        return f"rollout.backend={rollout.backend} reads weights from files"
    if model.base_url:
        return f"the trainer is at {model.base_url}, and its memory is there"
    if config.cluster.shard:
        return "cluster.shard=true keeps the weights in parts, and no process has them all"
    if facts.experts is not None:
        return "the model has routed experts, whose weights have other names in files than in memory"
    for url in rollout.url:
        if not is_on_this_machine(url):
            return f"the server at {url} is on another machine; expected one at http://127.0.0.1"
    if rollout.tensor_parallel_size > 1:
        return f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} spreads the server over several GPUs"
    for name in rollout.server_args:
        if name.startswith(SPREADS):
            return f"{name} in rollout.server_args spreads the server over several GPUs"
    if model.train == "lora" and model.train_unembed and is_tied(facts.directory):
        return (
            "the model's output head shares its embedding's weights, and the adapter changes the head alone, which the "
            "server's model cannot; set model.train_unembed=false"
        )
    device = find_device(config.engine_in_use)
    if not device.facts.has_own_memory:
        return f"the trainer's weights are on the {device.kind}, and memory is shared on a GPU only"
    if config.engine.device not in ("auto", "cuda", "cuda:0") and not rollout.url:
        return f"the trainer is on {config.engine.device}, and its own server reads memory of the first GPU"
    return ""
