"""Learners and env workers on a local Ray cluster of two nodes."""

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
    assert found["state"] == "finished"
    assert found["killed"] == ["learner", "sampler", "node"]
    assert found["steps"] == 10
    assert found["relative_error"] < 1e-5
    assert (found["attempts_lost"], found["attempts_doubled"]) == (0, 0)
