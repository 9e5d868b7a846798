"""Alarms: told once when a number leaves its band, with what to change, and once when it is back."""

from __future__ import annotations

import json
import math

import pytest

from turnwise.watch.alarms import Alarm, AlarmConfig, AlarmError, Alarms

FINE = {
    "train/kl_sampler_trainer_k2": 1e-6,
    "train/ess_fraction": 0.99,
    "pool/stale_share": 0.0,
    "rollout/entropy_estimate": 2.0,
    "rollout/env_agreement_mean": 0.5,
    "opponent/opening_diversity": 0.3,
    "opponent/exploitation": 0.2,
    "opponent/seat_gap": 0.3,
}


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("train/kl_sampler_trainer_k2", 0.02, ("KL(sampler || trainer) is 0.02, over 0.01", "train.learning_rate")),
        ("train/kl_sampler_trainer_k2", math.nan, ("KL(sampler || trainer) is nan",)),
        ("train/ess_fraction", 0.4, ("effective share", "under 0.5", "train.max_staleness")),
        ("pool/stale_share", 0.5, ("too old", "train.max_wait")),
        ("rollout/entropy_estimate", 0.1, ("entropy", "under 0.1", "method.entropy_coef")),
        ("rollout/env_agreement_mean", 0.01, ("games with a deal is 0.01, under 0.05", "pool of opponents")),
        (
            "opponent/opening_diversity",
            0.01,
            ("diversity of first replies within a group is 0.01, under 0.1", "method.entropy_coef"),
        ),
        ("opponent/exploitation", 0.5, ("newest own snapshot is 0.5, over 0.4", "opponent.base_weight")),
        ("opponent/seat_gap", 0.9, ("that the two seats win is 0.9, over 0.8", "pool of opponents")),
    ],
)
def test_each_number_has_a_band_a_reason_and_a_remedy(metric: str, value: float, words: tuple[str, ...]) -> None:
    alarms = Alarms(AlarmConfig())
    for _ in range(4):
        assert alarms.check(FINE) == []
    (alarm,) = alarms.check({**FINE, metric: value})
    for word in words:
        assert word in str(alarm)


def test_a_world_of_a_mix_in_which_the_outcome_model_parts_is_named_though_the_mean_is_fine() -> None:
    alarms = Alarms(AlarmConfig(min_outcome_agreement=0.7))
    fine = {"rollout/env_outcome_agreement_mean": 0.9, "world/outcome_agreement_doors": 0.95}
    parted = {**fine, "world/outcome_agreement_shop": 0.2}
    assert [alarms.check(one) for one in (parted, parted)] == [[], []], "two steps are few"
    restored = Alarms(AlarmConfig(min_outcome_agreement=0.7))
    restored.restore(json.loads(json.dumps(alarms.to_state())))
    for one in (alarms, restored):
        assert one.check(FINE) == [], "a step that measured none says nothing"
        (alarm,) = one.check(parted)
        assert "the outcome model and the verifier agree in shop is 0.2, under 0.7" in str(alarm)
        assert one.check(fine) == [], "the shop was not played in this step"
    well = {**fine, "world/outcome_agreement_shop": 1.0}
    assert [alarm.is_over for _ in range(3) for alarm in alarms.check(well)] == [True]


def _run(alarms: Alarms, rewards: list[float], **entropies: float) -> list[Alarm]:
    """A step for each reward; the entropies hold from the first of them on."""
    named = {f"rollout/entropy_{name}": value for name, value in entropies.items()}
    return [alarm for reward in rewards for alarm in alarms.check({**FINE, **named, "rollout/reward_mean": reward})]


LEARNS = [0.20, 0.22, 0.19, 0.24, 0.26, 0.25, 0.31, 0.34, 0.38, 0.41, 0.44, 0.43, 0.49, 0.52, 0.55]
"""Rewards of a run that gets better, with the ups and downs of small batches."""
USUAL = {"estimate": 0.5, "turn_1": 0.6, "turn_2": 0.4, "tool_call": 0.1, "text": 0.8}
WILD = {name: 5 * value for name, value in USUAL.items()}


def test_rising_entropy_is_no_alarm_while_the_reward_rises_or_holds() -> None:
    alarms = Alarms(AlarmConfig())
    assert _run(alarms, LEARNS[:5], **USUAL) == []
    assert _run(alarms, LEARNS[5:], **WILD) == []
    assert _run(alarms, [0.53, 0.56, 0.51, 0.55, 0.52, 0.54, 0.56, 0.50] * 3, **WILD) == []


def test_a_falling_reward_alone_is_no_alarm_of_the_entropy() -> None:
    assert _run(Alarms(AlarmConfig()), [*LEARNS, *reversed(LEARNS)], **USUAL) == []


def test_entropy_that_rises_while_the_reward_falls_is_told_with_where_and_again_when_the_reward_is_back() -> None:
    for place, words in (
        ("estimate", "the entropy per token, as a share"),
        ("turn_2", "the entropy per token of turn 2, as a share"),
        ("turn_later", "the entropy per token of turns after 8, as a share"),
        ("tool_call", "the entropy per token of tool calls, as a share"),
        ("text", "the entropy per token of text, as a share"),
    ):
        usual = {**USUAL, "turn_later": 0.3}
        alarms = Alarms(AlarmConfig())
        assert _run(alarms, LEARNS, **usual) == []
        (alarm,) = _run(alarms, list(reversed(LEARNS)), **{**usual, place: 5 * usual[place]})
        assert str(alarm).startswith(f"alarm: {words} of what it was, is 5, over 3: the reward has fallen too")
        assert "train.learning_rate" in str(alarm)
        (over,) = _run(alarms, LEARNS, **{**usual, place: 5 * usual[place]})
        assert str(over).endswith("is 5, and the reward has not fallen")


def test_a_small_entropy_that_is_many_times_what_it_was_is_still_small() -> None:
    alarms = Alarms(AlarmConfig())
    _run(alarms, LEARNS, estimate=0.5, tool_call=0.001)
    assert _run(alarms, list(reversed(LEARNS)), estimate=0.5, tool_call=0.02) == []


def test_the_rewards_of_before_are_known_after_a_resume() -> None:
    one, two = Alarms(AlarmConfig()), Alarms(AlarmConfig())
    _run(one, LEARNS, **USUAL)
    two.restore(json.loads(json.dumps(one.to_state())))
    assert [alarm.name for alarm in _run(two, [0.2, 0.21, 0.19, 0.2, 0.2], **WILD)] == ["entropy_high"]
    old = {"active": {}, "entropies": [2.0, 2.0, 2.0]}
    three = Alarms(AlarmConfig())
    three.restore(old)  # pyright: ignore[reportArgumentType] - what a checkpoint without places holds
    assert [alarm.name for alarm in three.check({"rollout/entropy_estimate": 0.01})] == ["entropy_low"]


def test_an_alarm_is_told_when_it_begins_and_when_it_is_over_and_not_between() -> None:
    alarms = Alarms(AlarmConfig())
    bad = {**FINE, "train/ess_fraction": 0.2}
    assert [len(alarms.check(metrics)) for metrics in (FINE, bad, bad, bad, FINE, FINE)] == [0, 1, 0, 0, 1, 0]
    assert alarms.active == {}


def test_an_alarm_that_lasts_ends_the_run_where_the_config_says_so() -> None:
    alarms = Alarms(AlarmConfig(stop_after=2))
    bad = {"train/kl_sampler_trainer_k2": 1.0}
    alarms.check(bad)
    alarms.stop_if_lasting()
    alarms.check(bad)
    with pytest.raises(AlarmError, match="2 steps in a row"):
        alarms.stop_if_lasting()


def test_alarms_go_on_where_another_process_left_off() -> None:
    one, two = Alarms(AlarmConfig()), Alarms(AlarmConfig())
    for _ in range(3):
        one.check(FINE)
    one.check({**FINE, "train/ess_fraction": 0.2})
    two.restore(one.to_state())
    assert two.check({**FINE, "train/ess_fraction": 0.2}) == []
    (over,) = two.check(FINE)
    assert over.is_over
    assert [alarm.name for alarm in two.check({**FINE, "rollout/entropy_estimate": 0.01})] == ["entropy_low"]


def test_three_steps_in_a_row_whose_gradient_is_exactly_zero_are_an_alarm_that_says_what_to_check() -> None:
    alarms = Alarms(AlarmConfig())
    assert alarms.check({"train/grad_norm": 0.0}) == []
    assert alarms.check({}) == [], "a step that learned from nothing counts neither way"
    alarms.restore(json.loads(json.dumps(alarms.to_state())))
    assert alarms.check({"train/grad_norm": 0.0}) == []
    (alarm,) = alarms.check({"train/grad_norm": 0.0})
    assert "gradient of exactly 0 is 3: tokens were learned from, and the weights did not move" in str(alarm)
    assert "no detach()" in str(alarm)
    (over,) = alarms.check({"train/grad_norm": 0.1})
    assert over.is_over


def _drift_run(values: list[float], config: AlarmConfig | None = None) -> list[Alarm]:
    alarms = Alarms(config or AlarmConfig())
    found = []
    for value in values:
        found += alarms.check({**FINE, "drift/k2": value}, "task attempt 2, turn 1, token 5")
    return found


def test_drift_over_its_bound_is_an_alarm_with_the_worst_token_and_one_that_only_lags_is_not() -> None:
    (alarm,) = _drift_run([1e-4, 0.02])
    for words in ("on the same weights is 0.02, over 0.01", "float32", "Worst token: task attempt 2, turn 1, token 5"):
        assert words in str(alarm)
    (broken,) = _drift_run([math.nan])
    assert broken.name == "drift"
    stale = Alarms(AlarmConfig())
    found = [stale.check({**FINE, "drift/k2": 1e-9, "drift/lag_4_k2": 0.5}) for _ in range(8)]
    assert not any(found), "a gap to older weights is staleness, which has alarms of its own"
    assert not any(stale.check({**FINE, "drift/lag_1_k2": 0.5}) for _ in range(8)), "no token of lag 0 was trained"


def test_drift_that_is_the_cause_of_a_large_kl_is_told_once_with_the_right_remedy() -> None:
    alarms = Alarms(AlarmConfig())
    (alarm,) = alarms.check({**FINE, "drift/k2": 0.05, "train/kl_sampler_trainer_k2": 0.05})
    assert alarm.name == "drift"
    (kl,) = Alarms(AlarmConfig()).check({**FINE, "drift/k2": 1e-9, "train/kl_sampler_trainer_k2": 0.05})
    assert kl.name == "kl"


def test_drift_that_grows_over_the_runs_own_start_is_an_alarm_before_the_bound_is_reached() -> None:
    (alarm,) = _drift_run([2e-5] * 5 + [4e-4] * 3)
    assert alarm.name == "drift_growth"
    assert "as a multiple of that of the first ones, is 20, over 10" in str(alarm)
    changes = _drift_run([2e-5] * 5 + [4e-4] * 3 + [2e-5] * 5)
    assert [change.is_over for change in changes] == [False, True]


def test_steady_drift_a_single_odd_step_and_growing_rounding_are_no_alarm() -> None:
    assert _drift_run([3.0e-3, 3.8e-3, 3.4e-3] * 6) == [], "a bfloat16 server drifts from the start"
    assert _drift_run([1e-5] * 6 + [2.5e-3] + [1e-5] * 6) == [], "one odd batch"
    assert _drift_run([1e-14] * 5 + [1e-9] * 5) == [], "float32 rounding, a hundred thousand times what it was"


def test_the_start_of_a_run_is_still_its_start_after_a_resume() -> None:
    alarms = Alarms(AlarmConfig())
    for _ in range(4):
        alarms.check({**FINE, "drift/k2": 2e-5})
    resumed = Alarms(AlarmConfig())
    resumed.restore(json.loads(json.dumps(alarms.to_state())))
    found = [alarm for _ in range(3) for alarm in resumed.check({**FINE, "drift/k2": 4e-4})]
    assert [alarm.name for alarm in found] == ["drift_growth"]
