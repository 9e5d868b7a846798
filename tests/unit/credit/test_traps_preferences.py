"""The specification's vectors and traps of LA-GRPO, REFUEL, DPO and DMPO (T14 to T16), each by its number.

What concerns the env at a branch (same state, other randomness) is in `unit/rollout/test_branch.py`; gradients through
a model are in `numerics/test_preference_losses.py` and `numerics/test_branch_gradients.py`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.credit.advantages import center_by_group, normalise_by_group
from turnwise.credit.branching import turn_probabilities
from turnwise.credit.preferences import best_and_worst, dmpo_weights
from turnwise.engine.training.losses import LossColumns
from turnwise.engine.training.preference_losses import make_preference_loss
from turnwise.methods.base import datums_of
from turnwise.methods.dpo import Dpo, PairsToLessons
from turnwise.methods.la_grpo import LaGrpo
from turnwise.methods.refuel import Refuel
from turnwise.rollout.sources import PlayBranches
from unit.credit.branches import make_branches
from unit.credit.groups import make_group

VECTOR_FILE = Path(__file__).parents[1] / "engine" / "training" / "algorithm_vectors.json"
VECTORS = json.loads(VECTOR_FILE.read_text())
DELTA, DIFFERENCE = VECTORS["refuel Delta,dr"]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pair_columns(
    rewards: tuple[float, float] = (DIFFERENCE, 0.0), turn_weights: Tensor | None = None, *, is_swapped: bool = False
) -> LossColumns:
    """A chosen side of three tokens and a rejected one of two, each with a token of the world before it."""
    sign = -1 if is_swapped else 1
    return LossColumns(
        mask_T=torch.tensor([False, True, True, True, False, True, True]),
        weights_T=f64(9, 1, 1, 1, 9, 1, 1),
        advantages_T=f64(7, *[rewards[0]] * 3, 7, *[rewards[1]] * 2),
        sampler_logprobs_T=torch.zeros(7, dtype=torch.float64),
        ref_logprobs_T=f64(-50, 0, 0, 0, 30, 0, 0),
        datum_T=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        pair_T=sign * f64(1, 1, 1, 1, -1, -1, -1),
        num_datums=2,
        turn_weights_T=turn_weights,
    )


LOG_RATIOS = f64(99, 0.3, 0.1, 0.2, -99, -0.2, 0.1)
"""Delta = 0.6 - (-0.1) = 0.7; what stands at the world's tokens is filler."""


def value_and_grad(name: str, columns: LossColumns, log_ratios: Tensor = LOG_RATIOS, /, **config: float | str):
    leaf = log_ratios.clone().requires_grad_()
    total = make_preference_loss(name, config)(leaf, None, columns).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), grad


def make_la_grpo(**fields: object) -> LaGrpo:
    source = PlayBranches(continuations=4)
    return LaGrpo(source=source, loss_fn="importance_sampling", loss_config={}, **fields)  # pyright: ignore[reportArgumentType]


def test_v11_la_grpo_turn_probabilities_and_advantages() -> None:
    probabilities = turn_probabilities("geometric", 5, p=0.3)
    assert probabilities == pytest.approx(VECTORS["la_grpo p(h) trunc geom .3, H=5"], abs=1e-6)
    assert probabilities @ np.arange(5) == pytest.approx(VECTORS["E[h]"], abs=1e-6)
    advantages = normalise_by_group([80, 40, 60, 60], eps=1e-4)
    assert advantages == pytest.approx(VECTORS["la_grpo A (unbiased std+1e-4)"], abs=1e-6)


def test_v12_refuel_loss_and_gradient() -> None:
    loss, grad = value_and_grad("refuel", pair_columns())
    assert loss == pytest.approx(VECTORS["refuel eta=1"], abs=1e-9)
    expected = VECTORS["refuel grad wrt new logp chosen (eta=1)"]
    assert grad.tolist() == pytest.approx([0, expected, expected, expected, 0, -expected, -expected])
    assert value_and_grad("refuel", pair_columns(), eta=10)[0] == pytest.approx(VECTORS["refuel paper form eta=10"])
    repo = value_and_grad("refuel", pair_columns(), eta=10, form="repo")[0]
    assert repo == pytest.approx(VECTORS["refuel repo form eta=10"])


def test_v13_dpo_loss_and_gradient() -> None:
    loss, grad = value_and_grad("dpo", pair_columns(), beta=0.1)
    assert loss == pytest.approx(VECTORS["dpo b=.1"], abs=1e-6)
    expected = VECTORS["dpo grad chosen"]
    assert grad.tolist() == pytest.approx([0, expected, expected, expected, 0, -expected, -expected], abs=1e-6)


def test_v13_dmpo_weights_and_loss() -> None:
    for key, gamma, num_turns in (("g=.7 T=3", 0.7, 3), ("g=1 T=3", 1.0, 3), ("g=.7 T=2", 0.7, 2)):
        assert dmpo_weights(num_turns, gamma=gamma) == pytest.approx(VECTORS[f"dmpo phi {key}"], abs=1e-6)
    weights = f64(1, *dmpo_weights(3, gamma=0.7), 1, *dmpo_weights(2, gamma=0.7))
    loss, _ = value_and_grad("dpo", pair_columns(turn_weights=weights), beta=0.1)
    assert loss == pytest.approx(VECTORS["dmpo loss b=.1"], abs=1e-6)


@pytest.mark.parametrize("turn", [0, 2])
def test_t14_la_grpo_trains_the_branch_turn_and_nothing_else(turn: int) -> None:
    group = make_branches([1.0, 0.0, 0.5, 0.5], turn=turn)
    for lesson, trajectory in zip(make_la_grpo().lessons([group]), group.trajectories, strict=True):
        (datum,) = lesson.datums
        trained = [
            token
            for token, is_trained in zip(
                datum.loss_fn_inputs["target_tokens"].tolist(), datum.loss_fn_inputs["mask"].tolist(), strict=True
            )
            if is_trained
        ]
        assert trained == list(trajectory.turns[turn].sampled_ids)
        assert datum.model_input.length == len(trajectory.turns[turn].prompt_ids) + 2, "and ends with it"


def test_t14_a_shared_prefix_may_be_of_an_older_policy_and_is_the_same_in_every_datum() -> None:
    group = make_branches([1.0, 0.0], turn=2)
    prefix = group.trajectories[0].turns[2].prompt_ids
    assert {turn.policy_version for turn in group.trajectories[0].turns} == {3, 5}
    for datum in datums_of(make_la_grpo().lessons([group])):
        assert tuple(datum.model_input.to_ints()[: len(prefix)]) == prefix


def test_t14_advantages_on_a_shared_prefix_token_add_up_to_nothing() -> None:
    """So training it under a sum over tokens would change nothing, and is left out."""
    rewards = np.random.default_rng(0).normal(size=8).tolist()
    assert VECTORS["tree: sum of group advantages on a shared prefix token"] == pytest.approx(0.0, abs=1e-9)
    for compare in (center_by_group, normalise_by_group):
        assert compare(rewards).sum() == pytest.approx(0.0, abs=1e-12)


def test_t14_later_turns_are_trained_when_asked_for() -> None:
    group = make_branches([1.0, 0.0], turn=1)
    for lesson in make_la_grpo(trains_later_turns=True).lessons([group]):
        assert lesson.trajectory is not None
        assert [turn.is_trained for turn in lesson.trajectory.turns] == [False, True, True, True]
        assert sum(lesson.datums[0].loss_fn_inputs["mask"].tolist()) == 9


def test_t14_dividing_by_the_probability_scales_a_groups_weights_and_not_its_advantages() -> None:
    groups = [make_branches([1.0, 0.0], turn=0, probability=0.5), make_branches([1.0, 0.0], turn=1, probability=0.2)]
    plain = datums_of(make_la_grpo().lessons(groups))
    divided = datums_of(make_la_grpo(divides_by_probability=True).lessons(groups))
    for index, (a, b) in enumerate(zip(plain, divided, strict=True)):
        factor = 2.0 if index < 2 else 5.0
        scaled = factor * a.loss_fn_inputs["weights"].to_numpy()
        assert b.loss_fn_inputs["weights"].to_numpy() == pytest.approx(scaled)
        assert b.loss_fn_inputs["advantages"].tolist() == a.loss_fn_inputs["advantages"].tolist()


def test_t14_in_expectation_dividing_by_the_probability_counts_every_turn_once() -> None:
    for kind in ("uniform", "geometric"):
        probabilities = turn_probabilities(kind, 6, p=0.4)  # pyright: ignore[reportArgumentType]
        per_turn = np.arange(1.0, 7.0)
        assert probabilities @ (per_turn / probabilities) == pytest.approx(per_turn.sum())


def test_t15_refuels_forms_differ_by_eta_squared() -> None:
    paper, paper_grad = value_and_grad("refuel", pair_columns(), eta=7)
    repo, repo_grad = value_and_grad("refuel", pair_columns(), eta=7, form="repo")
    assert repo == pytest.approx(49 * paper)
    assert torch.allclose(repo_grad, 49 * paper_grad)


def test_t15_refuel_ignores_a_constant_in_both_rewards() -> None:
    plain = value_and_grad("refuel", pair_columns())
    shifted = value_and_grad("refuel", pair_columns((DIFFERENCE + 40, 40)))
    assert shifted[0] == pytest.approx(plain[0], abs=1e-9)
    assert torch.allclose(shifted[1], plain[1])


def test_t15_refuels_gradient_is_zero_at_delta_equal_to_eta_times_the_difference() -> None:
    for form in ("paper", "repo"):
        loss, grad = value_and_grad("refuel", pair_columns((DELTA / 4, 0.0)), eta=4, form=form)
        assert loss == pytest.approx(0.0, abs=1e-12)
        assert grad.abs().max() < 1e-9


def test_t15_refuel_trains_turn_h_of_both_sides_against_the_policy_that_sampled() -> None:
    group = make_branches([0.0, 1.0], turn=1)
    better, worse = Refuel(source=PlayBranches(continuations=2), loss_config={}).lessons([group])
    assert better.trajectory is not None
    assert better.trajectory.attempt == 1
    for lesson, sign in ((better, 1), (worse, -1)):
        (datum,) = lesson.datums
        inputs = {key: column.to_numpy() for key, column in datum.loss_fn_inputs.items()}
        assert inputs["mask"].sum() == 3
        assert set(inputs["pair"]) == {sign}
        assert inputs["ref_logprobs"].tolist() == inputs["logprobs"].tolist()
        assert set(inputs["advantages"][inputs["mask"] > 0]) == {0.5 * sign}
        assert set(inputs["weights"][inputs["mask"] > 0]) == {1.0}


@pytest.mark.parametrize("config", [{"beta": 0.4}, {"beta": 0.4, "reward_offset": 0.3}])
def test_t16_swapping_the_sides_flips_the_sign_of_the_logit(config: dict[str, float]) -> None:
    """-log sigmoid(z) and -log sigmoid(-z) differ by z."""
    forth, _ = value_and_grad("dpo", pair_columns(), **config)
    back, _ = value_and_grad("dpo", pair_columns(is_swapped=True), **config)
    offset = config.get("reward_offset", 0.0) * DIFFERENCE
    assert back - forth == pytest.approx(0.4 * DELTA - offset)


@pytest.mark.parametrize("name", ["dpo", "refuel"])
def test_t16_what_the_world_said_is_in_neither_sum(name: str) -> None:
    plain = value_and_grad(name, pair_columns())
    other = LOG_RATIOS.clone()
    other[0], other[4] = -1234.0, 1234.0
    spoiled = value_and_grad(name, pair_columns(), other)
    assert spoiled[0] == plain[0]
    assert torch.equal(spoiled[1], plain[1])
    assert spoiled[1][[0, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("gamma", [0.3, 0.7, 1.0])
def test_t16_dmpos_first_turn_weighs_one_and_every_later_one_less(gamma: float) -> None:
    for num_turns in (1, 2, 5, 40):
        weights = dmpo_weights(num_turns, gamma=gamma)
        assert weights[0] == 1
        assert (np.diff(weights) < 0).all()
        assert (weights > 0).all()


def test_t16_dpo_sums_logprobs_and_does_not_average_them() -> None:
    """A side twice as long, with the same log-ratio at each token, counts twice as much."""
    long = LossColumns(
        mask_T=torch.ones(5, dtype=torch.bool),
        weights_T=f64(1, 1, 1, 1, 1),
        advantages_T=f64(0, 0, 0, 0, 0),
        sampler_logprobs_T=f64(0, 0, 0, 0, 0),
        ref_logprobs_T=f64(0, 0, 0, 0, 0),
        datum_T=torch.tensor([0, 0, 0, 0, 1]),
        num_datums=2,
    )
    loss, _ = value_and_grad("dpo", long, f64(0.1, 0.1, 0.1, 0.1, 0.1), beta=1.0)
    assert loss == pytest.approx(float(np.log1p(np.exp(-0.3))))


def test_t16_a_pair_is_the_best_and_the_worst_and_a_group_without_a_difference_gives_none() -> None:
    pair = best_and_worst(make_group([0.2], [1.0], [0.0], [1.0]))
    assert pair is not None
    assert (pair.chosen.attempt, pair.rejected.attempt, pair.reward_difference) == (1, 2, 1.0)
    assert best_and_worst(make_group([0.5], [0.5])) is None


def test_t16_dmpo_reaches_the_datums_by_turn() -> None:
    group = make_group([0, 0, 1.0], [0, 0])
    chosen, rejected = Dpo(loss_config={}, read=PairsToLessons(dmpo_gamma=0.7)).lessons([group])
    by_lesson = [
        [
            weight
            for weight, is_trained in zip(
                lesson.datums[0].loss_fn_inputs["turn_weights"].tolist(),
                lesson.datums[0].loss_fn_inputs["mask"].tolist(),
                strict=True,
            )
            if is_trained
        ]
        for lesson in (chosen, rejected)
    ]
    repeat = partial(np.repeat, repeats=2)
    assert by_lesson[0] == pytest.approx(repeat(VECTORS["dmpo phi g=.7 T=3"]), abs=1e-6)
    assert by_lesson[1] == pytest.approx(repeat(VECTORS["dmpo phi g=.7 T=2"]), abs=1e-6)
