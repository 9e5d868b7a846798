from __future__ import annotations

import json
from dataclasses import replace

import pytest

from command_line import run_here
from turnwise.errors import ConfigError
from turnwise.training.simulation import ClusterShape, MeasuredRates, simulate
from turnwise.training.simulation_attempts import AttemptShape, lognormal_groups, recorded_groups

TOKENS = 100.0
"""Sampled tokens of an attempt: two turns of 50."""


def rates(*, env_s: float = 0.0, p99_s: float | None = None, sampler: float = 1000.0) -> MeasuredRates:
    draw = lognormal_groups(
        turns=2, tokens_per_turn=50, env_median_s=env_s, env_p99_s=env_s if p99_s is None else p99_s
    )
    return MeasuredRates(sampler=((1, sampler),), trainer=1000.0, draw_groups=draw)


def shape(**changes: int) -> ClusterShape:
    start = ClusterShape(samplers=2, learners=1, tasks_per_step=4, group_size=5, concurrency=16)
    return replace(start, **changes)


def test_without_latency_the_slower_side_bounds_steps_that_overlap_and_both_add_up_in_steps_that_do_not() -> None:
    train_s = 20 * TOKENS / 1000
    for sampler_rate in (200.0, 1000.0, 5000.0):
        sample_s = 20 * TOKENS / (2 * sampler_rate)
        in_turn = simulate(rates(sampler=sampler_rate), shape())
        ahead = simulate(rates(sampler=sampler_rate), shape(max_staleness=2), num_steps=100)
        assert in_turn.step_s == pytest.approx(sample_s + train_s, rel=1e-6)
        assert ahead.step_s == pytest.approx(max(sample_s, train_s), rel=0.03)
        assert ahead.learner_idle == pytest.approx(1 - train_s / max(sample_s, train_s), abs=0.03)
    assert simulate(rates(), shape(learners=4)).step_s == pytest.approx(1.0 + train_s / 4)


def test_on_shared_devices_sampling_and_training_add_up_and_each_gets_half_of_the_time_while_both_have_work() -> None:
    both = ClusterShape(samplers=2, learners=2, is_colocated=True, tasks_per_step=4, group_size=5, max_staleness=2)
    sample_s = train_s = 20 * TOKENS / 2000
    assert simulate(rates(), both, num_steps=100).step_s == pytest.approx(sample_s + train_s, rel=0.03)
    # Envs that take most of the time: replies are drawn while a step trains, and do not wait for its end.
    slow = replace(rates(env_s=4.0), trainer=200.0)
    train_s = 20 * TOKENS / 400
    assert simulate(slow, both, num_steps=100).step_s == pytest.approx(sample_s + train_s, rel=0.03)
    lone = replace(both, max_staleness=0)
    assert simulate(slow, lone, num_steps=20).step_s == pytest.approx(2 * 4.0 + sample_s + train_s, rel=0.03)


def test_slow_envs_bound_a_run_by_littles_law() -> None:
    slow = replace(rates(env_s=10.0, p99_s=40.0, sampler=1e6), trainer=1e6)
    for num_places in (8, 16, 40):
        forecast = simulate(slow, shape(max_staleness=7, max_envs=num_places, concurrency=64), num_steps=300)
        mean_s = 2 * 10 * 2.7183 ** (0.5 * (1.3863 / 2.3263) ** 2)
        assert forecast.step_s == pytest.approx(20 * mean_s / num_places, rel=0.05), "attempts = rate x time in flight"
        assert forecast.env_idle < 0.05
        assert forecast.sampler_idle > 0.9


def test_groups_of_a_run_come_in_the_order_in_which_it_played_them() -> None:
    steps = [[[AttemptShape(1, 10.0, env_s)] * 5] * 4 for env_s in (50.0, 2.0, 6.0)]
    played = replace(rates(sampler=1e9), trainer=1e9, draw_groups=recorded_groups(steps))
    assert simulate(played, shape(), num_steps=2).step_s == pytest.approx((2 + 6) / 2), "without the first step"
    assert simulate(played, shape(), num_steps=200).step_s == pytest.approx(58 / 3, rel=0.3), "and then at random"


def test_the_rate_of_a_sampler_follows_its_measured_points() -> None:
    points = replace(rates(), sampler=((2, 100.0), (10, 500.0), (20, 600.0)))
    assert [points.sampler_rate(count) for count in (1, 2, 6, 10, 15, 20, 99)] == [50, 100, 300, 500, 550, 600, 600]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_group_is_staler_than_the_limit_also_when_devices_and_attempts_fail(limit: int) -> None:
    failing = replace(
        rates(env_s=0.5, p99_s=60.0), attempt_failure=0.2, device_failures_per_h=20.0, restart_s=30.0, publish_s=0.1
    )
    forecast = simulate(failing, shape(max_staleness=limit), num_steps=150, seed=3)
    assert max(forecast.staleness) == limit
    assert forecast.staleness_mean <= forecast.staleness_p95 <= limit


def test_failures_publishing_and_gradient_sums_each_cost_time() -> None:
    plain = simulate(rates(env_s=0.5), shape(), num_steps=100).step_s
    worse = {
        "tries that fail": replace(rates(env_s=0.5), attempt_failure=0.3),
        "devices that fail": replace(rates(env_s=0.5), device_failures_per_h=60.0, restart_s=20.0),
        "publishing": replace(rates(env_s=0.5), publish_s=0.2),
    }
    times = {name: simulate(one, shape(), num_steps=100).step_s for name, one in worse.items()}
    assert all(one > 1.05 * plain for one in times.values()), times
    assert times["publishing"] == pytest.approx(plain + 0.2 * 2), "two samplers take two rounds"
    four = simulate(replace(rates(env_s=0.5), sync_s=0.4), shape(learners=4)).step_s
    assert four == pytest.approx(simulate(rates(env_s=0.5), shape(learners=4)).step_s + 0.3)


def test_a_sampler_that_is_alone_and_fails_comes_back() -> None:
    failing = replace(rates(), device_failures_per_h=120.0, restart_s=10.0)
    alone = shape(samplers=1)
    assert simulate(failing, alone, num_steps=50).step_s > simulate(rates(), alone, num_steps=50).step_s


def test_rates_that_make_no_sense_are_refused() -> None:
    for change in ({"trainer": 0.0}, {"sampler": ()}, {"sampler": ((4, 1.0), (2, 2.0))}, {"attempt_failure": 1.0}):
        with pytest.raises(ConfigError):
            replace(rates(), **change)
    with pytest.raises(ConfigError, match="down most of the time"):
        replace(rates(), device_failures_per_h=1e6)


def test_the_command_names_what_bounds_each_number_of_devices_and_repeats_itself_by_seed() -> None:
    arguments = ["cluster", "simulate", "--trainer-rate", "1000", "--devices", "4,16", "--steps", "5", "--json"]
    arguments += ["--tasks-per-step", "4", "--tokens-per-turn", "50", "--max-staleness", "2"]
    learner_bound = json.loads(run_here(*arguments, "--sampler-rate", "1:100000"))["regimes"]
    assert [one["devices"] for one in learner_bound] == [4, 16]
    assert {one["bound"] for one in learner_bound} == {"learners"}
    slow = [*arguments, "--sampler-rate", "1:100000", "--env-latency", "20:60"]
    printed = run_here(*slow)
    assert {one["bound"] for one in json.loads(printed)["regimes"]} <= {"env latency", "places for attempts"}
    assert run_here(*slow) == printed
    assert run_here(*slow, "--seed", "1") != printed
    assert "--sampler-rate" in run_here(*arguments, code=2)
