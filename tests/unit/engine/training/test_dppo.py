"""dppo_tv and OPSM against the published vectors and their own formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from turnwise.engine.training.losses import make_loss
from unit.engine.training.test_losses import V1_A, V1_MASK, V1_P, V1_Q, f64, make_columns, value_and_grad

VECTORS = json.loads((Path(__file__).parent / "algorithm_vectors.json").read_text())
TRAINED = [i for i, on in enumerate(V1_MASK) if on]


def test_dppo_drops_the_token_whose_probability_moved_too_far_with_its_advantage() -> None:
    moved = (f64(V1_P).exp() - f64(V1_Q).exp())[TRAINED]
    assert moved.tolist() == pytest.approx(VECTORS["dppo dp actions"], abs=1e-6)
    loss = make_loss("dppo_tv", {"tv_threshold": 0.1, "tv_penalty": 0.0})
    _, grad = value_and_grad(loss, V1_P, make_columns(V1_MASK, V1_Q, V1_A))
    assert [float(grad[i] == 0) for i in TRAINED] == VECTORS["dppo mask(thr .1)"]
    kept = value_and_grad(make_loss("importance_sampling"), V1_P, make_columns(V1_MASK, V1_Q, V1_A))[1]
    assert [grad[i] for i in TRAINED[1:]] == pytest.approx([kept[i] for i in TRAINED[1:]])


def test_dppo_pulls_dropped_tokens_back_by_the_squared_log_ratio() -> None:
    columns = make_columns(V1_MASK, V1_Q, V1_A)
    value, grad = value_and_grad(make_loss("dppo_tv", {"tv_threshold": 0.0, "tv_penalty": 0.5}), V1_P, columns)
    log_ratio = (f64(V1_P) - f64(V1_Q))[TRAINED]
    with_advantage = torch.tensor([False, True, True, False])  # moved against the sign of its advantage
    surrogate = torch.where(with_advantage, log_ratio.exp() * f64(V1_A)[TRAINED], 0.0)
    assert value == pytest.approx((0.5 * log_ratio.square() - surrogate).sum().item())
    assert grad[TRAINED[0]] == pytest.approx(log_ratio[0].item())


def test_opsm_rejects_punished_tokens_of_sequences_that_drifted_and_keeps_the_rest() -> None:
    drifted = [0.0, -0.1, -0.2, 0.0, -0.1, -0.3]  # the sampler was surer: mean log(sampler / trainer) is positive
    columns = make_columns(V1_MASK, drifted, V1_A)
    _, grad = value_and_grad(make_loss("importance_sampling", {"opsm_threshold": 1e-4}), V1_P, columns)
    _, plain = value_and_grad(make_loss("importance_sampling"), V1_P, columns)
    assert [grad[i] for i in TRAINED] == pytest.approx([plain[1], plain[2], 0.0, 0.0])
    near = make_columns(V1_MASK, V1_P, V1_A)
    _, kept = value_and_grad(make_loss("importance_sampling", {"opsm_threshold": 1e-4}), V1_P, near)
    assert all(kept[i] != 0 for i in TRAINED)
    assert not make_loss("ppo", {"opsm_threshold": 1e-4}).is_separable
