"""Rewards to advantages.

Baselines are made inside a group: attempts at the same task from the same start, failed ones already left out. One
number per attempt, whatever number of turns or datums it has. `reward_to_go` works inside one attempt and gives one
number per turn; it crosses what the env said in between.

Axes: `_G` the attempts of a group, `_K` the turns of an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError

FloatArray = NDArray[np.float64]
Rewards = Sequence[float] | FloatArray

STD_EPS = 1e-6
"""Added to the standard deviation, as verl, SkyRL and TRL do."""
CONSTANT_TOLERANCE = 1e-9
"""Rewards that differ by less than this, relative to their size, differ by rounding."""


def center_by_group(rewards_G: Rewards) -> FloatArray:
    """`R_j - mean(R)`; they sum to 0. A group of one has nothing to be compared with and gets 0.

    >>> center_by_group([1.0, 0.0, 0.5, 1.0]).tolist()
    [0.375, -0.625, -0.125, 0.375]
    """
    rewards_G = _finite(rewards_G)
    if is_constant_group(rewards_G):
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def normalise_by_group(rewards_G: Rewards, *, eps: float = STD_EPS) -> FloatArray:
    """`(R_j - mean) / (std + eps)` with the unbiased standard deviation (GRPO, arXiv:2402.03300)."""
    rewards_G = _finite(rewards_G)
    if is_constant_group(rewards_G):
        return np.zeros_like(rewards_G)
    return center_by_group(rewards_G) / (rewards_G.std(ddof=1) + eps)


def leave_one_out(rewards_G: Rewards) -> FloatArray:
    """`R_j - mean of the others` (RLOO, arXiv:2402.14740), which is G/(G-1) times the centred one."""
    rewards_G = _finite(rewards_G)
    if is_constant_group(rewards_G):
        return np.zeros_like(rewards_G)
    return center_by_group(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


def is_constant_group(rewards_G: Rewards) -> bool:
    """All attempts got the same reward, so no attempt was better than another: every advantage is 0."""
    rewards_G = _finite(rewards_G)
    spread = float(rewards_G.max() - rewards_G.min())
    return spread <= CONSTANT_TOLERANCE * max(1.0, float(np.abs(rewards_G).max()))


def reward_to_go(rewards_K: Rewards, *, discount: float = 1.0) -> FloatArray:
    """What is still to come at each turn: `sum over j >= k of discount**(j - k) * r_j`.

    The discount counts turns, not tokens.

    >>> reward_to_go([0.0, 1.0], discount=0.5).tolist()
    [0.5, 1.0]
    """
    if not 0 <= discount <= 1:
        raise DataError(f"discount={discount}; expected 0 to 1 (1 does not discount)")
    rewards_K = _finite(rewards_K)
    to_go_K = np.empty_like(rewards_K)
    running = 0.0
    for turn in reversed(range(len(rewards_K))):
        running = rewards_K[turn] + discount * running
        to_go_K[turn] = running
    return to_go_K


def _finite(rewards: Rewards) -> FloatArray:
    array = np.asarray(rewards, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise DataError(f"rewards have shape {list(array.shape)}; expected a list with at least one number")
    is_bad = ~np.isfinite(array)
    if is_bad.any():
        at = int(np.argmax(is_bad))
        raise DataError(f"reward {at} is {array[at]}; a failed attempt is left out of its group, it has no reward")
    return array
