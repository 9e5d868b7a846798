"""Trajectories to write down."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from turnwise.errors import Party
from turnwise.trajectory import EndReason, Failure, Message, ToolCall, Trajectory, Turn

MakeTrajectory = Callable[..., Trajectory]


def _turn(prompt: tuple[int, ...], sampled: tuple[int, ...], reward: float, **more: object) -> Turn:
    fields = {
        "prompt_ids": prompt,
        "sampled_ids": sampled,
        "sampler_logprobs": tuple(-0.1 * (index + 1) for index in range(len(sampled))),
        "policy_version": 3,
        "reply": Message(
            role="assistant", content="ja", tool_calls=(ToolCall(name="calc", arguments={"x": 1}, id="a"),)
        ),
        "observation": (Message(role="tool", content="größer", name="calc"),),
        "reward_parts": {"outcome": reward, "format": 0.25},
        "env_state": "s0",
    }
    return Turn(**{**fields, **more})  # pyright: ignore[reportArgumentType]


@pytest.fixture
def make_trajectory() -> MakeTrajectory:
    """Two turns that extend each other, then one whose prompt was rewritten."""

    def make(*, attempt: int = 0, task_id: str = "t1", num_tokens: int = 2, failed: bool = False) -> Trajectory:
        first = _turn((1, 2, 3), tuple(range(4, 4 + num_tokens)), 0.0)
        known = first.prompt_ids + first.sampled_ids
        second = _turn((*known, 9), (7,), 0.5, temperature=0.7, is_trained=False, is_cut=True)
        third = _turn((1, 2, 8), (6, 5), 1.0, observation=(), env_state=None)
        return Trajectory(
            task_id=task_id,
            attempt=attempt,
            seed=2**31 - 1,
            start=(Message(role="system", content="s"), Message(role="user", content="u")),
            turns=(first, second, third),
            end_reason=EndReason.FAILED if failed else EndReason.TERMINATED,
            failure=Failure(party=Party.ENV, detail="died") if failed else None,
            is_success=None if failed else True,
            metrics={"guesses": 2.0},
            duration_s=0.5,
        )

    return make
