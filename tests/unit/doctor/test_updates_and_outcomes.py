"""Updates that go wrong, and runs that move in the wrong direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from turnwise.config.files import load_config
from turnwise.doctor import diagnose
from turnwise.runlog.writer import RunWriter
from unit.doctor.conftest import WrittenRun

NewRun = Callable[[], WrittenRun]
FLAT = [0.30, 0.31, 0.29, 0.30, 0.31, 0.30, 0.29, 0.31, 0.30, 0.30]
RISING = [0.1, 0.12, 0.11, 0.13, 0.12, 0.5, 0.52, 0.51, 0.53, 0.55]
FALLING = [0.6, 0.62, 0.61, 0.63, 0.6, 0.2, 0.15, 0.1, 0.12, 0.1]

Changes = dict[str, float | Sequence[float]]


@pytest.mark.parametrize(
    ("name", "bad", "fine"),
    [
        ("weights_moved", {"train__kl_sampler_trainer_k2": 0.2}, {"train__kl_sampler_trainer_k2": 1e-4}),
        ("few_tokens_count", {"train__ess_fraction": 0.1}, {"train__ess_fraction": 0.9}),
        ("stale", {"pool__stale_share": 0.4}, {"pool__stale_share": 0.0}),
        (
            "entropy_collapsed",
            {"rollout__entropy_estimate": [1.0] * 3 + [0.01] * 7},
            {"rollout__entropy_estimate": 0.5},
        ),
        (
            "entropy_exploded",
            {"rollout__entropy_estimate": [1.0] * 5 + [6.0] * 5, "rollout__success_mean": FALLING},
            {"rollout__entropy_estimate": [1.0] * 5 + [6.0] * 5, "rollout__success_mean": RISING},
        ),
        ("drift", {"drift__k2": 0.05}, {"drift__k2": 1e-6}),
        ("drift_grows", {"drift__k2": [2e-5] * 5 + [9e-4] * 5}, {"drift__k2": [2e-5] * 9 + [9e-4]}),
        ("gradient_zero", {"train__grad_norm": 0.0}, {"train__grad_norm": [0.0] + [0.3] * 9}),
        ("gradient_clipped", {"train__grad_norm": 50.0}, {"train__grad_norm": 2.0}),
        ("gradient_vanishes", {"train__grad_norm": 1e-9}, {"train__grad_norm": 1e-3}),
        ("not_finite", {"train__loss": float("inf")}, {"train__loss": 1e6}),
        ("tokens_left_out", {"train__rejected_fraction": 0.8}, {"train__rejected_fraction": 0.1}),
        (
            "rate_too_low",
            {"train__learning_rate": 1e-9, "rollout__success_mean": FLAT, "rollout__reward_mean": FLAT},
            {"train__learning_rate": 1e-5, "rollout__success_mean": FLAT, "rollout__reward_mean": FLAT},
        ),
        (
            "rate_too_high",
            {"rollout__success_mean": FALLING, "rollout__reward_mean": FALLING},
            {"rollout__success_mean": FLAT, "rollout__reward_mean": FLAT},
        ),
        (
            "reward_hacked",
            {"rollout__reward_mean": RISING, "rollout__reward_format_mean": RISING, "rollout__success_mean": FLAT},
            {"rollout__reward_mean": RISING, "rollout__reward_format_mean": RISING, "rollout__success_mean": RISING},
        ),
        (
            "critic_blind",
            {"train__critic_explained_variance": -0.3},
            {"train__critic_explained_variance": [-0.3] * 3 + [0.2] * 7},
        ),
        (
            "penalty_rules",
            {
                "rollout__reward_penalty_mean": [-0.9, -0.8, -0.9, -0.8, -0.9, -0.1, -0.1, -0.1, -0.1, -0.1],
                "rollout__sampled_tokens_per_turn_mean": [60, 61, 62, 60, 59, 9, 8, 9, 8, 9],
                "rollout__reward_outcome_mean": 0.1,
                "rollout__success_mean": FLAT,
                "rollout__reward_mean": FLAT,
            },
            {"rollout__reward_penalty_mean": -0.01, "rollout__sampled_tokens_per_turn_mean": 60.0},
        ),
    ],
)
def test_a_number_that_is_wrong_is_named_and_one_that_is_fine_is_not(
    new_run: NewRun, name: str, bad: Changes, fine: Changes
) -> None:
    sick, healthy = new_run(), new_run()
    sick.set(**bad)
    healthy.set(**fine)
    assert name in sick.names
    assert healthy.names == []


def test_a_certificate_that_is_not_exact_is_a_finding(new_run: NewRun) -> None:
    for is_exact, found in ((True, []), (False, ["not_exact"])):
        run = new_run()
        directory = run.write()
        writer = RunWriter.reopen(directory, max_size_mb=64)
        writer.certificate(len(run.steps), "{}", is_exact=is_exact)
        writer.commit(len(run.steps))
        writer.close()
        assert [finding.name for finding in diagnose(directory)] == found


def test_entropy_may_fall_in_a_run_that_solves_its_tasks(run: WrittenRun) -> None:
    run.set(rollout__entropy_estimate=[1.0] * 3 + [0.01] * 7, rollout__success_mean=[0.3] * 2 + [0.97] * 8)
    assert run.names == []


def test_held_out_success_that_fell_names_the_rate_and_the_best_step(run: WrittenRun) -> None:
    run.set(rollout__success_mean=FLAT)
    for step, success in ((0, 0.2), (5, 0.6), (10, 0.3)):
        run.evaluation("step", step, success)
    (finding,) = diagnose(run.write())
    assert (finding.name, finding.numbers["best_step"]) == ("rate_too_high", 5)
    assert finding.fixes[0].option == "train.learning_rate=6e-05"


def test_a_run_of_refuel_that_falls_is_told_its_rate_and_no_option_that_refuel_does_not_take(new_run: NewRun) -> None:
    """In `study_negotiate` each evaluation is 64 games; its best checkpoint is kept."""
    run, other = new_run(), new_run()
    for one, method in ((run, "refuel"), (other, "grpo")):
        one.overrides = [f"method={method}"]
        one.set(rollout__success_mean=FLAT)
        for step, success in ((0, 0.35), (15, 0.58), (30, 0.33)):
            one.evaluation("step", step, success, width=0.12)
    (finding,), (theirs,) = diagnose(run.write()), diagnose(other.write())
    assert finding.name == theirs.name == "rate_too_high"
    assert [fix.option for fix in finding.fixes] == ["train.learning_rate=6e-05", ""]
    assert "method.kl_coef=0.01" in [fix.option for fix in theirs.fixes]
    assert load_config("study_negotiate", ["method=refuel"]).eval.keep_best
    assert load_config("negotiate", ["method=refuel"]).eval.keep_best


def test_a_fall_within_the_intervals_is_chance(run: WrittenRun) -> None:
    run.set(rollout__success_mean=FLAT)
    run.evaluation("start", 0, 0.3, width=0.1)
    run.evaluation("end", 10, 0.25, width=0.1)
    assert run.names == []


def test_training_tasks_learned_by_heart(new_run: NewRun) -> None:
    run = new_run()
    run.set(rollout__success_mean=RISING)
    run.evaluation("start", 0, 0.1)
    run.evaluation("end", 10, 0.1)
    assert run.names == ["overfits"]
    general = new_run()
    general.set(rollout__success_mean=RISING)
    general.evaluation("start", 0, 0.1)
    general.evaluation("end", 10, 0.45)
    assert general.names == []


def test_a_warmup_that_made_it_worse(new_run: NewRun) -> None:
    run = new_run()
    run.evaluation("start", 0, 0.5)
    run.evaluation("warm-up", 0, 0.1)
    run.evaluation("end", 10, 0.6)
    assert run.names == ["warmup_hurts"]
    fine = new_run()
    fine.evaluation("start", 0, 0.1)
    fine.evaluation("warm-up", 0, 0.5)
    fine.evaluation("end", 10, 0.6)
    assert fine.names == []
