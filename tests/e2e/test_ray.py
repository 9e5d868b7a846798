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
    "a lost node": "--kills learner,sampler,node --steps 8 --samplers 1 --min-learners 1",
}
"""What runs on the cluster, one after the other. Learners have room on the second node alone, which the last one loses.
"""


@pytest.fixture(scope="module")
def found(tiny_dir: Path) -> Mapping[str, Any]:  # noqa: ARG001
    done = subprocess.run(
        [str(ray_python()), "-m", "campaigns.ray_kills", *" also ".join(RUNS.values()).split()],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.strip().splitlines() if line.startswith("{")]
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
