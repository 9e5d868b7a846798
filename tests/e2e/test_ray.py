"""Learners, samplers and env workers on a local Ray cluster of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ray_environment import ray_python

HANG_S = 1500.0
"""Only a hang takes so long; the first test also installs Ray."""
TESTS = Path(__file__).parents[1]


def _campaign(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [str(ray_python()), "-m", "campaigns.ray_kills", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "OMP_NUM_THREADS": "1"},
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(HANG_S + 500)
@pytest.mark.usefixtures("tiny_dir")
def test_a_run_that_loses_a_learner_a_sampler_and_a_node_ends_with_the_weights_of_one_process() -> None:
    found = _campaign(
        *("--kills", "learner,sampler,node", "--steps", "10", "--samplers", "1"),
        *("--learners", "3", "--min-learners", "2", "--cpus", "1"),
    )
    assert found["killed"] == ["learner", "sampler", "node"]
    assert found["steps"] == 10
    check_equal(found)


def check_equal(found: dict[str, Any]) -> None:
    """The run made what a run of one process makes that nobody touched."""
    assert found["state"] == "finished"
    assert found["relative_error"] < 1e-5
    assert (found["attempts_lost"], found["attempts_doubled"], found["attempts_with_other_tokens"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(HANG_S + 500)
@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize("trained", [("--kills", "learner"), ("--kills", "0", "--full")])
def test_learners_with_parts_of_the_weights_are_actors_too(trained: tuple[str, ...]) -> None:
    found = _campaign(*trained, "--shard", "--steps", "4", "--samplers", "1")
    assert found["steps"] == 4
    check_equal(found)
