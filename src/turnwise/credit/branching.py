"""Chooses the turn at which a dialogue branches, and the turns that are trained after that.

    uniform     P(h) = 1 / H                              REFUEL's choice (arXiv:2410.04612)
    geometric   P(h) proportional to (1 - p)^h, h < H     draws early turns more often

The gradient of turn h alone, divided by P(h), is in expectation the gradient of the sum over all turns. That holds for
a mean over all dialogues of a batch, including those that ended before turn h, which add 0. A dialogue of T turns
reaches its turn h with probability sum over h < T of P(h), so it counts sum over h < T of P(h) / P(h) = T times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import ConfigError
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import Datum, ModelInput, TensorData

TurnDistribution = Literal["uniform", "geometric"]


def turn_probabilities(kind: TurnDistribution, num_turns: int, *, p: float = 0.3) -> NDArray[np.float64]:
    """[H] the probability of each turn; they add up to 1.

    >>> turn_probabilities("geometric", 3, p=0.5).round(3).tolist()
    [0.571, 0.286, 0.143]
    """
    if num_turns < 1:
        raise ConfigError(f"num_turns={num_turns}; expected at least one turn to branch at")
    if kind == "geometric" and not 0 < p < 1:
        raise ConfigError(f"p={p}; expected more than 0 and less than 1")
    weights_H = np.ones(num_turns) if kind == "uniform" else (1 - p) ** np.arange(num_turns)
    return weights_H / weights_H.sum()


@dataclass(frozen=True, slots=True)
class BranchVariances:
    """Variances of returns, estimated without bias from the groups of one batch."""

    inside: float
    """Variance of the continuations of one dialogue: Var(R | prefix)."""
    total: float
    """Variance of all returns: Var(R)."""

    @property
    def share(self) -> float:
        """Var(R | prefix) / Var(R). The rest was decided before the branch (also by the task)."""
        return self.inside / self.total


def branch_variances(groups: Sequence[TrajectoryGroup]) -> BranchVariances | None:
    """The variances of returns in branched groups; None if they cannot be estimated.

    Both are unbiased estimates of a random effects model, so their share does not depend on the size of the groups. In
    one batch it can exceed 1, if the means of groups are closer together than expected by chance. It is not cut off at
    1, because its mean over steps would be too low.
    """
    rewards = [np.asarray(group.rewards) for group in groups if group.branch_turn is not None and group.trajectories]
    sizes = np.asarray([len(own) for own in rewards], float)
    num_groups, num_attempts = len(rewards), float(sizes.sum())
    if num_groups < 2 or num_attempts == num_groups or np.ptp(np.concatenate(rewards)) == 0:
        return None
    overall = np.concatenate(rewards).mean()
    inside = sum(float(((own - own.mean()) ** 2).sum()) for own in rewards) / (num_attempts - num_groups)
    # Means of groups differ by what came before the branch, and by chance: E[between] = inside + size * before.
    between = sum(len(own) * float((own.mean() - overall) ** 2) for own in rewards) / (num_groups - 1)
    size = (num_attempts - float((sizes**2).sum()) / num_attempts) / (num_groups - 1)
    return BranchVariances(inside=inside, total=inside + (between - inside) / size)


def pooled_branch_share(shares: Mapping[int, float], totals: Mapping[int, float]) -> float | None:
    """Var(R | prefix) / Var(R) of a whole run: the mean of the one over the mean of the other; None if none is known.

    A mean of shares would let steps in which returns hardly differ count as much as the others.

    Args:
        shares: The share of each step.
        totals: Var(R) of each step.

    >>> pooled_branch_share({1: 0.5, 2: 1.0}, {1: 3.0, 2: 1.0})
    0.625
    """
    known = [(shares[step] * totals[step], totals[step]) for step in shares if step in totals]
    total = sum(own for _, own in known)
    return sum(inside for inside, _ in known) / total if total else None


def with_branched_share(groups: Sequence[TrajectoryGroup], num_ended: int) -> tuple[TrajectoryGroup, ...]:
    """The groups of a batch, each with the share of the batch's dialogues that reached the turn to branch at.

    Args:
        num_ended: number of dialogues that ended before that turn, so that they have no group.
    """
    if not num_ended:
        return tuple(groups)
    share = len(groups) / (len(groups) + num_ended)
    return tuple(replace(group, branched_share=share) for group in groups)


def train_turns(trajectory: Trajectory, first: int, last: int | None = None) -> Trajectory:
    """The same trajectory with only the turns from `first` to `last`, both included, in the loss."""
    stop = len(trajectory.turns) if last is None else last + 1
    turns = tuple(
        replace(turn, is_trained=turn.is_trained and first <= index < stop)
        for index, turn in enumerate(trajectory.turns)
    )
    return replace(trajectory, turns=turns)


def trim_tail(datum: Datum) -> Datum:
    """Cut the datum after its last trained target: nothing that is trained reads what follows."""
    mask = datum.loss_fn_inputs["mask"].to_numpy()
    trained = np.nonzero(mask)[0]
    length = int(trained[-1]) + 1 if len(trained) else len(mask)
    if length == len(mask):
        return datum
    columns = {key: TensorData(column.data[:length], column.dtype) for key, column in datum.loss_fn_inputs.items()}
    return Datum(ModelInput.from_ints(datum.model_input.to_ints()[:length]), columns)
