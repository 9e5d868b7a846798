"""What a loss may be told, what it says about itself, and what it reports."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from turnwise.engine.training.losses import LossColumns, make_loss
from turnwise.errors import ConfigError, DataError

VECTORS = json.loads((Path(__file__).parent / "algorithm_vectors.json").read_text())
ALL = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
RL = ALL[1:]
V1_P = [-3.0, -0.5, -1.0, -2.0, -0.2, -1.5]


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def v1_columns(**more: Tensor) -> LossColumns:
    mask = [False, True, True, False, True, True]
    return LossColumns(
        mask_T=torch.tensor(mask),
        weights_T=f64([float(m) for m in mask]),
        sampler_logprobs_T=f64([0.0, -0.7, -0.9, 0.0, -0.6, -1.2]),
        advantages_T=f64([0.0, 1.0, 1.0, 0.0, -0.5, -0.5]),
        datum_T=torch.zeros(6, dtype=torch.int64),
        num_datums=1,
        **more,
    )


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        *((name, {}, name != "gspo") for name in ALL),
        *(("ppo", {"correction": kind}, True) for kind in ("none", "token_tis", "token_mask")),
        *(("ppo", {"correction": kind}, False) for kind in ("sequence_tis", "sequence_mask", "sequence_geo_mask")),
        ("ppo", {"outlier_rejection": 1}, False),
    ],
)
def test_a_loss_that_looks_at_whole_sequences_says_so(name: str, config: dict, expected: bool) -> None:
    assert make_loss(name, config).is_separable is expected


@pytest.mark.parametrize("name", RL)
@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis"])
def test_a_truncation_without_old_logprobs_is_refused_as_a_double_correction(name: str, kind: str) -> None:
    loss = make_loss(name, {"correction": kind})
    assert "old_logprobs" in loss.required_inputs
    with pytest.raises(ConfigError, match=r"corrected twice; send old_logprobs"):
        loss(f64(V1_P), None, v1_columns())


def test_a_kl_term_without_reference_is_refused() -> None:
    loss = make_loss("ppo", {"kl_coef": 0.1})
    assert loss.needs_reference
    with pytest.raises(DataError, match=r"kl_coef=0.1 but no ref_logprobs"):
        loss(f64(V1_P), None, v1_columns())


def test_metrics_of_v1() -> None:
    metrics = make_loss("ppo").metrics(f64(V1_P), f64([9.0, 1.0, 2.0, 9.0, 3.0, 4.0]), v1_columns())
    gaps = [0.2, -0.1, 0.4, -0.3]
    assert metrics == pytest.approx(
        {
            "loss:sum": VECTORS["ppo_0.8_1.2"][0],
            "num_trained_tokens:sum": 4,
            "entropy:mean": 2.5,
            "ratio:mean": sum(VECTORS["ratio_actions"]) / 4,
            "ratio:max": max(VECTORS["ratio_actions"]),
            "clip_fraction_low:mean": 0.25,
            "clip_fraction_high:mean": 0.25,
            "kl_sampler_trainer_k1:mean": -sum(gaps) / 4,
            "kl_sampler_trainer_k2:mean": sum(g * g / 2 for g in gaps) / 4,
            "ess_fraction:mean": VECTORS["ESS_frac(token r)"],
            "rejected_fraction:mean": 0,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize("name", ALL)
def test_every_metric_key_is_a_name_and_one_reduction(name: str) -> None:
    p_T, entropies_T = f64(V1_P).requires_grad_(), f64([0.5] * 6)
    columns = v1_columns(old_logprobs_T=f64([-0.9] * 6), ref_logprobs_T=f64([-0.8] * 6))
    metrics = make_loss(name).metrics(p_T, entropies_T, columns)
    assert all(re.fullmatch(r"[a-z0-9_]+:(sum|mean|min|max)", key) for key in metrics)
    assert all(type(value) is float for value in metrics.values())
    assert metrics["loss:sum"] == pytest.approx(make_loss(name)(p_T, entropies_T, columns).sum().item())
    assert ("kl_reference:mean" in metrics) is ("correction_factor:max" in metrics) is (name != "cross_entropy")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 0.0}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("gspo", {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
        ("dro", {"beta": 0.05}),
        ("importance_sampling", {"kl_coef": 0.0, "kl_estimator": "k2", "entropy_coef": 0.0, "correction": "none"}),
    ],
)
def test_defaults_are_the_documented_ones(name: str, expected: dict[str, float | str]) -> None:
    config = make_loss(name, None).config
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("token_tis", 0.0, 2.0),
        ("sequence_tis", 0.0, 5.0),
        ("token_mask", 0.5, 2.0),
        ("sequence_mask", 0.5, 2.0),
        ("sequence_geo_mask", 0.99, 1.01),
    ],
)
def test_each_correction_has_its_own_default_bounds(kind: str, low: float, high: float) -> None:
    config = make_loss("ppo", {"correction": kind}).config
    assert config.correction_bounds == (low, high)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppoo", {}, r"loss 'ppoo' is unknown; did you mean 'ppo'\?; expected one of cross_entropy, importance"),
        ("zzz", {}, r"loss 'zzz' is unknown; expected one of"),
        ("ppo", {"clip_low": 0.8}, r"ppo has no config key 'clip_low'; did you mean 'clip_low_threshold'\?"),
        ("dro", {"clip_low_threshold": 0.8}, r"dro has no config key 'clip_low_threshold'"),
        ("cross_entropy", {"beta": 1.0}, r"cross_entropy has no config key 'beta'; it takes no config"),
        ("ppo", {"clip_low_threshold": "0.8"}, r"clip_low_threshold='0.8' is str; expected a number"),
        ("ppo", {"dual_clip": True}, r"dual_clip=True is bool; expected a number"),
        ("dro", {"beta": math.nan}, r"beta=nan; expected a finite number"),
        ("dro", {"beta": -0.1}, r"beta=-0.1; expected a finite number that is not negative"),
        (
            "ppo",
            {"kl_estimator": "k4"},
            r"kl_estimator='k4' is unknown; did you mean 'k\d'\?; expected one of k1, k2, k3",
        ),
        ("ppo", {"correction": "token-mask"}, r"did you mean 'token_mask'\?"),
        ("ppo", {"kl_importance": 0.5}, r"kl_importance=0.5; expected 0 \(off\) or 1 \(on\)"),
        ("ppo", {"clip_low_threshold": 1.3}, r"clip bounds 1.3 to 1.2; expected low <= high, as absolute ratios"),
        ("ppo", {"dual_clip": 0.9}, r"dual_clip=0.9; expected more than 1"),
        ("ppo", {"correction_high": 2.0}, r"correction_high=2.0 is not read by correction='none'; leave it out"),
        ("ppo", {"correction": "token_tis", "correction_low": 0.5}, r"correction_low=0.5 is not read by"),
        ("ppo", {"correction": "token_mask", "correction_low": 3.0}, r"correction bounds 3.0 to 2.0; expected low"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(name: str, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss(name, config)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token_mean", [1 / 4] * 4),
        ("seq_mean", [1 / 6] * 3 + [1 / 2]),
        ("seq_sum_mean", [1 / 2] * 4),
        ("drgrpo_const8", [1 / 16] * 4),
        ("turn_mean", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
        ("traj_mean_of_turn_mean", [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
    ],
)
def test_weights_express_every_aggregation_of_vector_v3(mode: str, weights: list[float]) -> None:
    columns = replace(v1_columns().slice(slice(0, 4)), mask_T=torch.ones(4, dtype=torch.bool), weights_T=f64(weights))
    value = make_loss("cross_entropy")(f64([-1.0, -2.0, -3.0, -4.0]), None, columns).sum().item()
    assert value == pytest.approx(VECTORS["agg"][mode], abs=1e-6)


def test_needs_follow_the_coefficients() -> None:
    plain, regularised = make_loss("ppo"), make_loss("ppo", {"kl_coef": 0.1, "entropy_coef": -0.1})
    assert (plain.needs_reference, plain.needs_entropy) == (False, False)
    assert (regularised.needs_reference, regularised.needs_entropy) == (True, True)
    assert make_loss("cross_entropy").required_inputs == ()
    assert regularised.required_inputs == ("logprobs", "advantages")


def test_a_slice_keeps_every_column_in_step_and_the_number_of_datums() -> None:
    columns = v1_columns(old_logprobs_T=f64([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))
    by_index, by_slice = columns.slice(torch.tensor([4, 1])), columns.slice(slice(1, 3))
    assert by_index.old_logprobs_T is not None
    assert by_index.old_logprobs_T.tolist() == [4.0, 1.0]
    assert by_index.advantages_T.tolist() == [-0.5, 1.0]
    assert by_slice.sampler_logprobs_T.tolist() == [-0.7, -0.9]
    assert (by_slice.num_datums, by_slice.ref_logprobs_T) == (1, None)


def test_columns_move_to_a_device_together() -> None:
    moved = v1_columns(clip_low_T=f64([0.8] * 6)).to("meta")
    tensors = (moved.mask_T, moved.weights_T, moved.clip_low_T, moved.datum_T)
    assert [t.device.type for t in tensors if t is not None] == ["meta"] * 4


def test_columns_of_different_lengths_are_a_bug_and_not_a_broadcast() -> None:
    with pytest.raises(AssertionError, match="clip_low_T"):
        v1_columns(clip_low_T=f64([0.8]))
