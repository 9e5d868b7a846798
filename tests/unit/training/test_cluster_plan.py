from __future__ import annotations

import pytest

from command_line import run_here
from turnwise.training.cluster_plan import cluster_lines, estimate_traffic
from turnwise.training.setup import Setup, read_config, set_up_new


def _setup(*overrides: str) -> Setup:
    return set_up_new(read_config("guess_number", ["model=tiny", "eval.tasks=0", *overrides]))


@pytest.mark.usefixtures("tiny_dir")
def test_the_traffic_of_gradients_is_that_of_a_ring_over_what_is_trained() -> None:
    for count in (1, 2, 8):
        setup = _setup("model.train=full", f"cluster.learners={count}")
        trained = 4 * setup.facts.num_parameters
        traffic = estimate_traffic(setup, setup.make_plan().num_trained_parameters)
        assert traffic.gradients == 2 * trained * (count - 1) // count
        assert traffic.state == (3 * trained if count > 1 else 0)
    adapter = _setup("cluster.learners=2")
    critic = _setup("cluster.learners=2", "method=ppo", "train.substeps=2")
    sent = [estimate_traffic(one, one.make_plan().num_trained_parameters).gradients for one in (adapter, critic)]
    assert sent[1] > 2 * sent[0], "two optimizer steps, and the critic's gradient too"


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_names_every_process() -> None:
    lines = cluster_lines(_setup("cluster.learners=3", "cluster.env_workers=2"))
    assert sum(line.startswith("learner ") for line in lines) == 3
    assert sum(line.startswith("env worker ") for line in lines) == 2
    printed = run_here("cluster", "plan", "guess_number", "model=tiny", "cluster.learners=2")
    assert "learner 1    a process of this machine" in printed
