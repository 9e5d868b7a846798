"""Vectors of the algorithms' specification about single terms of a loss, and the traps that it names for them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import for_each
from turnwise.engine.training.losses import LossColumns, make_loss
from unit.engine.training.test_losses import (
    V1_A,
    V1_MASK,
    V1_P,
    V1_Q,
    V2_OLD,
    f64,
    make_columns,
    random_batch,
    v1_columns,
    value_and_grad,
)

VECTORS = json.loads((Path(__file__).parent / "algorithm_vectors.json").read_text())
TRAINED = [i for i, on in enumerate(V1_MASK) if on]


def test_dro_reads_its_mask_and_so_does_not_leak_onto_observations() -> None:
    wrong_value, wrong_grad = VECTORS["dro_unmasked(TRAP)"]
    everything = make_columns([1] * 6, V1_Q, V1_A)
    leaked = value_and_grad(make_loss("dro", {"beta": 0.05}), V1_P, everything)
    assert leaked[0] == pytest.approx(wrong_value, abs=1e-6)
    assert leaked[1] == pytest.approx(wrong_grad, abs=1e-6)
    value, grad = value_and_grad(make_loss("dro", {"beta": 0.05}), V1_P, v1_columns())
    assert value == pytest.approx(VECTORS["dro_masked"][0], abs=1e-6)
    assert (grad[0], grad[3]) == (0, 0)


def test_gspo_takes_the_geometric_mean_of_the_ratios() -> None:
    wide = make_loss("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0})
    assert wide.metrics(f64(V1_P), None, v1_columns())["ratio:mean"] == pytest.approx(VECTORS["gspo_s"], abs=1e-6)


def test_a_token_mask_keeps_what_lies_inside_its_bounds() -> None:
    config = {"correction": "token_mask", "correction_low": 0.95, "correction_high": 1.1}
    _, grad = value_and_grad(make_loss("ppo", config), V1_P, v1_columns(old_logprobs_T=f64(V2_OLD)))
    assert [float(grad[i] != 0) for i in TRAINED] == VECTORS["icepop_mask_[0.95,1.1]"]


def test_the_correction_and_the_ratio_multiply_to_the_whole_gap() -> None:
    """One token: sampler -1, old -0.6, trainer -0.5."""
    factor, ratio, whole = VECTORS["decoupled one token w,r,w*r"]
    columns = LossColumns(
        mask_T=torch.tensor([True]),
        weights_T=f64([1.0]),
        sampler_logprobs_T=f64([-1.0]),
        old_logprobs_T=f64([-0.6]),
        advantages_T=f64([1.0]),
        datum_T=torch.zeros(1, dtype=torch.int64),
        num_datums=1,
    )
    metrics = make_loss("importance_sampling").metrics(f64([-0.5]), None, columns)
    assert metrics["correction_factor:mean"] == pytest.approx(factor, abs=1e-6)
    assert metrics["ratio:mean"] == pytest.approx(ratio, abs=1e-6)
    assert -metrics["loss:sum"] == pytest.approx(whole, abs=1e-6)


def test_a_share_puts_the_old_policy_between_sampler_and_trainer() -> None:
    """One token: sampler -1 at version 5, trainer -0.5 at version 10, the old policy at version 9."""
    columns = make_columns([1], [-1.0], [1.0], old_share_T=f64([(9 - 5) / (10 - 5)]))
    told = make_columns([1], [-1.0], [1.0], old_logprobs_T=f64([VECTORS["prox loglinear"]]))
    loss = make_loss("ppo")
    (value, grad), (told_value, told_grad) = (value_and_grad(loss, [-0.5], one) for one in (columns, told))
    assert (value, *grad) == pytest.approx((told_value, *told_grad))
    assert loss.metrics(f64([-0.5]), None, columns)["ratio:mean"] == pytest.approx(math.exp(0.1))


@for_each("name", ["importance_sampling", "ppo", "cispo", "dro", "dppo_tv", "gspo"])
@for_each("config", [{}, {"correction": "token_tis"}, {"correction": "sequence_geo_mask"}])
def test_the_interpolated_old_policy_equals_one_that_is_worked_out_token_by_token(
    name: str, config: dict[str, str]
) -> None:
    p_T, _, columns = random_batch(11, old_logprobs_T=None)
    lags = [index % 4 for index in range(len(p_T))]
    shares = [lag / (lag + 1) for lag in lags]
    old = [
        q + (version_old - version_q) / (version_old + 1 - version_q) * (p - q)
        for p, q, version_old, version_q in zip(
            p_T.tolist(), columns.sampler_logprobs_T.tolist(), [7] * len(lags), [7 - lag for lag in lags], strict=True
        )
    ]
    loss = make_loss(name, config)
    found = value_and_grad(loss, p_T, replace(columns, old_share_T=f64(shares)))
    expected = value_and_grad(loss, p_T, replace(columns, old_logprobs_T=f64(old)))
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert found[1] == pytest.approx(expected[1], abs=1e-12)  # the old policy is a constant: no gradient through it


def test_k3_in_the_loss_has_the_gradient_of_the_other_kl() -> None:
    probabilities, reference = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]
    found = torch.zeros(3, dtype=torch.float64)
    for action, (p, ref) in enumerate(zip(probabilities, reference, strict=True)):
        logits = torch.log(f64(probabilities)).requires_grad_()
        columns = LossColumns(
            mask_T=torch.tensor([True]),
            weights_T=f64([1.0]),
            sampler_logprobs_T=f64([0.0]),
            advantages_T=f64([0.0]),
            ref_logprobs_T=f64([math.log(ref)]),
            datum_T=torch.zeros(1, dtype=torch.int64),
            num_datums=1,
        )
        loss = make_loss("importance_sampling", {"kl_coef": 1.0, "kl_estimator": "k3"})
        loss(torch.log_softmax(logits, 0)[action : action + 1], None, columns).sum().backward()
        assert logits.grad is not None
        found += p * logits.grad
    assert found.tolist() == pytest.approx(VECTORS["E_grad_k3_in_loss"], abs=1e-6)
    assert found.tolist() == pytest.approx(VECTORS["grad_forwardKL(ref||p)"], abs=1e-6)
    assert found.tolist() != pytest.approx(VECTORS["gradKL_true"], abs=1e-3)
