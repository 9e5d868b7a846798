"""Reward channels and their shaping: what is made of an env's rewards before they are credited.

    weights      r = sum over channels of weight * part
    turn decay   outcome * decay**(T - 1) in an attempt of T turns
    length       penalty: 0 up to `max_length - length_buffer` sampled tokens, then growing, 1 from `max_length` on
    potential    r_k + gamma * Phi(s_{k+1}) - Phi(s_k), with Phi = 0 after the end of a task

Potentials come from the env (`potential()`) and gamma is the method's own, so the best policy stays the best
(Ng, Harada, Russell 1999). In a group from one start, and without a discount, they add up to -Phi(s_0) for every
attempt that ended: a baseline over whole attempts takes that off again, and only per-turn credit sees them. With a
discount the plain sum of a whole attempt has -(1 - gamma) Phi(s_k) too for every later state, a price on good ones; a
method that discounts turns and compares whole attempts as well takes `undiscounted_return` for the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError
from turnwise.trajectory import Trajectory, TrajectoryGroup, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What to make of rewards; as it stands, nothing."""

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """By channel; 1 where one is not named."""
    potential_gamma: float | None = None
    """The discount per turn of the potential; None leaves potentials alone."""
    turn_decay: float = 1.0
    max_length: int = 0
    """Sampled tokens of an attempt; 0 is no length penalty."""
    length_buffer: int = 0
    length_penalty: float = 1.0
    masks_truncated: bool = False
    """Leave attempts that a limit cut short out of the loss; they stay in the group's baseline."""


NO_SHAPING = Shaping()


def shape_group(group: TrajectoryGroup, shaping: Shaping) -> TrajectoryGroup:
    """The group with its rewards shaped; ids, logprobs and outcomes stay as they were."""
    if shaping == NO_SHAPING:
        return group
    return replace(group, trajectories=tuple(shape_trajectory(t, shaping) for t in group.trajectories))


def shape_trajectory(trajectory: Trajectory, shaping: Shaping) -> Trajectory:
    parts = [dict(turn.reward_parts) for turn in trajectory.turns]
    decay = shaping.turn_decay ** (len(parts) - 1)
    for own in parts:
        if decay != 1 and "outcome" in own:
            own["outcome"] *= decay
    if shaping.potential_gamma is not None:
        for own, change in zip(parts, _potential_changes(trajectory, shaping.potential_gamma), strict=True):
            own["shaping"] = own.get("shaping", 0.0) + change
    if shaping.max_length:
        length = sum(len(turn.sampled_ids) for turn in trajectory.turns)
        share = soft_overlong(length, shaping.max_length, shaping.length_buffer)
        parts[-1]["penalty"] = parts[-1].get("penalty", 0.0) + shaping.length_penalty * share
    is_masked = shaping.masks_truncated and trajectory.is_truncated
    turns = [
        replace(turn, reward_parts=_weighted(own, shaping.weights), is_trained=turn.is_trained and not is_masked)
        for turn, own in zip(trajectory.turns, parts, strict=True)
    ]
    return replace(trajectory, turns=tuple(turns))


def potential_rewards(potentials: Sequence[float], *, gamma: float) -> NDArray[np.float64]:
    """`gamma * Phi(s_{k+1}) - Phi(s_k)` for each turn, from the potentials of every state, the last one included.

    >>> potential_rewards([0.0, 0.5, 0.0], gamma=1.0).tolist()
    [0.5, -0.5]
    """
    phi = np.asarray(potentials, dtype=np.float64)
    return gamma * phi[1:] - phi[:-1]


def undiscounted_return(trajectory: Trajectory, *, gamma: float, weight: float = 1.0) -> float:
    """The return of a whole attempt whose potentials were discounted by `gamma`, as if they had not been.

    Args:
        trajectory: with its rewards shaped.
        weight: of the channel `shaping`, which the potentials are in; 0 where the rewards hold none.
    """
    if gamma == 1 or weight == 0:
        return trajectory.total_reward
    return trajectory.total_reward + weight * (1 - gamma) * sum(_potentials(trajectory)[1:])


def soft_overlong(length: int, max_length: int, buffer: int) -> float:
    """0 up to `max_length - buffer`, then linear, -1 from `max_length` on (DAPO, arXiv:2503.14476 eq. 13)."""
    if length <= max_length - buffer:
        return 0.0
    return (max_length - buffer - length) / buffer if length <= max_length and buffer else -1.0


def turn_decayed(outcome: float, num_turns: int, *, decay: float) -> NDArray[np.float64]:
    """What an outcome at the end is worth at each turn: `outcome * decay**(turns left)`, the discounted return."""
    return outcome * decay ** np.arange(num_turns - 1, -1, -1, dtype=np.float64)


def _weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    return {part: weights.get(part, 1.0) * value for part, value in parts.items()}


def _potential_changes(trajectory: Trajectory, gamma: float) -> NDArray[np.float64]:
    return potential_rewards(_potentials(trajectory), gamma=gamma)


def _potentials(trajectory: Trajectory) -> list[float]:
    """Of every state. Phi after the end of a task is 0; where an attempt was cut short, it is the env's last word."""
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
