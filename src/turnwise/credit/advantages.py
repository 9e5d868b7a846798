"""Rewards to advantages.

A baseline is computed inside a group: attempts at the same task from the same start, without the failed ones. It gives
one number per attempt, however many turns or datums the attempt has. `reward_to_go` works inside one attempt and gives
one number per turn; it also counts rewards of later turns. `whiten` works on a whole batch and ignores its groups.

Axes: `_G` the attempts of a group, `_K` the turns of an attempt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError

FloatArray = NDArray[np.float64]
Rewards = Sequence[float] | FloatArray

STD_EPS = 1e-6
"""Added to the standard deviation, as verl, SkyRL and TRL do."""
TURN_STD_EPS = 1e-4
"""The value that MT-GRPO adds."""
WHITEN_EPS = 1e-9
CONSTANT_TOLERANCE = 1e-9
"""Rewards whose relative difference is smaller than this count as equal: the difference is rounding."""


def center_by_group(rewards_G: Rewards) -> FloatArray:
    """`R_j - mean(R)`; the results sum to 0. A group of one has nothing to compare with and gets 0.

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
    """`R_j - mean of the others` (RLOO, arXiv:2402.14740), which is G/(G-1) times `center_by_group`."""
    rewards_G = _finite(rewards_G)
    if is_constant_group(rewards_G):
        return np.zeros_like(rewards_G)
    return center_by_group(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


def divide_by_mean(rewards_G: Rewards, *, eps: float = STD_EPS) -> FloatArray:
    """`(R_j - mean) / (mean + eps)` (MaxRL): with rewards 0 and 1, a rare success gets a large advantage.

    A mean of 0 or less is refused.
    """
    rewards_G = _finite(rewards_G)
    if is_constant_group(rewards_G):
        return np.zeros_like(rewards_G)
    mean = float(rewards_G.mean())
    if mean <= 0:
        raise DataError(f"the mean reward of a group is {mean:g}; max_rl divides by it and needs rewards from 0 up")
    return center_by_group(rewards_G) / (mean + eps)


def is_constant_group(rewards_G: Rewards) -> bool:
    """Whether all attempts got the same reward. Then no attempt was better than another, and every advantage is 0."""
    rewards_G = _finite(rewards_G)
    spread = float(rewards_G.max() - rewards_G.min())
    return spread <= CONSTANT_TOLERANCE * max(1.0, float(np.abs(rewards_G).max()))


def reward_to_go(rewards_K: Rewards, *, discount: float = 1.0) -> FloatArray:
    """The discounted reward from each turn on: `sum over j >= k of discount**(j - k) * r_j`.

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


def compare_by_turn(
    returns: Sequence[FloatArray], compare: Callable[[Sequence[float]], FloatArray]
) -> list[FloatArray]:
    """Compare the k-th turns of a group's attempts with each other. An attempt that is over counts as 0.

    If only the running attempts were compared, taking another turn would cost something by itself.
    """
    to_go_GK = np.zeros((len(returns), max(len(own) for own in returns)))
    for row_K, own_K in zip(to_go_GK, returns, strict=True):
        row_K[: len(own_K)] = own_K
    compared_GK = np.stack([compare(column_G.tolist()) for column_G in to_go_GK.T], axis=1)
    return [row_K[: len(own_K)] for row_K, own_K in zip(compared_GK, returns, strict=True)]


def whiten(values_N: Rewards, *, counts_N: Sequence[float] | None = None, eps: float = WHITEN_EPS) -> FloatArray:
    """`(x - mean) / (std + eps)` over a whole batch, with the population standard deviation.

    Args:
        counts_N: how often each value counts, such as the number of tokens in a turn.
    """
    values_N = _finite(values_N)
    if is_constant_group(values_N):
        return np.zeros_like(values_N)
    counts = np.ones_like(values_N) if counts_N is None else np.asarray(counts_N, dtype=np.float64)
    mean = float(np.average(values_N, weights=counts))
    std = float(np.sqrt(np.average((values_N - mean) ** 2, weights=counts)))
    return (values_N - mean) / (std + eps)


def outcome_plus_turn(
    rewards: Sequence[Rewards], *, coefficient: float = 1.0, eps: float = TURN_STD_EPS
) -> list[FloatArray]:
    """MT-GRPO (arXiv:2505.11821): what each turn of a group's attempts deserves.

    The last reward of an attempt is its outcome; the earlier rewards belong to their turns. Both are normalised inside
    the group, separately. The rewards of turn k are compared among the attempts in which turn k is not the last one.

        A_last = A_outcome        A_k = A_outcome + coefficient * A_turn_k
    """
    attempts = [_finite(own) for own in rewards]
    outcomes_G = normalise_by_group([own[-1] for own in attempts], eps=eps)
    advantages = [np.full(len(own), outcome) for own, outcome in zip(attempts, outcomes_G, strict=True)]
    for turn in range(max(len(own) for own in attempts) - 1):
        having = [j for j, own in enumerate(attempts) if turn < len(own) - 1]
        normalised = normalise_by_group([attempts[j][turn] for j in having], eps=eps)
        for j, value in zip(having, normalised, strict=True):
            advantages[j][turn] += coefficient * value
    return advantages


def step_advantages(
    returns: Sequence[Rewards],
    anchors: Sequence[Sequence[str]],
    compare: Callable[[Sequence[float]], FloatArray] = center_by_group,
) -> list[FloatArray]:
    """GiGPO's step advantage (arXiv:2505.10978): compare each turn's return with those of all turns from the same
    state.

    Args:
        returns: [K] per attempt of one group, the discounted rewards from each turn on.
        anchors: the env's key for the state before each turn. A state that occurs once gets 0: nothing compares with
            it.
    """
    places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for j, keys in enumerate(anchors):
        for turn, key in enumerate(keys):
            places[key].append((j, turn))
    found = [np.zeros(len(keys)) for keys in anchors]
    for same in places.values():
        compared = compare([float(returns[j][turn]) for j, turn in same])
        for (j, turn), value in zip(same, compared, strict=True):
            found[j][turn] = value
    return found


def _finite(rewards: Rewards) -> FloatArray:
    array = np.asarray(rewards, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise DataError(f"rewards have shape {list(array.shape)}; expected a list with at least one number")
    is_bad = ~np.isfinite(array)
    if is_bad.any():
        at = int(np.argmax(is_bad))
        raise DataError(f"reward {at} is {array[at]}; a failed attempt is left out of its group, it has no reward")
    return array
