"""Replies and groups: each diagnosis where it belongs, and not where it does not."""

from __future__ import annotations

from collections.abc import Callable

from turnwise.doctor import diagnose
from unit.doctor.conftest import WrittenRun, make_attempt, make_turn

NewRun = Callable[[], WrittenRun]


def _cut(index: int, *, is_cut: bool, reward: float = 0.0) -> object:
    turn = make_turn("I th", is_cut=is_cut, ids=(5, 6, 7, index), reward=reward)
    return make_attempt(turn, attempt=index, is_success=reward > 0)


def test_cut_replies_are_named_with_a_limit_that_fits(new_run: NewRun) -> None:
    run = new_run()
    run.attempts = [_cut(i, is_cut=i % 2 == 0, reward=float(i % 2)) for i in range(16)]  # type: ignore[misc]
    (finding,) = diagnose(run.write())
    assert finding.name == "replies_cut"
    assert finding.seen == "50% of 16 replies were cut at their limit of 4 tokens"
    assert finding.fixes[0].option == "rollout.max_tokens_per_turn=24"  # 0.5 ** (24 / 4) is under 5 %
    harmless = new_run()
    harmless.attempts = [_cut(i, is_cut=i % 2 == 0, reward=float(i % 4 < 2)) for i in range(16)]  # type: ignore[misc]
    assert harmless.names == [], "cut replies that earn as much as others do no harm"


def test_unreadable_replies_are_shown_with_what_the_env_said(new_run: NewRun) -> None:
    run = new_run()
    turns = [
        make_turn("banana" if i % 2 else "8", ids=(5, i), is_unparsable=i % 2 == 1, reward=1.0 - i % 2)
        for i in range(8)
    ]
    run.attempts = [make_attempt(turn, attempt=i) for i, turn in enumerate(turns)]
    (finding,) = diagnose(run.write())
    assert (finding.name, finding.numbers["share"]) == ("replies_unparsable", 0.5)
    assert "'banana'" in finding.evidence
    assert "'Higher.'" in finding.evidence
    learning = new_run()
    learning.attempts = run.attempts
    learning.set(rollout__unparsable_replies=[40, 40, 40, 30, 20, 12, 10, 9, 8, 8])
    assert learning.names == [], "a policy that is learning the form is left alone"


def test_attempts_that_say_the_same_are_blamed_on_the_temperature(new_run: NewRun) -> None:
    run = new_run()
    run.overrides = ["rollout.temperature=0.01"]
    run.attempts = [make_attempt(make_turn(), attempt=i % 4, task=f"t{i // 4}") for i in range(16)]
    found = diagnose(run.write())
    assert [one.name for one in found] == ["replies_identical"]
    assert found[0].fixes[0].option == "rollout.temperature=1.0"
    solved = new_run()
    solved.attempts = run.attempts
    solved.set(rollout__success_mean=0.97)
    assert solved.names == []


def _constant(run: WrittenRun, *, success: float, reward: float) -> WrittenRun:
    run.set(method__groups_trained=0.0, method__groups_dropped_constant=4.0, rollout__success_mean=success)
    run.attempts = [
        make_attempt(make_turn(ids=(5, i), reward=reward), attempt=i, is_success=success > 0.5) for i in range(16)
    ]
    for metrics in run.steps:
        metrics.pop("train/grad_norm")
    return run


def test_groups_that_all_fail_and_groups_that_all_succeed(new_run: NewRun) -> None:
    assert _constant(new_run(), success=0.0, reward=0.0).names == ["all_fail"]
    assert _constant(new_run(), success=1.0, reward=1.0).names == ["all_succeed"]
    assert _constant(new_run(), success=0.5, reward=0.5).names == ["same_reward"]


def test_a_run_that_solved_its_tasks_is_not_told_that_they_are_too_easy(new_run: NewRun) -> None:
    run = _constant(new_run(), success=1.0, reward=1.0)
    run.set(rollout__success_mean=[0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert run.names == []


def test_equal_dialogues_with_unequal_rewards_are_chance(new_run: NewRun) -> None:
    run = new_run()
    run.attempts = [make_attempt(make_turn(ids=(5, i // 4), reward=i % 2), attempt=i) for i in range(16)]
    assert run.names == ["reward_is_chance"]
    own_seeds = new_run()
    own_seeds.overrides = ["rollout.same_start=false"]
    own_seeds.attempts = run.attempts
    assert own_seeds.names == [], "worlds of other seeds may well pay otherwise"
