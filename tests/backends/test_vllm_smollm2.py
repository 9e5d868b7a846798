"""A whole run of a real language model: SmolLM2 learns here and samples on a vLLM server that the run starts."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from environments import ROOT
from turnwise.cli import main
from turnwise.models.store import fetch_model
from turnwise.runlog.reader import RunReader

pytestmark = pytest.mark.timeout(900)  # the first one downloads the model, and a server takes a minute to start

HOME = ROOT / ".venvs" / "models"
"""A model store that stays between test runs."""
ECHO = f"{ROOT / 'tests' / 'e2e' / 'echo_world.py'}:EchoWorld"
NUM_STEPS = 2


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch, (HOME / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("TURNWISE_HOME", str(HOME))
        return fetch_model("smollm2").directory


def test_smollm2_learns_from_what_it_sampled_on_vllm_and_the_certificate_is_whole(
    smollm2: Path, server_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    small = (f"train.steps={NUM_STEPS}", "train.tasks_per_step=1", "rollout.group_size=4", "warmup.steps=1")
    options = ("rollout.temperature=0.7", "engine.dtype=float32", "model.rank=8", "eval.tasks=0", "run.dialogues=0")
    server = ("rollout.backend=vllm", f"rollout.server_python={server_python}")
    command = ["train", ECHO, f"model={smollm2}", *small, *options, *server, f"run.dir={directory}"]
    assert main([*command, "train.max_empty_steps=100"]) == 0
    with RunReader(directory) as run:
        certificates = run.certificates()
        attempts = [run.attempt(row.id) for row in run.attempts(phase="train")]
        worst = [gap for _, gap in run.metric("drift/abs_max")]
    assert {1, NUM_STEPS} <= {row.step for row in certificates}
    assert all(row.is_exact for row in certificates)
    assert worst
    assert max(worst) < 1e-3, "logprobs are those of the trainer, in nats"
    drawn = {(one.row.step, version) for one in attempts for turn in one.trajectory.turns for version in turn.versions}
    assert {step - version for step, version in drawn} == {1}, "a step learns from the version before it"
    assert max(len(one.trajectory.turns) for one in attempts) == 3
    assert main(["certify", str(directory)]) == 0
    assert "EXACT" in capsys.readouterr().out
