"""vLLM samples: a server that the run starts and stops, or servers at `rollout.url`.

    turnwise train guess_number rollout.backend=vllm rollout.server_python=.venvs/vllm/bin/python

After every update the adapter is loaded under a name of its own (`rollout.publish=adapter`), or the whole weights are
replaced (`weights`). docs/backends.md says what is exact and what is not.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from turnwise.backends import BackendSetup
from turnwise.backends.servers.blank_adapter import write_blank
from turnwise.backends.servers.dialect import ServerDialect
from turnwise.backends.servers.launch import ServerCommand
from turnwise.backends.servers.publisher import ServerPublisher
from turnwise.backends.servers.python import check_own_server, given_value, server_python, size_arguments
from turnwise.backends.servers.vllm_calls import VllmHttp
from turnwise.backends.servers.vllm_dialect import VllmDialect, VllmUse
from turnwise.backends.servers.vllm_transfer import ARGUMENT, BACKEND, VARIABLE
from turnwise.errors import ConfigError
from turnwise.models.facts import read_facts
from turnwise.rollout.config import RolloutConfig

MODULE = "vllm"
ENTRY = "vllm.entrypoints.openai.api_server"
SIZES = {
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_seqs": "--max-num-seqs",
    "tensor_parallel_size": "--tensor-parallel-size",
}
"""Options of the section `rollout`, and the arguments of the server that mean the same."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` takes."""
MAX_LORAS, MAX_CPU_LORAS = 2, 16
"""Adapters in one batch, and adapters that are kept: versions that attempts under way may still ask for."""
MIN_CPU_HEAD = 32
"""The smallest attention head for which vLLM has a kernel on a CPU."""
MIN_CPU_BATCH = 4096
"""Tokens of one step of a server on a CPU, at least."""
CPU_CACHE_GIB = 2
"""KV cache of a server on a CPU where the config does not say."""
OWN_ARGUMENTS = (
    *("--model", "--host", "--port", "--served-model-name", "--enable-lora", "--logprobs-mode"),
    *("--tensor-parallel-size", "--api-key", ARGUMENT),
)
"""Arguments that the run itself depends on."""


class VllmPublisher(ServerPublisher):
    """Publishes to vLLM servers."""

    takes_full_weights = True

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._writing = threading.Lock()
        self.dtype = given_value(setup.rollout.server_args, "--dtype")

    @classmethod
    def check_options(cls, rollout: RolloutConfig) -> None:
        check_own_server(rollout, MODULE, own=OWN_ARGUMENTS)

    @classmethod
    def describe(cls, rollout: RolloutConfig) -> str:
        if rollout.url:
            return f"vLLM at {', '.join(rollout.url)}"
        command = [server_python(rollout), "-m", ENTRY, *size_arguments(rollout, SIZES), *rollout.server_args]
        return f"vLLM, a server that the run starts: {' '.join(command)}"

    def server_command(self) -> ServerCommand:
        self.check_device()
        environment = {**self.environment(), **self.gpu_variables()}
        return ServerCommand(name="vLLM", arguments=self._arguments, environment=environment)

    def check_device(self) -> None:
        """Refuse what vLLM cannot do on this device, before an engine is started for it."""
        size = read_facts(self.setup.model_directory, runs_here=False).head_size
        if self._is_on_cpu() and size < MIN_CPU_HEAD:  # the server would start, and end at the first request
            raise ConfigError(
                f"{self.setup.model_directory.name} has attention heads of size {size}; vLLM on a CPU needs "
                f"{MIN_CPU_HEAD} or more, use another model (such as model=smollm2) or rollout.backend=local"
            )
        if self._is_on_cpu() and self.setup.rollout.placement == "colocated":
            raise ConfigError(
                "rollout.placement=colocated: vLLM on a CPU cannot sleep (it refuses --enable-sleep-mode); use "
                "rollout.placement=separate"
            )

    def make_dialect(self, url: str) -> ServerDialect:
        return VllmDialect(url, self.use(), VllmHttp(url, key=self.server_key))

    def use(self) -> VllmUse:
        """How the run uses each of its servers."""
        setup, rollout = self.setup, self.setup.rollout
        return VllmUse(
            end_ids=end_ids(setup.model_directory),
            temperature=rollout.temperature,
            replaces_weights=rollout.publish == "weights",
            reads_memory=setup.weight_transfer == "ipc",
            across_updates=rollout.kv_across_updates,
            sleeps=rollout.placement == "colocated",
            write_blank=self._write_blank if rollout.url else None,
        )

    def _write_blank(self) -> Path:
        with self._writing:  # several servers may ask for it
            if not self.blank_directory.exists():
                write_blank(self.setup.model_directory, self.blank_directory)
        return self.blank_directory

    def _arguments(self, port: int) -> list[str]:
        own = [server_python(self.setup.rollout), "-m", ENTRY, "--host", "127.0.0.1", "--port", str(port)]
        return [*own, "--enable-scale-out", "--enable-prompt-tokens-details", *self.engine_arguments()]

    def engine_arguments(self) -> list[str]:
        """What an engine of the run's own is started with, in a server or not."""
        setup, rollout = self.setup, self.setup.rollout
        fixed = {
            "--model": str(self.start_directory.resolve()),
            "--served-model-name": setup.model_directory.name,
            "--logprobs-mode": "processed_logprobs",
            "--dtype": self._dtype(),
            "--max-model-len": str(rollout.max_trajectory_tokens),
        }
        switches: list[str] = []
        if rollout.publish == "adapter":
            fixed["--max-lora-rank"] = str(_lora_rank(self.largest_rank))
            fixed |= {"--max-loras": str(MAX_LORAS), "--max-cpu-loras": str(MAX_CPU_LORAS)}
            switches.append("--enable-lora")
        if rollout.placement == "colocated":
            switches.append("--enable-sleep-mode")
        if setup.weight_transfer == "ipc":
            fixed[ARGUMENT] = BACKEND
        if self._is_on_cpu():
            # Part of a prompt in a batch sets a seeded generator back, and one on a CPU cannot be: the server ends.
            batch = max(rollout.max_trajectory_tokens, MIN_CPU_BATCH)
            switches += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batch)]
        named = [part for name, value in fixed.items() if value != "0" for part in (name, value)]
        return [*named, *switches, *size_arguments(rollout, SIZES), *rollout.server_args]

    def environment(self) -> dict[str, str]:
        """Variables that an engine of the run's own is started with."""
        found = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_API_KEY": "",  # it listens on the loopback device alone, and our requests have no key
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",  # ours is for another Python
        }
        if self.setup.weight_transfer == "ipc":
            found[VARIABLE] = "1"  # handles of memory come pickled; the server listens on the loopback device alone
        if self._is_on_cpu():
            found["TORCHDYNAMO_DISABLE"] = "1"  # else the first reply waits while a C++ compiler builds one small sum
            # By default vLLM binds its threads to all cores but one; the trainer needs these cores while vLLM waits.
            found["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            cache_gib = self.setup.engine.kv_cache_gib or CPU_CACHE_GIB
            found["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(cache_gib))))
        return found

    def _is_on_cpu(self) -> bool:
        from turnwise.engine.engine import choose_device
        from turnwise.engine.ops.facts import facts_of

        return not facts_of(choose_device(self.setup.engine)[0].type).has_own_memory

    def _dtype(self) -> str:
        from turnwise.engine.engine import choose_device

        return str(choose_device(self.setup.engine)[1]).removeprefix("torch.")


def end_ids(model_directory: Path) -> tuple[int, ...]:
    """The ids that end a sequence where a request names no stop: what the model's generation config says."""
    for name in ("generation_config.json", "config.json"):
        file = model_directory / name
        found: Any = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return tuple(map(int, found)) if isinstance(found, list) else (int(found),)
    return ()


def _lora_rank(rank: int) -> int:
    for known in LORA_RANKS:
        if rank <= known:
            return known
    raise ConfigError(f"model.rank={rank}; vLLM takes adapters of rank {LORA_RANKS[-1]} at most")
