"""Batches of every kind of loss, and the steps that learners take with them."""

from __future__ import annotations

import numpy as np
import torch

from naive import random_ids, rl_datum, run
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.learners.sharded import ShardedEngine
from turnwise.engine.training.full_weights import FullWeights
from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import Trainable
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput

CONFIG = EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01, seed=3)
STEP = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
PROMPTS = [random_ids(40, 1), random_ids(25, 2)]
TREES = [rl_datum(PROMPTS[i % 2] + random_ids(9 + i, 10 + i), start=24, seed=i) for i in range(6)]
"""Two prefix trees of three datums each."""
LONERS = [rl_datum(random_ids(30 + i, 70 + i), start=3, seed=i) for i in range(2)]


def with_weights(datum: Datum, weight: float) -> Datum:
    mask = datum.loss_fn_inputs["mask"].to_numpy()
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": weight * mask})


def value_datum(seed: int) -> Datum:
    length, numbers = 20 + seed, np.random.default_rng(seed)
    mask = (np.arange(length) > 8).astype(np.float32)
    columns = {"weights": 0.1 * mask, "returns": numbers.normal(size=length), "values": numbers.normal(size=length)}
    return Datum(ModelInput.from_ints(random_ids(length, seed)), {"mask": mask, **columns})


BATCHES: dict[str, tuple[list[Datum], str, dict[str, float | str]]] = {
    "grpo": ([*TREES, *LONERS], "importance_sampling", {}),
    "tree": (TREES[::2], "importance_sampling", {}),  # one prompt, so that learners must cut it
    "ppo": ([*TREES, *LONERS], "ppo", {"entropy_coef": 0.1, "kl_coef": 0.1}),
    "gspo": ([*TREES, *LONERS], "gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    "critic": ([value_datum(seed) for seed in range(7)], "value", {"value_clip": 0.2}),
    "dpo": ([with_weights(datum, 0.25) for datum in TREES], "dpo", {"beta": 0.3}),
}


def create(engine: Engine, kind: str) -> Trainable:
    if kind == "full":
        return engine.create_full()
    lora = LoraConfig(rank=4, seed=1, train_unembed=kind != "critic")
    return engine.create_critic(lora) if kind == "critic" else engine.create_adapter(lora)


def train(engine: Engine, trainable: Trainable, batch: str, steps: int) -> list[dict[str, float]]:
    datums, loss, settings = BATCHES[batch]
    found = []
    for _ in range(steps):
        output = run(engine.forward_backward(trainable, datums, loss, settings))
        found.append({**output.metrics, **engine.optim_step(trainable, STEP)})
    return found


def whole(engine: Engine, trainable: Trainable, name: str) -> torch.Tensor:
    """The `masters`, `grad` or `exp_avg` of all learners in one flat tensor."""
    if isinstance(trainable, ShardedFullWeights):
        assert isinstance(engine, ShardedEngine)
        return torch.cat([tensor.flatten() for tensor in engine.gather(trainable, name).values()])
    flat = trainable.flat if name == "masters" else getattr(trainable, name)
    if isinstance(trainable, FullWeights):
        return torch.cat([tensor.flatten() for tensor in trainable.layout.views(flat).values()])
    return flat
