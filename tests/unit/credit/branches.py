"""Small branched groups: the same ids before turn h, each attempt's own from there on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.trajectory import Branch, EndReason, Message, Trajectory, TrajectoryGroup, Turn


def make_continuation(
    attempt: int, reward: float, *, turn: int, num_turns: int = 4, replies: Sequence[int] | None = None
) -> Trajectory:
    """Replies of three ids; the world says two between them. `replies` tells the ids of turn h, else they differ."""
    turns: list[Turn] = []
    ids: tuple[int, ...] = (1, 2, 3)
    for index in range(num_turns):
        own = 0 if index < turn else 100 * (attempt + 1)
        sampled = tuple(own + 10 * (index + 1) + i for i in range(3))
        if index == turn and replies is not None:
            sampled = tuple(replies)
        turns.append(
            Turn(
                prompt_ids=ids,
                sampled_ids=sampled,
                sampler_logprobs=tuple(-0.1 * (i + 1 + index) for i in range(len(sampled))),
                policy_version=3 if index < turn else 5,
                reply=Message(role="assistant", content="x"),
                reward_parts={"outcome": reward if index == num_turns - 1 else 0.0},
            )
        )
        ids = (*ids, *sampled, 4, 5)
    return Trajectory(
        task_id="t",
        attempt=attempt,
        seed=7,
        turns=tuple(turns),
        end_reason=EndReason.TERMINATED,
        branch=Branch(turn=turn, seed=attempt, reseeds_env=True),
    )


def make_branches(rewards: Sequence[float], *, turn: int, probability: float = 1.0, **fields: Any) -> TrajectoryGroup:
    attempts = tuple(make_continuation(attempt, reward, turn=turn, **fields) for attempt, reward in enumerate(rewards))
    return TrajectoryGroup(task_id="t", trajectories=attempts, branch_turn=turn, branch_probability=probability)
