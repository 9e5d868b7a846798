"""Reward channels and their shaping: how an env's rewards change before credit is assigned.

    weights      r = sum over channels of weight * part
    turn decay   outcome * decay**(T - 1) in an attempt of T turns
    length       penalty: 0 up to `max_length - length_buffer` sampled tokens, then growing, 1 from `max_length` on
    potential    r_k + gamma * Phi(s_{k+1}) - Phi(s_k), with Phi = 0 after the end of a task

Potentials come from the env (`potential()`), and gamma is the method's own, so the best policy stays the best
(Ng, Harada, Russell 1999). Without a discount they sum to -Phi(s_0) for every attempt that ended. In a group from one
start that is a constant, which a baseline over whole attempts subtracts, so only per-turn credit sees the potentials.
With a discount, the plain sum over an attempt also contains -(1 - gamma) Phi(s_k) for every later state, which would
penalise good states. A method that discounts turns and also compares whole attempts uses `undiscounted_return` for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from turnwise.errors import DataError
from turnwise.runtime.section import Section
from turnwise.trajectory import Trajectory, TrajectoryGroup, Turn


class RewardWeights(Section):
    """The weight of each reward channel in the return."""

    outcome: float = Field(default=1.0, description="Weight of the task's own reward.")
    format: float = Field(default=1.0, description="Weight of the reward for a well-formed reply.")
    shaping: float = Field(
        default=1.0, description="Weight of shaping rewards: the env's own and those of the potential."
    )
    penalty: float = Field(default=1.0, description="Weight of penalties.")
    judge: float = Field(default=1.0, description="Weight of a judge's score.")


class RewardConfig(Section):
    """How the env's rewards are changed before credit is assigned; docs/algorithms/rewards.md explains what cancels."""

    weights: RewardWeights = Field(default_factory=RewardWeights, description="Weights of the channels.")
    model: str = Field(
        default="",
        description="Directory of an outcome model (docs/outcome_models.md), whose score of each attempt is added as "
        "the channel `judge`; empty: none.",
    )
    potential: bool = Field(
        default=False, description="Shape rewards with the env's `potential()` and the method's own discount."
    )
    turn_decay: float = Field(
        default=1.0, gt=0, le=1, description="Multiply the outcome by this for every turn after the first; 1 is off."
    )
    max_length: int = Field(
        default=0,
        ge=0,
        description="Sampled tokens in an attempt from which the full length penalty applies; 0 is off.",
    )
    length_buffer: int = Field(
        default=0, ge=0, description="The length penalty grows from 0 to full over this many tokens before max_length."
    )
    length_penalty: float = Field(default=1.0, ge=0, description="Size of the full length penalty.")
    on_truncated: Literal["keep", "mask"] = Field(
        default="keep",
        description="What to do with an attempt that a limit cut short: train it like others, or leave it out "
        "of the loss.",
    )

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if not self.max_length and (self.length_buffer or self.length_penalty != 1):
            raise ValueError("length_buffer and length_penalty are not read while max_length is 0; set max_length")
        if self.length_buffer > self.max_length:
            raise ValueError(f"length_buffer={self.length_buffer} is more than max_length={self.max_length}")
        return self


@dataclass(frozen=True, slots=True)
class Shaping:
    """The section `reward` and the method's discount. The defaults change nothing."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    gamma: float = 1.0
    """Discount per turn that the potentials use."""


NO_SHAPING = Shaping()


def shape_group(group: TrajectoryGroup, shaping: Shaping) -> TrajectoryGroup:
    """Shape the rewards of a group; ids, logprobs and outcomes do not change."""
    if shaping == NO_SHAPING:
        return group
    return replace(group, trajectories=tuple(shape_trajectory(t, shaping) for t in group.trajectories))


def shape_trajectory(trajectory: Trajectory, shaping: Shaping) -> Trajectory:
    """Shape the rewards of one attempt."""
    reward = shaping.reward
    parts = [dict(turn.reward_parts) for turn in trajectory.turns]
    decay = reward.turn_decay ** (len(parts) - 1)
    for own in parts:
        if decay != 1 and "outcome" in own:
            own["outcome"] *= decay
    if reward.potential:
        changes = potential_rewards(_potentials(trajectory), gamma=shaping.gamma)
        for own, change in zip(parts, changes, strict=True):
            own["shaping"] = own.get("shaping", 0.0) + change
    if reward.max_length:
        length = sum(len(turn.sampled_ids) for turn in trajectory.turns)
        share = soft_overlong(length, reward.max_length, reward.length_buffer)
        parts[-1]["penalty"] = parts[-1].get("penalty", 0.0) + reward.length_penalty * share
    weights = reward.weights.model_dump()
    is_masked = reward.on_truncated == "mask" and trajectory.is_truncated
    turns = [
        replace(
            turn,
            reward_parts={part: weights.get(part, 1.0) * value for part, value in own.items()},
            is_trained=turn.is_trained and not is_masked,
        )
        for turn, own in zip(trajectory.turns, parts, strict=True)
    ]
    return replace(trajectory, turns=tuple(turns))


def potential_rewards(potentials: Sequence[float], *, gamma: float) -> NDArray[np.float64]:
    """`gamma * Phi(s_{k+1}) - Phi(s_k)` for each turn, from the potentials of all states, including the last one.

    >>> potential_rewards([0.0, 0.5, 0.0], gamma=1.0).tolist()
    [0.5, -0.5]
    """
    phi = np.asarray(potentials, dtype=np.float64)
    return gamma * phi[1:] - phi[:-1]


def undiscounted_return(trajectory: Trajectory, *, gamma: float, weight: float = 1.0) -> float:
    """The return of a whole attempt without the discount `gamma` on its potentials.

    Args:
        trajectory: an attempt whose rewards are shaped.
        weight: weight of the channel `shaping`, which contains the potentials; 0 if the rewards contain none.
    """
    if gamma == 1 or weight == 0:
        return trajectory.total_reward
    return trajectory.total_reward + weight * (1 - gamma) * sum(_potentials(trajectory)[1:])


def soft_overlong(length: int, max_length: int, buffer: int) -> float:
    """0 up to `max_length - buffer`, then linear, -1 from `max_length` on (DAPO, arXiv:2503.14476 eq. 13)."""
    if length <= max_length - buffer:
        return 0.0
    return (max_length - buffer - length) / buffer if length <= max_length and buffer else -1.0


def _potentials(trajectory: Trajectory) -> list[float]:
    """The potential of every state. After the task's end it is 0; an attempt that a limit cut short keeps its last
    one."""
    phis = [_potential(turn.potential, trajectory) for turn in trajectory.turns]
    last: Turn = trajectory.turns[-1]
    phis.append(_potential(last.next_potential, trajectory) if trajectory.is_truncated else 0.0)
    return phis


def _potential(potential: float | None, trajectory: Trajectory) -> float:
    if potential is None:
        raise DataError(
            f"reward.potential is on, and the env of {trajectory.task_id} gives no potential; give it a method "
            "potential() -> float, or set reward.potential=false"
        )
    return potential
