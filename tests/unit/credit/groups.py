"""Small groups with rewards that are told turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.trajectory import EndReason, Message, Trajectory, TrajectoryGroup, Turn


def make_attempt(
    rewards: Sequence[float],
    *,
    attempt: int = 0,
    sizes: Sequence[int] | None = None,
    states: Sequence[str] | None = None,
    potentials: Sequence[float] | None = None,
    part: str = "outcome",
    is_success: bool | None = None,
    end_reason: EndReason = EndReason.TERMINATED,
) -> Trajectory:
    """`potentials` are of every state, the last one included."""
    sizes = sizes or [2] * len(rewards)
    turns: list[Turn] = []
    ids: tuple[int, ...] = (1, 2)
    for index, (reward, size) in enumerate(zip(rewards, sizes, strict=True)):
        sampled = tuple(range(10 + 10 * index, 10 + 10 * index + size))
        turns.append(
            Turn(
                prompt_ids=ids,
                sampled_ids=sampled,
                sampler_logprobs=(-1.0,) * size,
                policy_version=0,
                reply=Message(role="assistant", content="x"),
                reward_parts={part: reward},
                env_state=None if states is None else states[index],
                potential=None if potentials is None else potentials[index],
                next_potential=None if potentials is None else potentials[index + 1],
            )
        )
        ids = (*ids, *sampled, 3)
    return Trajectory(
        task_id="t", attempt=attempt, seed=attempt, turns=tuple(turns), end_reason=end_reason, is_success=is_success
    )


def make_group(*rewards: Sequence[float], states: Sequence[Sequence[str]] | None = None) -> TrajectoryGroup:
    attempts = [
        make_attempt(own, attempt=index, states=None if states is None else states[index])
        for index, own in enumerate(rewards)
    ]
    return TrajectoryGroup(task_id="t", trajectories=tuple(attempts))
