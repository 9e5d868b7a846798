"""When a critic's pre-training is over, and what its section of the config refuses."""

from __future__ import annotations

import json
import math

import pytest

from turnwise.config.critic import CriticConfig
from turnwise.methods.lookup import read_method
from turnwise.training.critic import Plateau


def batches_until_plateau(patience: int, numbers: list[tuple[float, float]]) -> int | None:
    plateau = Plateau(patience)
    for batch, (variance, loss) in enumerate(numbers, start=1):
        if plateau.is_reached(variance, loss):
            return batch
    return None


def test_a_critic_that_gets_better_goes_on() -> None:
    assert batches_until_plateau(2, [(0.1 * batch, 1.0) for batch in range(20)]) is None
    assert batches_until_plateau(2, [(0.0, 0.9**batch) for batch in range(20)]) is None


def test_it_ends_when_neither_number_got_better_for_a_while() -> None:
    assert batches_until_plateau(3, [(0.5, 1.0), (0.8, 0.5), *[(0.8, 0.5)] * 10]) == 5


def test_a_falling_loss_keeps_it_going_while_the_variance_dips() -> None:
    """It learns the mean first, which explains no variance."""
    learning_the_mean = [(0.0, 0.27), (-0.13, 0.21), (-0.19, 0.13), (-0.2, 0.06), (-0.08, 0.04)]
    assert batches_until_plateau(2, learning_the_mean) is None


def test_a_slow_rise_counts_once_it_adds_up() -> None:
    assert batches_until_plateau(3, [(0.005 * batch, 1.0) for batch in range(30)]) is None
    assert batches_until_plateau(3, [(0.001 * batch, 1.0) for batch in range(30)]) == 4


def test_returns_that_are_all_the_same_are_a_plateau() -> None:
    assert batches_until_plateau(3, [(math.nan, 0.0)] * 10) == 4


def test_a_plateau_is_known_over_the_end_of_a_process() -> None:
    numbers = [(math.nan, 1.0), (0.2, 0.8), (0.5, 0.5), *[(0.5, 0.5)] * 10]
    for stop in range(6):
        first = Plateau(4)
        assert not any(first.is_reached(*batch) for batch in numbers[:stop])
        second = Plateau(4)
        second.restore(json.loads(json.dumps(first.to_state(), allow_nan=False)))
        reached = [second.is_reached(*batch) for batch in numbers[stop:]]
        assert stop + reached.index(True) + 1 == batches_until_plateau(4, numbers) == 7


@pytest.mark.parametrize(
    ("options", "method", "message"),
    [
        ({"rank": 4}, "grpo", r"critic\.rank is not read by method=grpo, only by ppo"),
        ({"pretrain_steps": 0, "pretrain_patience": 2}, "ppo", r"not read while critic\.pretrain_steps is 0"),
    ],
)
def test_an_option_that_nobody_reads_is_refused(options: dict[str, int], method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CriticConfig(**options).check(read_method(method))  # pyright: ignore[reportArgumentType]


def test_a_config_that_says_every_default_out_loud_is_fine_for_any_method() -> None:
    """A stored config does, and is read again by a resumed run."""
    CriticConfig(**CriticConfig().model_dump()).check(read_method("grpo"))
