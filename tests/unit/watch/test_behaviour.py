from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from turnwise.envs.base import assistant, user
from turnwise.memory.dialogue import request
from turnwise.trajectory import EndReason, Message, Trajectory, TrajectoryGroup, Turn
from turnwise.watch.behaviour import behaviour_metrics


def turn(text: str, logprobs: Sequence[float], *said: Message) -> Turn:
    ids = tuple(range(len(logprobs)))
    return Turn(
        prompt_ids=(1,),
        sampled_ids=ids,
        sampler_logprobs=tuple(logprobs),
        policy_version=0,
        reply=assistant(text),
        observation=said or (user("go on"),),
    )


def group(*attempts: Sequence[Turn]) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            task_id="t",
            attempt=index,
            seed=0,
            start=(user("hello"),),
            turns=tuple(turns),
            end_reason=EndReason.TERMINATED,
        )
        for index, turns in enumerate(attempts)
    )
    return TrajectoryGroup(task_id="t", trajectories=trajectories)


def test_entropy_is_split_by_fifth_of_the_attempt_and_by_kind_of_token() -> None:
    attempt = [turn("a", [-0.5 * (index < 5), -1.0, -1.0, -0.25]) for index in range(10)]
    found = behaviour_metrics([group(*[attempt] * 8)])
    assert found["behaviour/entropy_first_token"] == pytest.approx(0.25)
    assert found["behaviour/entropy_inner_token"] == pytest.approx(1.0)
    assert found["behaviour/entropy_last_token"] == pytest.approx(0.25)
    assert found["behaviour/entropy_fifth_1"] == pytest.approx((0.5 + 1 + 1 + 0.25) / 4)
    assert found["behaviour/entropy_fifth_5"] == pytest.approx((1 + 1 + 0.25) / 4)


def test_a_summary_is_told_apart_from_actions() -> None:
    attempt = [turn("act", [-1.0] * 3, request(8)), turn("remember", [-3.0] * 3), turn("act", [-1.0] * 3)]
    found = behaviour_metrics([group(*[attempt] * 16)])
    assert found["behaviour/entropy_summary"] == pytest.approx(3.0)
    assert found["behaviour/entropy_first_token"] == pytest.approx(1.0)
    assert found["behaviour/action_entropy"] == 0
    assert found["behaviour/repeat_share"] == 1


def test_actions_are_compared_between_siblings_and_with_the_reply_before() -> None:
    one, other = [turn("up", [-1.0]), turn("up", [-1.0])], [turn("Up ", [-1.0]), turn("down", [-1.0])]
    found = behaviour_metrics([group(one, other)])
    assert found["behaviour/sibling_diversity"] == pytest.approx(0.5)  # equal in the first turn only
    assert found["behaviour/repeat_share"] == pytest.approx(0.5)
    assert found["behaviour/action_entropy"] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert "behaviour/entropy_first_token" not in found  # too few tokens for an estimate


def test_tool_errors_count_among_tool_answers_only() -> None:
    wrong = Message(role="tool", name="f", content="error: no tool 'f'")
    right = Message(role="tool", name="f", content="4")
    found = behaviour_metrics([group([turn("x", [-1.0], wrong, right), turn("y", [-1.0], user("error: not a tool"))])])
    assert found["behaviour/tool_error_share"] == 0.5
    assert "behaviour/tool_error_share" not in behaviour_metrics([group([turn("y", [-1.0])])])
