"""Learners, samplers and env workers on a local Ray cluster of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_environment import ray_python

HANG_S = 1500.0
"""Only a hang takes so long; the first test also installs Ray."""
TESTS = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(HANG_S + 500)]
RUNS = {
    "an adapter in parts": "--kills learner --shard --steps 4 --head-cpus 0",
    "all weights in parts": "--kills 0 --full --shard --steps 3 --samplers 1 --env-workers 1",
    "an env worker": "--kills env --learners 1 --steps 6 --env-workers 2",
    "a lost node": "--kills learner,sampler,node --steps 8 --samplers 1 --min-learners 1",
}
"""What runs on the cluster, one after the other. Learners have room on the second node alone, which the last one loses.
"""


def run_module(name: str, *arguments: str) -> list[Any]:
    """Run a module of the tests where Ray is, and return what it prints, line by line."""
    done = subprocess.run(
        [str(ray_python()), "-m", name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.strip().splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def found(tiny_dir: Path) -> Mapping[str, Any]:  # noqa: ARG001
    lines = run_module("campaigns.ray_kills", *" also ".join(RUNS.values()).split())
    return dict(zip(RUNS, lines, strict=True))


def check_equal(found: Mapping[str, Any], num_steps: int) -> None:
    """The run made what a run of one process makes that nobody touched."""
    assert (found["state"], found["steps"]) == ("finished", num_steps)
    assert found["relative_error"] < 1e-5
    assert (found["attempts_lost"], found["attempts_doubled"], found["attempts_with_other_tokens"]) == (0, 0, 0)


def test_a_run_that_loses_a_learner_a_sampler_and_a_node_ends_with_the_weights_of_one_process(
    found: Mapping[str, Any],
) -> None:
    run = found["a lost node"]
    assert run["killed"] == ["learner", "sampler", "node"]
    check_equal(run, 8)
    assert any("cannot be started again" in one and "going on with 1" in one for one in run["warnings"])


def test_learners_with_parts_of_the_weights_are_actors_too_and_are_started_again(found: Mapping[str, Any]) -> None:
    run = found["an adapter in parts"]
    assert run["killed"] == ["learner"]
    check_equal(run, 4)
    check_equal(found["all weights in parts"], 3)


def test_attempts_of_a_killed_env_worker_are_played_again_and_none_is_lost_or_doubled(found: Mapping[str, Any]) -> None:
    run = found["an env worker"]
    assert run["killed"] == ["env"]
    assert (run["state"], run["steps"]) == ("finished", 6)
    assert (run["attempts"], run["attempts_lost"], run["attempts_doubled"]) == (6 * 8, 0, 0)
    assert any("died; another one serves at" in line for line in run["messages"])


def test_every_learner_on_ray_has_a_gpu_of_its_own_and_too_few_are_told_by_name() -> None:
    (found,) = run_module("ray_gpus")
    assert sorted(found["gpus"]) == [0, 1, 2], "the first learner's is reserved, so no other one gets it"
    assert found["num_here"] == 3
    assert "no GPU of this node of the Ray cluster is free for the first learner" in found["reserve"]
    assert "no room for 1 of 2 learners of {'CPU': 1, 'GPU': 1}: after 1 s {'CPU': 2.0} is free" in found["place"]
    assert "no room for sampler 4 of {'GPU': 1}" in found["sampler"]
    assert "the Ray cluster has 3 GPUs, and this process, which is the first learner, has none" in found["no GPU here"]
    assert found["a CPU is chosen"].startswith("no error")
    assert found["given back"] in range(3)
