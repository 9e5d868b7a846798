"""The traps of the algorithms' specification that concern credit, losses and datums, each by its number.

GAE's (T10 to T13) and the preference methods' (T14 to T16) are beside this file; T20, T22, T23 and T25 are about
asynchronous training, merging and routing. T18 and T19 are measured at the model: `numerics/test_sampling.py` and
`unit/rollout/test_certify.py`; T24 in `numerics/test_training.py` and `numerics/test_credit_invariance.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.credit.advantages import center_by_group, leave_one_out, normalise_by_group
from turnwise.credit.datums import trajectory_to_datums
from turnwise.credit.weights import share_of, token_mean, weigh, weighting
from turnwise.engine.training.losses import LossColumns, make_loss
from turnwise.methods.grpo import Grpo
from turnwise.trajectory import TrajectoryGroup
from unit.credit.groups import make_attempt, make_group
from unit.credit.test_datums import D1, chain, column, make_trajectory, make_turn

RL = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo_tv")
OPTIONS = {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.2}
MASK = [False, True, True, False, True, True]
VECTOR_FILE = Path(__file__).parents[1] / "engine" / "training" / "algorithm_vectors.json"
VECTORS = json.loads(VECTOR_FILE.read_text())


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(**fields: Tensor) -> LossColumns:
    known: dict[str, Tensor] = {
        "mask_T": torch.tensor(MASK),
        "weights_T": f64([float(m) for m in MASK]),
        "sampler_logprobs_T": f64([0.0, -0.7, -0.9, 0.0, -0.6, -1.2]),
        "advantages_T": f64([0.0, 1.0, 1.0, 0.0, -0.5, -0.5]),
        "datum_T": torch.zeros(6, dtype=torch.int64),
        "ref_logprobs_T": f64([-1.0] * 6),
    } | fields
    return LossColumns(num_datums=int(known["datum_T"].max()) + 1, **known)


P = [-3.0, -0.5, -1.0, -2.0, -0.2, -1.5]


def gradient(name: str, config: dict, own: LossColumns, p: list[float] | Tensor = P) -> Tensor:
    p_T = torch.as_tensor(p, dtype=torch.float64).clone().requires_grad_()
    entropies_T = -p_T.detach() * 0.5
    make_loss(name, config)(p_T, entropies_T, own).sum().backward()
    assert p_T.grad is not None
    return p_T.grad


def test_t01_columns_are_aligned_to_the_targets() -> None:
    (datum,) = trajectory_to_datums(D1, [1.0, 2.0, 3.0])
    ids = [*D1.turns[-1].prompt_ids, *D1.turns[-1].sampled_ids]
    assert datum.model_input.to_ints() == ids[:-1]
    assert column(datum, "target_tokens") == ids[1:]
    assert {len(tensor.tolist()) for tensor in datum.loss_fn_inputs.values()} == {datum.model_input.length}
    first = len(D1.turns[0].prompt_ids) - 1
    assert column(datum, "mask")[: first + 1] == [0] * first + [1]
    assert column(datum, "advantages")[first] == 1.0


def test_t01_another_turns_reward_is_no_baseline_for_a_turn() -> None:
    """Turns of one dialogue are not attempts at one thing: only attempts of a group are compared."""
    method = Grpo(loss_fn="importance_sampling", loss_config={}, per_turn=True)
    for group in (make_group([1.0, 0.0], [0.0, 1.0]), make_group([5.0, 0.0], [0.0, 5.0])):
        first, second = method.advantages(group)
        assert (first + second).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["cross_entropy", *RL])
def test_t02_what_stands_on_observations_changes_no_loss_and_no_gradient(name: str) -> None:
    config = {} if name == "cross_entropy" else OPTIONS
    plain = columns()
    noise = torch.where(plain.mask_T, 0.0, f64([7.0, 0.0, 0.0, -40.0, 0.0, 0.0]))
    fields = ("sampler_logprobs_T", "advantages_T", "ref_logprobs_T")
    disturbed = replace(
        plain, **{key: getattr(plain, key) + noise for key in fields}, weights_T=plain.weights_T + noise
    )
    moved = [p + float(n) for p, n in zip(P, noise, strict=True)]
    assert gradient(name, config, disturbed, moved).tolist() == pytest.approx(gradient(name, config, plain).tolist())


def test_t03_a_token_without_advantage_stays_in_denominators_ratios_and_penalties() -> None:
    ((datum,),) = weigh([trajectory_to_datums(D1, [0.0] * 3)], token_mean, [share_of(D1)])
    assert sum(weight > 0 for weight in column(datum, "weights")) == 7
    drifted = f64([0.0, -0.9, -0.9, 0.0, -0.6, -1.2])
    half = columns(advantages_T=f64([0.0, 0.0, 0.0, 0.0, 1.0, 1.0]), sampler_logprobs_T=drifted)
    only = replace(half, sequence_ratio_mask_T=torch.tensor([False] * 4 + [True] * 2))
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 10.0}
    assert gradient("gspo", wide, half).tolist() != pytest.approx(gradient("gspo", wide, only).tolist())
    assert gradient("importance_sampling", {"kl_coef": 1.0}, half)[1] != 0


@pytest.mark.parametrize("name", RL)
def test_t04_the_loss_of_a_batch_is_the_sum_over_its_datums(name: str) -> None:
    two = columns(datum_T=torch.tensor([0, 0, 0, 1, 1, 1]))
    together = gradient(name, OPTIONS, two)
    first, second = (
        gradient(name, OPTIONS, replace(two.slice(part), datum_T=torch.zeros(3, dtype=torch.int64), num_datums=1), p)
        for part, p in ((slice(0, 3), P[:3]), (slice(3, 6), P[3:]))
    )
    assert together.tolist() == pytest.approx([*first.tolist(), *second.tolist()], abs=1e-12)


def test_t05_a_normaliser_belongs_into_the_weights_because_dro_and_kl_do_not_scale_with_the_advantage() -> None:
    plain = columns()
    in_weights = replace(plain, weights_T=plain.weights_T / 4)
    in_advantages = replace(plain, advantages_T=plain.advantages_T / 4)
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        same = gradient(name, {}, in_weights).tolist()
        assert gradient(name, {}, in_advantages).tolist() == pytest.approx(same), name
    for name, config in (("dro", {}), ("importance_sampling", {"kl_coef": 0.5})):
        other = gradient(name, config, in_weights).tolist()
        assert gradient(name, config, in_advantages).tolist() != pytest.approx(other), name


def test_t06_baselines_of_a_group() -> None:
    rewards = [1.0, 0.0, 0.5, 1.0]
    assert center_by_group(rewards).sum() == pytest.approx(0)
    assert leave_one_out(rewards) == pytest.approx(4 / 3 * center_by_group(rewards))
    assert center_by_group([r + 7 for r in rewards]) == pytest.approx(center_by_group(rewards))
    assert center_by_group([3.0]).tolist() == [0.0], "a lone attempt has nobody to be compared with"
    method = Grpo(loss_fn="importance_sampling", loss_config={})
    assert method.keep([make_group([3.0])]).dropped == {"too_small": 1}


def test_t06_failed_attempts_are_out_before_the_baseline_is_made() -> None:
    from turnwise.errors import Party
    from turnwise.trajectory import EndReason, Failure

    failed = replace(
        make_attempt([0.0], attempt=2),
        end_reason=EndReason.FAILED,
        failure=Failure(party=Party.ENV, detail="it fell over"),
    )
    group = make_group([1.0], [0.0])
    with_failed = TrajectoryGroup(task_id="t", trajectories=group.trajectories, failed=(failed,))
    method = Grpo(loss_fn="importance_sampling", loss_config={})
    assert [a.tolist() for a in method.advantages(with_failed)] == [[0.5], [-0.5]]


def test_t07_splitting_a_trajectory_changes_neither_baseline_nor_weight() -> None:
    rewritten = make_trajectory(make_turn([1, 2], [3, 4], reward_parts={"outcome": 0.0}), make_turn([9], [5]))
    whole = make_trajectory(make_turn([1, 2], [3, 4], reward_parts={"outcome": 0.0}), make_turn([1, 2, 3, 4, 9], [5]))
    other = chain((1, 2))
    method = Grpo(loss_fn="importance_sampling", loss_config={})
    for one, num_datums in ((rewritten, 2), (whole, 1)):
        good = replace(other, turns=(replace(other.turns[0], reward_parts={"outcome": 1.0}),))
        lessons = method.lessons([TrajectoryGroup(task_id="t", trajectories=(one, good))])
        assert len(lessons[0].datums) == num_datums
        assert [lesson.advantages for lesson in lessons] == [(-0.5, -0.5), (0.5,)]
        weights = [sum(sum(column(d, "weights")) for d in lesson.datums) for lesson in lessons]
        assert weights == pytest.approx([3 / 5, 2 / 5])


def test_t08_on_policy_every_policy_loss_has_the_gradient_of_reinforce() -> None:
    own = columns(sampler_logprobs_T=f64(P), ref_logprobs_T=f64(P))
    reinforce = torch.where(own.mask_T, -own.advantages_T, 0.0).tolist()
    for name in ("importance_sampling", "ppo", "cispo", "gspo", "dppo_tv", "dro"):
        assert gradient(name, {}, own).tolist() == pytest.approx(reinforce), name
    metrics = make_loss("ppo").metrics(f64(P), None, own)
    assert (metrics["clip_fraction_low:mean"], metrics["clip_fraction_high:mean"]) == (0, 0)
    assert (metrics["ratio:mean"], metrics["ess_fraction:mean"]) == (1, 1)


def test_t08_decoupled_equals_importance_sampling_where_nothing_clips_and_bypass_where_old_is_the_sampler() -> None:
    old = columns(old_logprobs_T=f64([0.0, -0.6, -0.95, 0.0, -0.4, -1.3]))
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    plain = gradient("importance_sampling", {}, columns()).tolist()
    assert gradient("ppo", wide, old).tolist() == pytest.approx(plain)
    same = columns(old_logprobs_T=columns().sampler_logprobs_T)
    assert gradient("ppo", {}, same).tolist() == pytest.approx(gradient("ppo", {}, columns()).tolist())


@pytest.mark.parametrize(
    ("advantage", "ratio", "is_zero"),
    [(1, 1.3, True), (1, 0.7, False), (-1, 0.7, True), (-1, 1.3, False), (-1, 3.5, True), (1, 0.1, False)],
)
def test_t09_ppo_clips_where_the_sign_table_says_and_the_dual_clip_only_punished_tokens(
    advantage: float, ratio: float, is_zero: bool
) -> None:
    own = LossColumns(
        mask_T=torch.tensor([True]),
        weights_T=f64([1.0]),
        sampler_logprobs_T=f64([-4.0]),
        advantages_T=f64([advantage]),
        datum_T=torch.zeros(1, dtype=torch.int64),
        num_datums=1,
    )
    found = gradient("ppo", {"dual_clip": 3.0}, own, [-4.0 + math.log(ratio)])
    assert (found.item() == 0) is is_zero


def test_t09_cispo_never_differentiates_its_weight() -> None:
    found = gradient("cispo", {}, columns())
    ratio = torch.tensor(P, dtype=torch.float64).sub(columns().sampler_logprobs_T).exp().clamp(0, 4)
    frozen = torch.where(columns().mask_T, -ratio * columns().advantages_T, 0.0)
    assert found.tolist() == pytest.approx(frozen.tolist())


def test_t17_k2_in_the_loss_has_the_gradient_of_the_kl_and_k1_has_none() -> None:
    logits = torch.log(f64([0.5, 0.3, 0.2])).requires_grad_()
    reference = f64([0.4, 0.4, 0.2])
    probabilities = torch.softmax(logits, 0)
    (true,) = torch.autograd.grad((probabilities * (probabilities / reference).log()).sum(), logits)
    expected = {"k1": f64(VECTORS["E_grad_k1_in_loss"]), "k2": true}
    for estimator, want in expected.items():
        found = torch.zeros(3, dtype=torch.float64)
        for action in range(3):
            own = columns(
                mask_T=torch.tensor([True]),
                weights_T=f64([1.0]),
                sampler_logprobs_T=f64([0.0]),
                advantages_T=f64([0.0]),
                datum_T=torch.zeros(1, dtype=torch.int64),
                ref_logprobs_T=reference[action : action + 1].log(),
            )
            logprob = torch.log_softmax(logits, 0)[action : action + 1]
            loss = make_loss("importance_sampling", {"kl_coef": 1.0, "kl_estimator": estimator})
            (one,) = torch.autograd.grad(loss(logprob, None, own).sum(), logits)
            found += probabilities[action].detach() * one
        assert found.tolist() == pytest.approx(want.tolist(), abs=1e-9), estimator


def test_t19_a_prompt_that_does_not_extend_the_ids_starts_a_datum() -> None:
    retokenised = make_trajectory(make_turn([1, 2], [3, 4]), make_turn([1, 2, 34, 5], [6]))
    datums = trajectory_to_datums(retokenised, [1.0, 1.0])
    assert [datum.model_input.to_ints() for datum in datums] == [[1, 2, 3], [1, 2, 34, 5]]


@pytest.mark.parametrize(
    "config",
    [
        {"correction": "token_mask", "correction_low": 0.95, "correction_high": 1.1},
        {"correction": "sequence_geo_mask", "correction_low": 2.0, "correction_high": 3.0},
        {"opsm_threshold": 1e-4},
    ],
    ids=lambda config: next(iter(config)) if len(config) == 1 else config["correction"],
)
def test_t21_a_rejection_takes_tokens_out_and_leaves_the_weight_of_the_others_alone(config: dict) -> None:
    own = columns(sampler_logprobs_T=f64([0.0, -0.7, -0.9, 0.0, -0.1, -1.2]))
    found, plain = (gradient("importance_sampling", one, own) for one in (config, {}))
    assert all(a in (0, b) for a, b in zip(found.tolist(), plain.tolist(), strict=True))
    rejected = make_loss("importance_sampling", config).metrics(f64(P), None, own)["rejected_fraction:mean"]
    assert rejected == pytest.approx(sum(a == 0 != b for a, b in zip(found.tolist(), plain.tolist(), strict=True)) / 4)
    assert rejected > 0


def test_t21_a_batch_that_is_rejected_whole_has_a_gradient_of_zero() -> None:
    config = {"correction": "token_mask", "correction_low": 50.0, "correction_high": 60.0}
    assert gradient("ppo", config, columns()).tolist() == [0.0] * 6


def test_t26_constant_groups_and_empty_masks_give_zeros_and_extreme_ratios_stay_finite() -> None:
    assert normalise_by_group([0.3, 0.1 + 0.2]).tolist() == [0.0, 0.0]
    nothing = columns(mask_T=torch.zeros(6, dtype=torch.bool))
    far = columns(sampler_logprobs_T=f64([-3000.0] * 6))
    for name in RL:
        assert gradient(name, OPTIONS, nothing).tolist() == [0.0] * 6
        assert torch.isfinite(gradient(name, {}, far)).all(), name


def test_t27_sampled_and_trained_tokens_are_counted_apart() -> None:
    from turnwise.rollout.stats import RolloutStats

    stats = RolloutStats()
    for _ in range(3):
        stats.add_sampled(5)
    assert stats.metrics()["rollout/tokens_drawn"] == 15
    masked = make_trajectory(make_turn([1], [2, 3]), make_turn([1, 2, 3], [4], is_trained=False))
    assert (masked.num_sampled_tokens, share_of(masked).num_tokens) == (3, 2)


def test_micro_batches_of_token_means_are_not_the_token_mean() -> None:
    """The specification's vector: averaging means per micro-batch gives 3.0 in place of 2.5."""
    batch = [chain((1, 2), (1, 1)), chain((1, 1))]
    losses = [[1.0, 2.0, 0.0, 3.0], [4.0]]

    def total(part: list[int]) -> float:
        datums = [trajectory_to_datums(batch[i], [0.0] * len(batch[i].turns)) for i in part]
        weighted = weigh(datums, weighting("token_mean", max_tokens=8), [share_of(batch[i]) for i in part])
        return sum(float(np.dot(column(d, "weights"), losses[i])) for i, (d,) in zip(part, weighted, strict=True))

    assert total([0, 1]) == pytest.approx(2.5)
    assert np.mean([total([0]), total([1])]) == pytest.approx(3.0)
