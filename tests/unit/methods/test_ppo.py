"""PPO's side of the bargain: what it keeps, what its lessons carry, and what it is configured to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attempts import rewarded
from turnwise.credit.gae import Gae
from turnwise.credit.values import TrajectoryValues
from turnwise.errors import DataError
from turnwise.methods.base import DataConfig, MethodSetup, datums_of
from turnwise.methods.lookup import read_method
from turnwise.methods.ppo import Ppo
from turnwise.trajectory import WORLD_LABEL, TrajectoryGroup


def _group(*rewards: Sequence[float], is_trained: bool = True) -> TrajectoryGroup:
    return TrajectoryGroup(task_id="t", trajectories=tuple(rewarded(r, is_trained=is_trained) for r in rewards))


def _values(group: TrajectoryGroup, value: float = 0.0) -> list[TrajectoryValues]:
    return [TrajectoryValues(turns=tuple(np.full(2, value) for _ in one.turns)) for one in group.trajectories]


def _ppo(**more: Any) -> Ppo:
    return Ppo(loss_fn="ppo", loss_config={}, **{"gae": Gae(policy_lambda=1.0), "is_whitened": False, **more})


def _made(**options: Any) -> Ppo:
    setup = MethodSetup(data=DataConfig(), group_size=8, max_turns=4, max_tokens=64)
    return Ppo.Options(**options).build(setup)


def test_a_group_of_equal_rewards_and_a_group_of_one_still_teach() -> None:
    kept = _ppo().keep([_group([1.0], [1.0]), _group([0.0]), _group([1.0], is_trained=False)])
    assert kept.reasons == (None, None, "masked")


def test_advantages_may_differ_from_token_to_token_and_stand_on_the_sampled_ones() -> None:
    group = _group([0.0, 1.0])
    values = [TrajectoryValues(turns=(np.array([0.2, 0.3]), np.array([0.4, 0.5])))]
    (lesson,) = _ppo().lessons([group], values)
    (datum,) = lesson.datums
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 1, 1, 0, 1, 1]
    assert datum.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, 0.8, 0.7, 0, 0.6, 0.5])


def test_lessons_carry_what_the_critic_said_and_should_have_said() -> None:
    group = _group([0.25, 1.0], [0.0])
    values = _values(group, 0.5)
    lessons = _ppo().lessons([group], values)
    assert [lesson.values for lesson in lessons] == values
    assert lessons[0].returns is not None
    assert [turn.tolist() for turn in lessons[0].returns] == [[1.25, 1.25], [1.0, 1.0]]


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_step() -> None:
    group = _group([0.0, 1.0], [0.0], [0.5, 0.0])
    lessons = _ppo(is_whitened=True).lessons([group], _values(group))
    advantages, mask = (
        np.concatenate([datum.loss_fn_inputs[key].to_numpy() for datum in datums_of(lessons)])
        for key in ("advantages", "mask")
    )
    trained = advantages[mask > 0]
    assert trained.mean() == pytest.approx(0.0, abs=1e-6)
    assert trained.std() == pytest.approx(1.0, abs=1e-5)


def test_each_world_of_a_mix_is_whitened_by_itself() -> None:
    rich, poor = _group([100.0], [104.0]), _group([0.0], [1.0])
    worlds = [
        replace(group, trajectories=tuple(replace(one, labels={WORLD_LABEL: name}) for one in group.trajectories))
        for name, group in (("rich", rich), ("poor", poor))
    ]
    lessons = _ppo(is_whitened=True).lessons(worlds, [*_values(rich), *_values(poor)])
    signs = [float(np.concatenate(lesson.advantages).mean()) for lesson in lessons]
    assert signs == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-6)


def test_attempts_that_went_exactly_as_foreseen_are_no_lessons() -> None:
    group = _group([1.0], [1.0])
    assert _ppo(is_whitened=True).lessons([group], _values(group, 1.0)) == []


def test_the_expected_gradient_is_unbiased_whatever_constant_the_critic_says() -> None:
    """One coin: heads pays 1. The mean of grad log p * A is p (1 - p), with any constant baseline and lambda 1."""
    rng = np.random.default_rng(0)
    p = 0.3
    heads = rng.random(2000) < p
    for baseline in (0.0, 0.3, 2.0):
        group = _group(*([1.0 if is_head else 0.0] for is_head in heads))
        lessons = _ppo().lessons([group], _values(group, baseline))
        advantages = np.array([lesson.advantages[0][0] for lesson in lessons])  # type: ignore[index]
        estimate = float(((heads - p) * advantages).mean())
        assert estimate == pytest.approx(p * (1 - p), abs=0.05)


def test_lessons_without_values_are_refused() -> None:
    with pytest.raises(DataError, match="none values for 1 trajectories; PPO needs a critic's values"):
        _ppo().lessons([_group([1.0])])


def test_the_method_clips_higher_and_twice_unless_told_otherwise() -> None:
    assert _made().loss_config == {"clip_high_threshold": 1.28, "dual_clip": 3.0}
    assert _made(clip_high_threshold=1.2, dual_clip=0.0).loss_config == {"clip_high_threshold": 1.2, "dual_clip": 0.0}
    assert _made(loss_fn="cispo").loss_config == {}


def test_the_defaults_are_decoupled_and_length_adaptive() -> None:
    assert _made().gae == Gae(level="token", gamma=1.0, policy_lambda=None, alpha=1.5, critic_lambda=1.0)
    assert _made(gae="turn", policy_lambda=0.9, gamma=0.95).gae == Gae(level="turn", gamma=0.95, policy_lambda=0.9)
    assert _made(alpha=0.05, critic_lambda=0.95).gae == Gae(alpha=0.05, critic_lambda=0.95)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_lambda": 1.5}, "policy_lambda"),
        ({"policy_lambda": 0.9, "alpha": 1.0}, "alpha is not read by policy_lambda=0.9"),
        ({"credit": "reward_to_go"}, "credit is not read by method=ppo"),
        ({"policy_lambda": "wide"}, "policy_lambda"),
    ],
)
def test_options_that_nobody_reads_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_method({"name": "ppo", **options})


def test_other_methods_do_not_read_the_critics_options() -> None:
    with pytest.raises(ValueError, match="gae is not read by method=grpo, only by ppo"):
        read_method({"name": "grpo", "gae": "turn"})


def test_a_calibrated_step_has_no_common_part_and_the_critic_still_learns_what_came() -> None:
    group = _group(*[[0.0, 1.0] for _ in range(30)], *[[0.0, 0.0] for _ in range(30)])
    values = _values(group)
    plain, calibrated = (_made(policy_lambda=1.0, calibrate=is_on).lessons([group], values) for is_on in (False, True))
    means = [np.mean([np.mean(one) for one in lesson.advantages]) for lesson in calibrated]
    assert np.mean(means) == pytest.approx(0.0, abs=0.01)
    assert means[0] == pytest.approx(0.5, abs=0.05)
    assert [lesson.values for lesson in calibrated] == values
    for ours, theirs in zip(calibrated, plain, strict=True):
        assert ours.returns is not None
        assert theirs.returns is not None
        assert all((a == b).all() for a, b in zip(ours.returns, theirs.returns, strict=True))
