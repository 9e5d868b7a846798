"""KL inside the advantages: the specification's vector, and the gradient that comes of it."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.credit.kl import kl_advantages
from turnwise.errors import DataError

RATIOS = [np.array([0.3, 0.1])]


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [-0.01, 0.01]), (0.9, [-0.001, 0.01])])
def test_the_penalty_gives_the_specifications_vector(gamma: float, expected: list[float]) -> None:
    (found,) = kl_advantages(RATIOS, coef=0.1, gamma=gamma)
    assert found == pytest.approx(expected)


def test_the_mean_is_over_all_tokens_of_the_step_and_the_sum_ahead_stays_inside_an_attempt() -> None:
    first, second = kl_advantages([np.array([1.0, 0.0]), np.array([2.0])], coef=1.0, gamma=0.5)
    assert first == pytest.approx([0.0 + 0.5 * 1.0, 1.0])
    assert second == pytest.approx([-1.0])


def test_a_policy_that_moved_alike_everywhere_is_not_pushed() -> None:
    moved = [own + 0.7 for own in RATIOS]
    assert kl_advantages(moved, coef=0.1)[0] == pytest.approx(kl_advantages(RATIOS, coef=0.1)[0])
    assert kl_advantages([np.full(3, 0.4)], coef=0.1)[0] == pytest.approx([0, 0, 0])


def test_t17_in_the_advantages_k1_has_the_gradient_of_the_kl() -> None:
    """Over a categorical, E[A grad log p] with A = mean - x is minus the gradient of KL(p || ref), by its logits."""
    p, ref = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    x = np.log(p / ref)
    advantages = p @ x - x
    score = np.eye(3) - p  # d log p_a / d logits
    true = p * (x - p @ x)
    assert (p * advantages) @ score == pytest.approx(-true)
    assert true == pytest.approx([0.098938, -0.093885, -0.005053], abs=1e-6)


def test_nothing_to_train_gives_nothing_and_what_is_not_finite_is_refused() -> None:
    assert [own.tolist() for own in kl_advantages([np.zeros(0)], coef=0.1)] == [[]]
    with pytest.raises(DataError, match="not finite"):
        kl_advantages([np.array([0.1, -np.inf])], coef=0.1)
