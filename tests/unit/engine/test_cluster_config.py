from __future__ import annotations

import pytest

from cases import for_each
from turnwise.engine.config import ClusterConfig
from turnwise.errors import ConfigError
from turnwise.training.setup import read_config


@for_each(
    ("options", "why"),
    [
        ({"samplers": 2}, "each sampler is one of the learners"),
        ({"samplers": 2, "learners": 2, "shard": True}, "no learner holds the whole model"),
        ({"samplers": 2, "learners": 2, "min_learners": 1}, "would have fewer samplers"),
        ({"address": "auto"}, "address=auto is not read"),
        ({"deadline_s": 5}, "deadline_s=5 is not read"),
    ],
)
def test_samplers_that_cannot_be_placed_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ClusterConfig.model_validate(options)


def test_samplers_of_their_own_read_an_address_and_a_deadline_without_another_learner() -> None:
    config = ClusterConfig(address="auto", placement="separate", samplers=3, deadline_s=5)
    assert (config.num_devices, config.has_fleet) == (4, True)
    assert not any(config.samples_too(learner) for learner in range(3))
    both = ClusterConfig(learners=3, samplers=2)
    assert [both.samples_too(learner) for learner in range(3)] == [False, True, False], "the first one leads"


@for_each(
    ("options", "why"),
    [
        (("rollout.backend=vllm",), "cluster.placement=separate is not read with rollout.backend=vllm"),
        (("model.routing_replay=true",), "which experts another process chose"),
        (("model.base_url=http://127.0.0.1:1",), "cluster.placement is not read with model.base_url"),
    ],
)
def test_samplers_beside_another_sampler_are_refused(options: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_config("guess_number", ["model=tiny", "cluster.placement=separate", *options])
