"""How far the gradient estimates of our methods are from the true gradient, on a game small enough to know it.

Eight turns of four actions, an additive reward, and a shock that the env adds after turn 0. The numbers are the mean
square error times the turns that were played (lower is better), from the algorithms' specification, section 6.3 (a).
Axes: `_G` attempts, `_K` turns, `_A` actions.
"""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.credit.advantages import compare_by_turn, leave_one_out, reward_to_go

TURNS, ACTIONS, ATTEMPTS, GROUPS, REPEATS = 8, 4, 8, 16, 300
WORTH_A = np.array([0.0, 0.0, 0.0, 1.0]) / TURNS
POLICY_A = np.full(ACTIONS, 1 / ACTIONS)
EXACT_KA = np.tile(POLICY_A * (WORTH_A - (POLICY_A * WORTH_A).sum()), (TURNS, 1))

TABLE = {
    0.0: {"grpo": (1.24, 1.09), "reward_to_go": (0.70, 0.54), "turn_h": (5.28, 4.10), "from_h": (2.51, 1.32)},
    0.3: {"grpo": (6.17, 5.37), "reward_to_go": (1.35, 0.54), "turn_h": (8.64, 4.10), "from_h": (7.59, 3.04)},
    1.0: {"grpo": (55.2, 48.1), "reward_to_go": (7.64, 0.54), "turn_h": (42.8, 4.10), "from_h": (59.3, 20.7)},
}
"""By the shock's deviation: over all turns, and over those after the shock."""


def _estimate(kind: str, shock: float, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """One group's gradient, and how many turns were played for it."""
    actions_GK = rng.integers(0, ACTIONS, (ATTEMPTS, TURNS))
    shock_G = shock * rng.standard_normal(ATTEMPTS)
    branch = 0
    if kind in ("turn_h", "from_h"):
        branch = int(rng.choice(TURNS))
        actions_GK[:, :branch] = actions_GK[0, :branch]
        if branch >= 1:
            shock_G[:] = shock_G[0]
    rewards_GK = WORTH_A[actions_GK]
    rewards_GK[:, 0] += shock_G
    score_GKA = np.eye(ACTIONS)[actions_GK] - POLICY_A
    if kind == "reward_to_go":
        advantages_GK = np.stack(compare_by_turn([reward_to_go(own) for own in rewards_GK], leave_one_out))
    else:
        advantages_GK = np.repeat(leave_one_out(rewards_GK.sum(1))[:, None], TURNS, axis=1)
    weight_K = np.ones(TURNS)
    if kind == "turn_h":
        weight_K = np.eye(TURNS)[branch] * TURNS  # 1 / P(h)
    elif kind == "from_h":
        weight_K = np.where(np.arange(TURNS) >= branch, TURNS / np.arange(1, TURNS + 1), 0.0)  # 1 / P(h <= k)
    gradient_KA = (weight_K[None, :, None] * advantages_GK[:, :, None] * score_GKA).mean(0)
    return gradient_KA, branch + ATTEMPTS * (TURNS - branch)


def _error(kind: str, shock: float) -> tuple[float, float]:
    rng = np.random.default_rng(1)
    square_KA, played = np.zeros((TURNS, ACTIONS)), 0
    for _ in range(REPEATS):
        groups = [_estimate(kind, shock, rng) for _ in range(GROUPS)]
        square_KA += (np.mean([gradient for gradient, _ in groups], axis=0) - EXACT_KA) ** 2 / REPEATS
        played += sum(turns for _, turns in groups)
    return float(square_KA.sum() * played / REPEATS), float(square_KA[1:].sum() * played / REPEATS)


@pytest.mark.parametrize("shock", TABLE)
def test_the_gradient_error_of_each_estimator_is_the_specifications(shock: float) -> None:
    found = {kind: _error(kind, shock) for kind in TABLE[shock]}
    for kind, expected in TABLE[shock].items():
        assert found[kind] == pytest.approx(expected, rel=0.2), kind


def test_estimates_are_unbiased() -> None:
    """Three thousand groups leave an error of about 0.003; the gradient itself is as large as 0.023."""
    for kind in TABLE[0.0]:
        rng = np.random.default_rng(2)
        mean_KA = np.mean([_estimate(kind, 0.3, rng)[0] for _ in range(3000)], axis=0)
        assert np.abs(mean_KA - EXACT_KA).max() < 0.008, kind
