"""Where a dialogue is branched, what is trained then, and how much the prefix had decided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from turnwise.credit.branching import branch_variances, train_turns, trim_tail, turn_probabilities
from turnwise.credit.datums import trajectory_to_datums
from turnwise.errors import ConfigError
from turnwise.trajectory import TrajectoryGroup
from unit.credit.branches import make_branches, make_continuation
from unit.credit.groups import make_group


def test_turn_probabilities_add_up_and_geometric_ones_fall_by_a_constant_factor() -> None:
    assert turn_probabilities("uniform", 4).tolist() == [0.25] * 4
    probabilities = turn_probabilities("geometric", 6, p=0.3)
    assert probabilities.sum() == pytest.approx(1.0)
    assert probabilities[1:] / probabilities[:-1] == pytest.approx([0.7] * 5)
    with pytest.raises(ConfigError, match=r"p=1\.0"):
        turn_probabilities("geometric", 3, p=1.0)


def test_only_the_turns_asked_for_stay_in_the_loss_and_a_masked_one_stays_out() -> None:
    attempt = train_turns(make_continuation(0, 1.0, turn=1), 1, 2)
    assert [turn.is_trained for turn in attempt.turns] == [False, True, True, False]
    again = train_turns(attempt, 0)
    assert [turn.is_trained for turn in again.turns] == [False, True, True, False], "nothing is put back"
    assert again.total_reward == 1.0


def test_a_trimmed_datum_ends_with_its_last_trained_target() -> None:
    (datum,) = trajectory_to_datums(train_turns(make_continuation(0, 1.0, turn=1), 1, 1), [1.0] * 4)
    short = trim_tail(datum)
    assert short.loss_fn_inputs["mask"].tolist()[-1] == 1.0
    assert sum(short.loss_fn_inputs["mask"].tolist()) == sum(datum.loss_fn_inputs["mask"].tolist()) == 3
    length = short.model_input.length
    assert length < datum.model_input.length
    assert short.model_input.to_ints() == datum.model_input.to_ints()[:length]
    assert {len(column) for column in short.loss_fn_inputs.values()} == {length}
    assert short.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert trim_tail(short) is short


def _share(groups: Sequence[TrajectoryGroup]) -> float | None:
    found = branch_variances(groups)
    return None if found is None else found.share


def test_the_variance_share_is_that_of_the_world_for_any_group_size() -> None:
    """Simulated: a coin per group for what the prefix decides, one per attempt for what the turn does."""
    rng = np.random.default_rng(0)
    for share in (0.25, 0.5, 0.9, 1.0):
        for num_groups, group_size in ((8, 2), (8, 8), (16, 4), (16, 8)):
            found: list[float] = []
            for _ in range(150):
                spread = (1 / (1 - share) - 1) / 2 if share < 1 else np.inf  # success rates are Beta(spread, spread)
                rates = rng.beta(spread, spread, size=num_groups) if share < 1 else np.full(num_groups, 0.5)
                drawn = [(rng.random(group_size) < rate).astype(float).tolist() for rate in rates]
                one = _share([make_branches(rewards, turn=0, num_turns=1) for rewards in drawn])
                found += [] if one is None else [one]
            error = np.std(found) / np.sqrt(len(found))
            assert np.mean(found) == pytest.approx(share, abs=0.02 + 3 * error), (share, num_groups, group_size)


def test_the_variance_share_is_zero_where_the_prefix_decides_all_and_none_where_it_cannot_be_told() -> None:
    assert _share([make_branches([0.0, 0.0], turn=0), make_branches([1.0, 1.0], turn=1)]) == 0.0
    unequal = [make_branches([0.0, 0.4], turn=0), make_branches([1.0, 1.4, 1.2], turn=0)]
    # inside (0.08 + 0.08) / 3; between 2 * 0.6^2 + 3 * 0.4^2; size 5 - 13 / 5
    inside, between, size = 0.16 / 3, 1.2, 2.4
    assert _share(unequal) == pytest.approx(inside / (inside + (between - inside) / size))
    assert _share([make_group([0.0], [1.0]), make_group([1.0], [0.0])]) is None
    assert _share([make_branches([1.0, 1.0], turn=0)]) is None
    assert _share([make_branches([0.1, 0.1], turn=0)] * 3) is None
    assert _share([make_branches([0.0], turn=0), make_branches([1.0], turn=0)]) is None
