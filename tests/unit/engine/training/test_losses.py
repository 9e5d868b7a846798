"""Losses against the published vectors, a per-token loop written from the formulas, and finite differences.

Axes: `_T` token. Everything runs in float64, so that a wrong formula cannot hide behind rounding.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import for_each
from turnwise.engine.training.losses import Loss, LossColumns, make_loss

VECTORS = json.loads((Path(__file__).parent / "algorithm_vectors.json").read_text())
ALL = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
RL = ALL[1:]
SMOOTH = ("cross_entropy", "importance_sampling", "ppo", "dro")  # no stop-gradient: plain autograd can be checked
REGULARISED = {"kl_coef": 0.3, "kl_estimator": "k3", "kl_importance": 1, "entropy_coef": 0.2}

V1_P = [-3.0, -0.5, -1.0, -2.0, -0.2, -1.5]
V1_MASK = [0, 1, 1, 0, 1, 1]
V1_Q = [0.0, -0.7, -0.9, 0.0, -0.6, -1.2]
V2_OLD = [0.0, -0.6, -0.95, 0.0, -0.4, -1.3]
V1_A = [0.0, 1.0, 1.0, 0.0, -0.5, -0.5]


def f64(values: list[float] | np.ndarray) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def make_columns(mask: list[int], q: list[float], a: list[float], **more: Tensor) -> LossColumns:
    """One datum, weight 1 on each trained token, unless `more` says otherwise."""
    fields: dict[str, Tensor] = {
        "mask_T": torch.tensor(mask, dtype=torch.bool),
        "weights_T": f64([float(m) for m in mask]),
        "sampler_logprobs_T": f64(q),
        "advantages_T": f64(a),
        "datum_T": torch.zeros(len(mask), dtype=torch.int64),
    } | more
    return LossColumns(num_datums=int(fields["datum_T"].max()) + 1 if mask else 1, **fields)


def v1_columns(**more: Tensor) -> LossColumns:
    return make_columns(V1_MASK, V1_Q, V1_A, **more)


def value_and_grad(
    loss: Loss, p: list[float] | Tensor, columns: LossColumns, entropies: Tensor | None = None
) -> tuple[float, list[float]]:
    p_T = torch.as_tensor(p, dtype=torch.float64).clone().requires_grad_()
    total = loss(p_T, entropies, columns).sum()
    total.backward()
    assert p_T.grad is not None
    return total.item(), p_T.grad.tolist()


def random_batch(seed: int, **absent: None) -> tuple[Tensor, Tensor, LossColumns]:
    """Logprobs, entropies and every column for three datums; name an optional column to leave it out."""
    rng = np.random.default_rng(seed)
    num = 14
    p = rng.uniform(-2.5, -0.1, num)
    mask = rng.random(num) < 0.75
    columns = LossColumns(
        mask_T=torch.tensor(mask),
        weights_T=f64(np.where(mask, rng.uniform(0.1, 1.0, num), 0.0)),
        advantages_T=f64(rng.normal(size=num)),
        sampler_logprobs_T=f64(p + rng.normal(0, 0.4, num)),
        old_logprobs_T=f64(p + rng.normal(0, 0.2, num)),
        ref_logprobs_T=f64(p + rng.normal(0, 0.5, num)),
        sequence_ratio_mask_T=torch.tensor(mask & (rng.random(num) < 0.8)),
        datum_T=torch.tensor(np.sort(rng.integers(0, 3, num))),
        num_datums=3,
    )
    return f64(p), f64(rng.uniform(0.1, 2.0, num)), replace(columns, **absent)


@for_each(
    ("name", "config", "key"),
    [
        ("cross_entropy", {}, "cross_entropy"),
        ("importance_sampling", {}, "importance_sampling"),
        ("ppo", {}, "ppo_0.8_1.2"),
        ("ppo", {"clip_high_threshold": 1.28}, "ppo_0.8_1.28"),
        ("ppo", {"dual_clip": 1.4}, "ppo_dual_c1.4"),
        ("cispo", {}, "cispo_0_4"),
        ("cispo", {"clip_high_threshold": 1.2}, "cispo_0_1.2"),
        ("dro", {}, "dro_masked"),
        ("gspo", {}, "gspo_3e-4_4e-4"),
        ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, "gspo_0.8_1.2"),
    ],
)
def test_value_and_gradient_match_vector_v1(name: str, config: dict[str, float], key: str) -> None:
    value, grad = value_and_grad(make_loss(name, config), V1_P, v1_columns())
    assert value == pytest.approx(VECTORS[key][0], abs=1e-6)
    assert grad == pytest.approx(VECTORS[key][1], abs=1e-6)


@for_each(
    ("config", "key", "rho"),
    [
        ({}, "decoupled_ppo_loss", VECTORS["rho_actions"]),
        ({"correction": "token_tis", "correction_high": 1.2}, "decoupled_ppo_TIS1.2_loss", VECTORS["tis_token_C1.2"]),
        (
            {"correction": "token_mask", "correction_low": 0.95, "correction_high": 1.1},
            "decoupled_ppo_icepop_loss",
            [0, VECTORS["rho_actions"][1], 0, 0],
        ),
    ],
)
def test_decoupled_ppo_matches_vector_v2(config: dict[str, float | str], key: str, rho: list[float]) -> None:
    value, grad = value_and_grad(make_loss("ppo", config), V1_P, v1_columns(old_logprobs_T=f64(V2_OLD)))
    trained = [i for i, m in enumerate(V1_MASK) if m]
    expected = [-f * math.exp(V1_P[i] - V2_OLD[i]) * V1_A[i] for f, i in zip(rho, trained, strict=True)]
    assert value == pytest.approx(VECTORS[key], abs=1e-6)
    assert [grad[i] for i in trained] == pytest.approx(expected, abs=2e-6)


def test_sequence_corrections_see_the_product_and_the_geometric_mean_of_v2() -> None:
    columns = v1_columns(old_logprobs_T=f64(V2_OLD))
    truncated = make_loss("ppo", {"correction": "sequence_tis"}).metrics(f64(V1_P), None, columns)
    assert truncated["correction_factor:mean"] == pytest.approx(VECTORS["seq_product"], abs=1e-6)
    for kind, ratio in (("sequence_mask", VECTORS["seq_product"]), ("sequence_geo_mask", VECTORS["seq_geo"])):
        for low, high, rejected in ((ratio - 1e-5, ratio + 1e-5, 0.0), (ratio + 1e-5, 2.0, 1.0)):
            config = {"correction": kind, "correction_low": low, "correction_high": high}
            metrics = make_loss("importance_sampling", config).metrics(f64(V1_P), None, columns)
            assert metrics["rejected_fraction:mean"] == rejected


class NaiveLoss:
    """The formulas, one token at a time; `frozen` is where stop-gradients are evaluated."""

    def __init__(self, name: str, config: dict, frozen: list[float], h: list[float], columns: LossColumns) -> None:
        self.name, self.config, self.frozen, self.h = name, config, frozen, h
        self.q, self.a, self.w = (
            getattr(columns, key).tolist() for key in ("sampler_logprobs_T", "advantages_T", "weights_T")
        )
        self.old = None if columns.old_logprobs_T is None else columns.old_logprobs_T.tolist()
        self.ref = [0.0] * len(h) if columns.ref_logprobs_T is None else columns.ref_logprobs_T.tolist()
        self.anchor = self.old or self.q
        self.trained = [i for i, is_trained in enumerate(columns.mask_T.tolist()) if is_trained]
        self.datum = columns.datum_T.tolist()
        in_ratio = columns.mask_T if columns.sequence_ratio_mask_T is None else columns.sequence_ratio_mask_T
        self.in_ratio = [i for i in self.trained if in_ratio[i]]

    def total(self, p: list[float]) -> float:
        kept = [i for i in self.trained if self.factor(i) is not None]
        return sum(
            self.w[i] * ((self.factor(i) or 0.0) * self.policy(i, p[i]) + self.regulariser(i, p[i])) for i in kept
        )

    def siblings(self, i: int, pool: list[int]) -> list[int]:
        return [j for j in pool if self.datum[j] == self.datum[i]]

    def log_gap(self, j: int) -> float:
        return (self.old[j] if self.old else self.frozen[j]) - self.q[j]

    def factor(self, i: int) -> float | None:
        """What the policy term is multiplied by; None: rejected."""
        if self.name == "cross_entropy":
            return 1.0
        config, kind = self.config, self.config.get("correction", "none")
        whole = [self.log_gap(j) for j in self.siblings(i, self.in_ratio)]
        token, product = naive_exp(self.log_gap(i)), naive_exp(sum(whole))
        geometric = naive_exp(sum(whole) / max(len(whole), 1))
        if kind.endswith("mask"):
            judged = {"token_mask": token, "sequence_mask": product, "sequence_geo_mask": geometric}[kind]
            if not config["correction_low"] <= judged <= config["correction_high"]:
                return None
        gaps = [naive_exp(self.log_gap(j)) for j in self.siblings(i, self.trained)]
        if config.get("outlier_rejection") and not all(1e-4 <= gap <= 100 for gap in gaps):
            return None
        if kind.endswith("tis"):
            return min({"token_tis": token, "sequence_tis": product}[kind], config["correction_high"])
        return token if self.old else 1.0

    def policy(self, i: int, p: float) -> float:
        a, config = self.a[i], self.config
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", math.inf)
        ratio = naive_exp(p - self.anchor[i])
        if self.name == "cross_entropy":
            return -p
        if self.name == "importance_sampling":
            return -ratio * a
        if self.name == "cispo":
            return -min(max(naive_exp(self.frozen[i] - self.anchor[i]), low), high) * p * a
        if self.name == "dro":
            return -(a * p - config["beta"] / 2 * (p - self.anchor[i]) ** 2)
        if self.name == "gspo":
            whole = [self.frozen[j] - self.anchor[j] for j in self.siblings(i, self.in_ratio)]
            ratio = naive_exp(sum(whole) / max(len(whole), 1)) * math.exp(p - self.frozen[i])
        objective = min(ratio * a, min(max(ratio, low), high) * a)
        has_floor = config.get("dual_clip") and a < 0
        return -max(objective, config["dual_clip"] * a) if has_floor else -objective

    def regulariser(self, i: int, p: float) -> float:
        config, x = self.config, p - self.ref[i]
        kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[config.get("kl_estimator", "k2")]
        kl *= naive_exp(self.frozen[i] - self.q[i]) if config.get("kl_importance") else 1.0
        return config.get("kl_coef", 0.0) * kl - config.get("entropy_coef", 0.0) * self.h[i]


def naive_exp(x: float) -> float:
    return math.exp(min(20.0, max(-20.0, x)))


CLIPS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 1.3},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.4},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
}
VARIANTS = [
    {},
    REGULARISED,
    {"kl_coef": 0.5, "kl_estimator": "k1"},
    {"kl_coef": 0.5},
    {"correction": "token_mask", "correction_low": 0.7, "correction_high": 1.3},
    {"correction": "sequence_mask", "correction_low": 0.6, "correction_high": 1.6},
    {"correction": "sequence_geo_mask", "correction_low": 0.95, "correction_high": 1.1, **REGULARISED},
    {"outlier_rejection": 1},
]
TRUNCATIONS = [
    {"correction": "token_tis", "correction_high": 1.05},
    {"correction": "sequence_tis", "correction_high": 1.1, **REGULARISED},
]
CASES = [("cross_entropy", {}, True), ("cross_entropy", {}, False)]
CASES += [(name, variant, has_old) for name in RL for variant in VARIANTS for has_old in (True, False)]
CASES += [(name, variant, True) for name in RL for variant in TRUNCATIONS]
SEPARABLE = [case for case in CASES if make_loss(case[0], {**CLIPS[case[0]], **case[1]}).is_separable]


@for_each(("name", "variant", "has_old"), CASES)
@for_each("seed", [0, 1])
def test_value_and_gradient_match_a_per_token_loop(name: str, variant: dict, has_old: bool, seed: int) -> None:
    p_T, entropies_T, columns = random_batch(seed, **({} if has_old else {"old_logprobs_T": None}))
    if variant.get("outlier_rejection"):
        columns.sampler_logprobs_T[int(columns.mask_T.nonzero()[0])] -= 6.0
    config = {**CLIPS[name], **variant}
    value, grad = value_and_grad(make_loss(name, config), p_T, columns, entropies_T)
    p, h, step = p_T.tolist(), entropies_T.tolist(), 1e-6
    naive = NaiveLoss(name, config, p, h, columns)
    assert value == pytest.approx(naive.total(p), abs=1e-9)
    for i in range(len(p)):
        up, down = ([x + sign * step * (j == i) for j, x in enumerate(p)] for sign in (1, -1))
        assert grad[i] == pytest.approx((naive.total(up) - naive.total(down)) / (2 * step), abs=1e-7, rel=1e-5)


@for_each("name", SMOOTH)
def test_autograd_agrees_with_finite_differences_in_logprobs_and_entropies(name: str) -> None:
    p_T, entropies_T, columns = random_batch(3)
    config = CLIPS[name] | ({} if name == "cross_entropy" else {"kl_coef": 0.3, "entropy_coef": 0.2})
    loss = make_loss(name, config)
    inputs = (p_T.requires_grad_(), entropies_T.requires_grad_())
    assert torch.autograd.gradcheck(lambda p, h: loss(p, h, columns), inputs)


@given(
    st.sampled_from(ALL), st.lists(st.sampled_from([0.0, -1e4, 1e4, math.nan, math.inf]), min_size=3), st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_nothing_on_untrained_positions_reaches_loss_or_gradient(name: str, filler: list[float], seed: int) -> None:
    p_T, entropies_T, columns = random_batch(seed)
    columns.mask_T[:2] = torch.tensor([False, True])
    config = CLIPS[name] | ({} if name == "cross_entropy" else {**REGULARISED, "correction": "sequence_mask"})
    loss = make_loss(name, config)
    before = value_and_grad(loss, p_T, columns, entropies_T)
    junk_T = f64([filler[i % len(filler)] for i in range(len(p_T))])

    def spoil(column_T: Tensor) -> Tensor:
        return torch.where(columns.mask_T, column_T, junk_T)

    spoilt = {
        key: spoil(getattr(columns, key))
        for key in ("weights_T", "advantages_T", "sampler_logprobs_T", "old_logprobs_T", "ref_logprobs_T")
    }
    outside_T = columns.sequence_ratio_mask_T
    assert outside_T is not None
    spoilt["sequence_ratio_mask_T"] = outside_T | ~columns.mask_T
    after = value_and_grad(loss, spoil(p_T), replace(columns, **spoilt), spoil(entropies_T))
    assert after == before
    assert all(g == 0 for g, m in zip(after[1], columns.mask_T, strict=True) if not m)


def test_a_token_with_zero_advantage_counts_in_ratio_kl_entropy_and_token_count() -> None:
    columns = make_columns([1, 1], [-1.0, -1.0], [1.0, 0.0], ref_logprobs_T=f64([-1.0, -1.0]))
    gspo = make_loss("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0})
    assert value_and_grad(gspo, [-1.0, -0.6], columns)[0] == pytest.approx(-math.exp(0.2))
    entropies_T = f64([0.5, 0.5]).requires_grad_()
    loss = make_loss("ppo", {"kl_coef": 1.0, "entropy_coef": 0.1})
    _, grad = value_and_grad(loss, [-1.0, -0.6], columns, entropies_T)
    assert grad[1] == pytest.approx(0.4)
    assert entropies_T.grad is not None
    assert entropies_T.grad.tolist() == pytest.approx([-0.1, -0.1])
    assert loss.metrics(f64([-1.0, -0.6]), entropies_T, columns)["num_trained_tokens:sum"] == 2


@for_each(("name", "variant", "has_old"), CASES)
def test_a_batch_costs_the_sum_of_its_datums_in_any_order(name: str, variant: dict, has_old: bool) -> None:
    p_T, entropies_T, columns = random_batch(4, **({} if has_old else {"old_logprobs_T": None}))
    loss = make_loss(name, {**CLIPS[name], **variant})
    value, grad = value_and_grad(loss, p_T, columns, entropies_T)
    total, parts = 0.0, torch.zeros_like(p_T)
    for datum in (2, 0, 1):
        index = (columns.datum_T == datum).nonzero().flatten().flip(0)
        part, part_grad = value_and_grad(loss, p_T[index], columns.slice(index), entropies_T[index])
        total, parts[index] = total + part, f64(part_grad)
    assert total == pytest.approx(value, abs=1e-12)
    assert parts.tolist() == pytest.approx(grad, abs=1e-12)


@given(st.permutations(range(14)), st.integers(1, 13), st.sampled_from(SEPARABLE))
@settings(max_examples=60, deadline=None)
def test_a_separable_loss_may_be_cut_between_any_tokens(order: list[int], cut: int, case: tuple) -> None:
    name, variant, has_old = case
    p_T, entropies_T, columns = random_batch(5, **({} if has_old else {"old_logprobs_T": None}))
    loss = make_loss(name, {**CLIPS[name], **variant})
    whole_T = loss(p_T, entropies_T, columns)
    for index in (torch.tensor(order[:cut]), torch.tensor(order[cut:])):
        part_T = loss(p_T[index], entropies_T[index], columns.slice(index))
        assert part_T.tolist() == pytest.approx(whole_T[index].tolist(), abs=1e-12)


@for_each("name", RL)
@for_each("kl_coef", [0.0, 0.5])
def test_scaling_advantages_scales_the_gradient_only_without_dro_and_kl(name: str, kl_coef: float) -> None:
    p_T, _, columns = random_batch(6)
    loss = make_loss(name, {**CLIPS[name], "kl_coef": kl_coef})
    _, grad = value_and_grad(loss, p_T, columns)
    scaled = [3 * g for g in grad]
    _, by_advantages = value_and_grad(loss, p_T, replace(columns, advantages_T=3 * columns.advantages_T))
    _, by_weights = value_and_grad(loss, p_T, replace(columns, weights_T=3 * columns.weights_T))
    assert by_weights == pytest.approx(scaled)
    assert (by_advantages == pytest.approx(scaled)) is (name != "dro" and kl_coef == 0)


def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce() -> None:
    p_T, _, columns = random_batch(7, old_logprobs_T=None)
    columns = replace(columns, sampler_logprobs_T=p_T.clone())
    reinforce = torch.where(columns.mask_T, -columns.weights_T * columns.advantages_T, 0.0).tolist()
    for name in ("importance_sampling", "ppo", "cispo", "gspo", "dro"):
        loss = make_loss(name)
        assert value_and_grad(loss, p_T, columns)[1] == pytest.approx(reinforce, abs=1e-12), name
        metrics = loss.metrics(p_T, None, columns)
        assert metrics["ratio:max"] == 1
        assert [v for k, v in metrics.items() if k.startswith("clip_fraction")] == (
            [0, 0] if loss.info.is_clipped else []
        )


@for_each("name", RL)
def test_bypass_equals_decoupled_when_old_is_the_sampler(name: str) -> None:
    p_T, _, columns = random_batch(8, old_logprobs_T=None)
    decoupled = replace(columns, old_logprobs_T=columns.sampler_logprobs_T)
    loss = make_loss(name, CLIPS[name])
    assert value_and_grad(loss, p_T, decoupled) == value_and_grad(loss, p_T, columns)


def test_decoupled_ppo_is_importance_sampling_where_nothing_clips() -> None:
    p_T, _, columns = random_batch(9)
    wide = make_loss("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0})
    value, grad = value_and_grad(wide, p_T, columns)
    expected = value_and_grad(make_loss("importance_sampling"), p_T, replace(columns, old_logprobs_T=None))
    assert value == pytest.approx(expected[0])
    assert grad == pytest.approx(expected[1])


@for_each("dual_clip", [0.0, 3.0])
@for_each("advantage", [1.0, -1.0])
@for_each("ratio", [0.7, 0.9, 1.1, 1.3, 2.9, 3.1])
def test_ppo_gradient_vanishes_exactly_where_the_clip_table_says(
    ratio: float, advantage: float, dual_clip: float
) -> None:
    columns = make_columns([1], [-2.0], [advantage])
    p = [-2.0 + math.log(ratio)]
    loss = make_loss("ppo", {"dual_clip": dual_clip})
    clipped_high, clipped_low = advantage > 0 and ratio > 1.2, advantage < 0 and ratio < 0.8
    clipped_dual = dual_clip > 0 and advantage < 0 and ratio > dual_clip
    _, grad = value_and_grad(loss, p, columns)
    assert grad == pytest.approx([0.0 if clipped_high or clipped_low or clipped_dual else -ratio * advantage])
    metrics = loss.metrics(f64(p), None, columns)
    assert (metrics["clip_fraction_high:mean"], metrics["clip_fraction_low:mean"]) == (clipped_high, clipped_low)
    assert metrics.get("clip_fraction_dual:mean", 0.0) == clipped_dual


def test_clip_bounds_that_come_per_token_replace_the_configured_ones() -> None:
    columns = make_columns([1, 1], [-1.0, -1.0], [1.0, 1.0], clip_high_T=f64([1.1, 1.5]), clip_low_T=f64([0.9, 0.9]))
    p = [-1.0 + math.log(1.3)] * 2
    for name in ("ppo", "gspo"):
        assert value_and_grad(make_loss(name), p, columns)[1] == pytest.approx([0.0, -1.3])
    assert value_and_grad(make_loss("cispo"), p, columns)[1] == pytest.approx([-1.1, -1.3])


def test_kl_estimators_match_their_values_and_expected_gradients_on_a_categorical() -> None:
    single = make_columns([1], [-1.0], [0.0], ref_logprobs_T=f64([-1.3]))
    p_V, ref_V = f64([0.5, 0.3, 0.2]), f64([0.4, 0.4, 0.2])
    # Every outcome once, weighted by its probability: the sum over tokens is the expectation under p.
    columns = make_columns([1, 1, 1], p_V.log().tolist(), [0.0] * 3, weights_T=p_V, ref_logprobs_T=ref_V.log())
    for index, name in enumerate(("k1", "k2", "k3")):
        loss = make_loss("importance_sampling", {"kl_coef": 1.0, "kl_estimator": name})
        assert loss(f64([-1.0]), None, single).item() == pytest.approx(
            VECTORS["k1k2k3(lp=-1,ref=-1.3)"][index], abs=1e-6
        )
        logits_V = p_V.log().requires_grad_()
        expected = loss(logits_V.log_softmax(0), None, columns).sum()
        expected.backward()
        assert expected.item() == pytest.approx(VECTORS["E_k1,k2,k3"][index], abs=1e-6)
        assert logits_V.grad is not None
        assert logits_V.grad.tolist() == pytest.approx(VECTORS[f"E_grad_{name}_in_loss"], abs=1e-6)
    assert VECTORS["E_k1,k2,k3"][0] == VECTORS["E_k1,k2,k3"][2] == VECTORS["cat_KL"]
    assert VECTORS["E_grad_k2_in_loss"] == VECTORS["gradKL_true"]


def test_kl_importance_makes_the_gradient_unbiased_under_another_sampler() -> None:
    p_V, q_V, ref_V = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6]), f64([0.4, 0.4, 0.2])
    columns = make_columns([1, 1, 1], q_V.log().tolist(), [0.0] * 3, weights_T=q_V, ref_logprobs_T=ref_V.log())
    logits_V = p_V.log().requires_grad_()
    loss = make_loss("ppo", {"kl_coef": 1.0, "kl_importance": 1})
    loss(logits_V.log_softmax(0), None, columns).sum().backward()
    assert logits_V.grad is not None
    assert logits_V.grad.tolist() == pytest.approx(VECTORS["gradKL_true"], abs=1e-6)


def test_entropy_bonus_matches_its_vector() -> None:
    logits_V = f64([0.5, 0.3, 0.2]).log().requires_grad_()
    entropy_1 = -(logits_V.softmax(0) * logits_V.log_softmax(0)).sum()[None]
    loss = make_loss("ppo", {"entropy_coef": 1.0})
    bonus = -loss(f64([-1.0]), entropy_1, make_columns([1], [-1.0], [0.0])).sum()
    bonus.backward()
    assert bonus.item() == pytest.approx(VECTORS["entropy"], abs=1e-6)
    assert logits_V.grad is not None
    assert logits_V.grad.tolist() == pytest.approx(VECTORS["dH/dlogits"], abs=1e-6)


@for_each("has_old", [True, False])
def test_rejecting_tokens_leaves_the_loss_of_the_others_alone(has_old: bool) -> None:
    p_T, _, columns = random_batch(10, **({} if has_old else {"old_logprobs_T": None}))
    plain_T = make_loss("ppo")(p_T, None, columns)
    loss = make_loss("ppo", {"correction": "token_mask", "correction_low": 0.9, "correction_high": 1.1})
    rejecting_T = loss(p_T, None, columns)
    judged_T = (columns.old_logprobs_T if columns.old_logprobs_T is not None else p_T) - columns.sampler_logprobs_T
    is_kept_T = (judged_T.exp() >= 0.9) & (judged_T.exp() <= 1.1)
    assert torch.equal(rejecting_T, torch.where(is_kept_T, plain_T, 0.0))
    fraction = (columns.mask_T & ~is_kept_T).sum() / columns.mask_T.sum()
    assert 0 < fraction < 1
    assert loss.metrics(p_T, None, columns)["rejected_fraction:mean"] == pytest.approx(fraction.item())


def test_an_outlier_costs_its_whole_sequence_and_no_other() -> None:
    more = {"datum_T": torch.tensor([0, 0, 1]), "sequence_ratio_mask_T": torch.tensor([False, True, True])}
    columns = make_columns([1, 1, 1], [-9.0, -1.0, -1.0], [1.0, 1.0, 1.0], **more)
    loss = make_loss("importance_sampling", {"outlier_rejection": 1})
    assert value_and_grad(loss, [-1.0, -1.0, -1.0], columns) == (-1.0, [0.0, 0.0, -1.0])


def test_a_ratio_on_the_bound_is_kept() -> None:
    columns = make_columns([1], [-1.0], [1.0])
    loss = make_loss("ppo", {"correction": "token_mask", "correction_low": 1.0, "correction_high": 1.0})
    assert value_and_grad(loss, [-1.0], columns)[0] == -1.0


def test_a_rejected_token_leaves_the_kl_and_entropy_terms_too() -> None:
    columns = make_columns([1], [-9.0], [1.0], ref_logprobs_T=f64([-2.0]))
    loss = make_loss("cispo", {"correction": "token_mask", "kl_coef": 1.0, "entropy_coef": 1.0})
    assert value_and_grad(loss, [-1.0], columns, f64([0.7])) == (0.0, [0.0])


@for_each("name", ALL)
@for_each("num", [0, 5])
def test_a_batch_without_trained_tokens_gives_zeros_and_not_nan(name: str, num: int) -> None:
    columns = make_columns([0] * num, [0.0] * num, [1.0] * num)
    p_T = torch.full((num,), -1e9, dtype=torch.float64)
    assert value_and_grad(make_loss(name), p_T, columns) == (0.0, [0.0] * num)
    metrics = make_loss(name).metrics(p_T, None, columns)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["num_trained_tokens:sum"] == 0


@for_each("name", RL)
@for_each("gap", [1e4, -1e4])
@for_each("has_old", [True, False])
def test_ratios_are_clamped_so_that_an_absurd_gap_stays_finite(name: str, gap: float, has_old: bool) -> None:
    p_T, entropies_T, columns = random_batch(11)
    columns = replace(columns, sampler_logprobs_T=p_T - gap, old_logprobs_T=p_T - gap / 3 if has_old else None)
    loss = make_loss(name, REGULARISED)
    value, grad = value_and_grad(loss, p_T.float(), columns, entropies_T)
    assert all(math.isfinite(x) for x in (value, *grad, *loss.metrics(p_T, entropies_T, columns).values()))
    one = make_columns([1], [-1.0 - gap], [1.0])
    assert make_loss("importance_sampling")(f64([-1.0]), None, one).item() == -math.exp(math.copysign(20, gap))
