"""A whole run of a real language model: SmolLM2 learns here and samples on a vLLM server that the run starts."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from environments import ROOT
from turnwise.cli import main
from turnwise.models.store import fetch_model
from turnwise.runlog.reader import RunReader
from vllm_server import check_whole, num_steps_done, pids_of

pytestmark = pytest.mark.timeout(900)  # the first one downloads the model, and a server takes a minute to start

HOME = ROOT / ".venvs" / "models"
"""A model store that stays between test runs."""
ECHO = f"{ROOT / 'tests' / 'e2e' / 'echo_world.py'}:EchoWorld"


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch, (HOME / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("TURNWISE_HOME", str(HOME))
        return fetch_model("smollm2").directory


def test_smollm2_learns_from_what_it_sampled_on_its_own_server_also_when_that_is_killed(
    smollm2: Path, server_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    killed: list[int] = []

    def kill_server() -> None:
        """Kill the server as soon as it samples for the second step."""
        while not killed and time.monotonic() < end_s:
            time.sleep(0.1)
            if (directory / "run.db").exists() and num_steps_done(directory) >= 1:
                killed.extend(pids_of(directory))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

    end_s = time.monotonic() + 600
    killer = threading.Thread(target=kill_server)
    killer.start()
    small = ("train.steps=3", "train.tasks_per_step=1", "rollout.group_size=4", "warmup.steps=0", "eval.tasks=0")
    options = ("rollout.temperature=0.7", "engine.dtype=float32", "model.rank=8", "run.dialogues=0")
    sizes = ("generator.gpu_memory_utilization=0.5", "generator.max_num_seqs=32", "rollout.server_args=--seed 3")
    server = ("rollout.backend=vllm", f"rollout.server_python={server_python}", "train.max_empty_steps=1000")
    command = ["train", ECHO, f"model={smollm2}", *small, *options, *sizes, *server, f"run.dir={directory}"]
    assert main(command) == 0
    killer.join()
    assert killed, "the server was killed in the middle of the run"
    check_whole(directory, 3)
    with RunReader(directory) as run:
        worst = [gap for _, gap in run.metric("drift/abs_max")]
    assert worst
    assert max(worst) < 1e-3, "logprobs are the trainer's, in nats"
    log = (directory / "vllm.log").read_text()
    assert log.count("\n$ ") == 2, "it was started again once"
    assert "--gpu-memory-utilization 0.5 --max-num-seqs 32 --seed 3" in log
    assert not pids_of(directory), "nothing is left of it"
    assert main(["certify", str(directory)]) == 0
    assert "EXACT" in capsys.readouterr().out
