"""Two learner processes that share one GPU over gloo train what one process trains, with whole weights and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner_batches import CONFIG, create, train, whole
from naive import relative_error
from turnwise.engine.config import ClusterConfig
from turnwise.engine.engine import Engine
from turnwise.engine.learners.replicated import ReplicatedEngine
from turnwise.engine.learners.sharded import ShardedEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON_GPU = CONFIG.model_copy(update={"device": "cuda", "full_weights": True})
TRAINED = (("lora", "grpo"), ("lora", "ppo"), ("full", "grpo"), ("full", "dpo"), ("critic", "critic"))
NUM_STEPS = 5


@pytest.mark.parametrize("shard", [False, True])
def test_two_learners_on_one_gpu_train_what_one_trains(model_dirs: dict[str, Path], shard: bool) -> None:
    cluster, make = ClusterConfig(learners=2, shard=shard, deadline_s=120), ShardedEngine if shard else ReplicatedEngine
    one = Engine(model_dirs["qwen3"], ON_GPU, name="one")
    two = make(model_dirs["qwen3"], ON_GPU, cluster, name="two")
    try:
        for kind, batch in TRAINED:
            alone, together = create(one, kind), create(two, kind)
            expected, found = train(one, alone, batch, NUM_STEPS), train(two, together, batch, NUM_STEPS)
            error = relative_error(whole(two, together, "masters").cpu(), whole(one, alone, "masters").cpu())
            print(f"shard={shard} {kind} {batch}: relative error of the weights {error:.1e}")
            assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5), (kind, batch)
            assert error < 1e-5, (kind, batch)
    finally:
        two.close()
        one.close()
