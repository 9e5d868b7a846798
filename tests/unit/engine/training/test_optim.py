from __future__ import annotations

import pytest
import torch

from turnwise.engine.training import optim
from turnwise.engine.training.optim import adamw_step
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.models.linears import Shape
from turnwise.types import AdamParams, LoraConfig

STEP = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


def test_an_update_in_slices_is_that_of_the_whole_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"model.layers.0.self_attn.q_proj": Shape(outputs=41, inputs=53)}
    whole, sliced = (LoraAdapter(LoraConfig(rank=7, seed=0), shapes, torch.device("cpu")) for _ in range(2))
    for size, one in ((1 << 26, whole), (64, sliced)):
        monkeypatch.setattr(optim, "CACHED_SLICE", size)
        numbers = torch.Generator().manual_seed(1)
        for _ in range(3):
            one.grad.copy_(torch.randn(one.grad.shape, generator=numbers))
            found = adamw_step(one, STEP)
        assert found["optimizer_step"] == 3
        assert not one.grad.any()
    assert len(whole.flat) % 64 > 0, "the last slice is a part of one"
    for name in ("flat", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(sliced, name), getattr(whole, name)), name
