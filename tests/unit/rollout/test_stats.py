"""Numbers of a rollout."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.rollout.stats import RolloutStats, num_splits, success_rate
from turnwise.trajectory import EndReason, Message, Trajectory, Turn

REPLY = Message(role="assistant", content="")


def make_trajectory(**fields: Any) -> Trajectory:
    turn = Turn(
        prompt_ids=(1, 2), sampled_ids=(3,), sampler_logprobs=(-1.0,), policy_version=1, reply=REPLY,
        reward_parts={"outcome": 1.0, "penalty": -0.5},
    )  # fmt: skip
    settings = {"turns": (turn,), "end_reason": EndReason.TERMINATED, **fields}
    return Trajectory(task_id="t", attempt=0, seed=0, **settings)


def test_an_attempt_that_ended_before_the_env_could_tell_did_not_succeed() -> None:
    won, lost = make_trajectory(is_success=True), make_trajectory(is_success=False)
    cut, unread = make_trajectory(end_reason=EndReason.MAX_TURNS), make_trajectory(end_reason=EndReason.UNPARSABLE)
    assert success_rate([won, lost, cut, unread]) == 0.25
    assert success_rate([won, make_trajectory()]) == 1.0
    assert success_rate([make_trajectory(), cut]) is None


def test_averages_are_over_kept_attempts_and_by_reward_part() -> None:
    stats = RolloutStats()
    stats.add_kept_group([make_trajectory(metrics={"moves": 2.0}), make_trajectory()], [])
    metrics = stats.metrics()
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/reward_penalty_mean"] == -0.5
    assert metrics["rollout/env_moves_mean"] == 2.0
    assert metrics["rollout/sampled_tokens"] == 2
    assert "rollout/success_mean" not in metrics


def test_an_empty_rollout_has_counts_and_no_averages() -> None:
    metrics = RolloutStats().metrics()
    assert metrics == {"rollout/attempts": 0.0, "rollout/attempts_kept": 0.0}


def test_guessed_tokens_are_counted_with_the_share_that_was_right() -> None:
    stats = RolloutStats()
    stats.add_drafts(0, 0)
    assert not any("draft" in name for name in stats.metrics()), "no sampler guessed anything"
    stats.add_drafts(10, 4)
    stats.add_drafts(10, 5)
    metrics = RolloutStats.merged([stats, RolloutStats()]).metrics()
    assert metrics["rollout/draft_tokens"] == 20
    assert metrics["rollout/draft_tokens_accepted"] == 9
    assert metrics["rollout/draft_accepted_share"] == 0.45


def test_a_turn_whose_prompt_does_not_extend_the_last_ids_is_a_split() -> None:
    def turn(prompt: tuple[int, ...], sampled: tuple[int, ...]) -> Turn:
        return Turn(
            prompt_ids=prompt,
            sampled_ids=sampled,
            sampler_logprobs=(-1.0,) * len(sampled),
            policy_version=1,
            reply=REPLY,
        )

    appended = make_trajectory(turns=(turn((1,), (2,)), turn((1, 2, 3), (4,))))
    rewritten = make_trajectory(turns=(turn((1,), (2,)), turn((1, 3), (4,)), turn((1, 3, 4, 5), (6,))))
    assert (num_splits(appended), num_splits(rewritten)) == (0, 1)
    assert num_splits(make_trajectory()) == pytest.approx(0)
