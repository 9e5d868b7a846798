"""Alarms: told once when a number leaves its band, with what to change, and once when it is back."""

from __future__ import annotations

import math

import pytest

from turnwise.train.alarms import AlarmConfig, AlarmError, Alarms

FINE = {
    "train/kl_sampler_trainer_k2": 1e-6,
    "train/ess_fraction": 0.99,
    "pool/stale_share": 0.0,
    "rollout/entropy_estimate": 2.0,
}


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("train/kl_sampler_trainer_k2", 0.02, ("KL(sampler || trainer) is 0.02, over 0.01", "train.learning_rate")),
        ("train/kl_sampler_trainer_k2", math.nan, ("KL(sampler || trainer) is nan",)),
        ("train/ess_fraction", 0.4, ("effective share", "under 0.5", "train.max_staleness")),
        ("pool/stale_share", 0.5, ("too old", "train.max_wait")),
        ("rollout/entropy_estimate", 0.1, ("entropy", "under 0.1", "method.entropy_coef")),
        ("rollout/entropy_estimate", 9.0, ("entropy", "over 3", "method.kl_coef")),
    ],
)
def test_each_number_has_a_band_a_reason_and_a_remedy(metric: str, value: float, words: tuple[str, ...]) -> None:
    alarms = Alarms(AlarmConfig())
    for _ in range(4):
        assert alarms.check(FINE) == []
    (alarm,) = alarms.check({**FINE, metric: value})
    for word in words:
        assert word in str(alarm)


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
