"""Pairs of a better and a worse dialogue, and the datums that a loss over pairs reads.

Both sides start from the same state: the same task and env seed, or the same dialogue up to a turn. The side with the
higher return is the better one. Only the difference between the returns is used.

DMPO (arXiv:2406.14868) weighs turn j of T by

    phi(j) = gamma^j (1 - gamma^(T-j)) / (1 - gamma^T),    (T - j) / T for gamma = 1

which is 1 at the first turn and then falls: later turns count less, and long dialogues count no more than short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.advantages import is_constant_group
from turnwise.credit.branching import trim_tail
from turnwise.credit.datums import trajectory_to_datums
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import Datum, TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two dialogues from the same state."""

    chosen: Trajectory
    rejected: Trajectory
    branch_turn: int = 0
    """The first turn in which they may differ."""
    branch_probability: float = 1.0
    """The probability with which that turn was drawn."""

    def __post_init__(self) -> None:
        if self.chosen.task_id != self.rejected.task_id:
            raise DataError(f"the pair has attempts at two tasks: {self.chosen.task_id} and {self.rejected.task_id}")
        for trajectory in (self.chosen, self.rejected):
            if trajectory.failure is not None:
                raise DataError(f"an attempt at {trajectory.task_id} in the pair has failed; it has no return")
            if self.branch_turn >= len(trajectory.turns):
                raise DataError(
                    f"attempt {trajectory.attempt} at {trajectory.task_id} has {len(trajectory.turns)} turns, and its "
                    f"pair branches at turn {self.branch_turn}"
                )
        if _prefix(self.chosen, self.branch_turn) != _prefix(self.rejected, self.branch_turn):
            raise DataError(f"the dialogues of the pair at {self.chosen.task_id} differ before turn {self.branch_turn}")

    @property
    def reward_difference(self) -> float:
        return self.chosen.total_reward - self.rejected.total_reward

    @property
    def is_identical(self) -> bool:
        """Whether the policy said the same in both, so that there is nothing to prefer."""
        return _said(self.chosen) == _said(self.rejected)

    @property
    def is_identical_at_branch(self) -> bool:
        """Whether the policy said the same at the branch turn, for a method that trains only that turn."""
        return _said(self.chosen)[self.branch_turn] == _said(self.rejected)[self.branch_turn]

    def is_masked(self, *, only_branch_turn: bool) -> bool:
        """Whether a side has no trained token, so that the sides cannot be compared."""
        turns = slice(self.branch_turn, self.branch_turn + 1) if only_branch_turn else slice(None)
        return not all(any(turn.is_trained for turn in side.turns[turns]) for side in (self.chosen, self.rejected))


def _prefix(trajectory: Trajectory, turn: int) -> tuple[object, ...]:
    """All ids before the first sampled id of turn `turn`."""
    turns = [(each.prompt_ids, each.sampled_ids) for each in trajectory.turns[:turn]]
    return (*turns, trajectory.turns[turn].prompt_ids)


def _said(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [turn.sampled_ids for turn in trajectory.turns]


def best_and_worst(group: TrajectoryGroup) -> PreferencePair | None:
    """The best and the worst attempt as a pair; None if all returns are the same. Ties go to the earlier attempt."""
    if len(group.trajectories) < 2 or is_constant_group(group.rewards):
        return None
    rewards_G = np.asarray(group.rewards)
    return _pair(group, group.trajectories[int(rewards_G.argmax())], group.trajectories[int(rewards_G.argmin())])


def disjoint_pairs(group: TrajectoryGroup) -> list[PreferencePair]:
    """Pair the attempts two by two in their order; the better one is chosen. If their number is odd, the last is left
    out.

    The pairing does not depend on the returns. A pair of the best and the worst would differ by more than two random
    attempts do, and a regression on that difference would learn the selection.
    """
    both = zip(group.trajectories[0::2], group.trajectories[1::2], strict=False)
    return [_pair(group, *((b, a) if b.total_reward > a.total_reward else (a, b))) for a, b in both]


def _pair(group: TrajectoryGroup, chosen: Trajectory, rejected: Trajectory) -> PreferencePair:
    return PreferencePair(
        chosen=chosen,
        rejected=rejected,
        branch_turn=group.branch_turn or 0,
        branch_probability=group.branch_probability,
    )


def dmpo_weights(num_turns: int, *, gamma: float = 0.7) -> NDArray[np.float64]:
    """[T] DMPO's weight phi of each turn.

    >>> dmpo_weights(2, gamma=1.0).tolist()
    [1.0, 0.5]
    """
    if not 0 < gamma <= 1:
        raise ConfigError(f"gamma={gamma}; expected more than 0 and at most 1")
    if num_turns < 1:
        raise DataError(f"num_turns={num_turns}; expected at least one turn")
    j = np.arange(num_turns)
    if gamma == 1:
        return (num_turns - j) / num_turns
    return gamma**j * (1 - gamma ** (num_turns - j)) / (1 - gamma**num_turns)


def side_to_datums(
    trajectory: Trajectory,
    number: int,
    *,
    reward: float,
    weight: float,
    turn_weights: Sequence[float] | None = None,
    with_reference: bool = True,
) -> list[Datum]:
    """One side of a pair, for a loss over pairs.

    Args:
        number: the pair's number, from 1; negative for its rejected side.
        reward: the side's return; only the difference within the pair counts.
        weight: the pair's weight in the optimizer step.
        turn_weights: one per turn; None gives all turns the same weight.
        with_reference: use the policy that sampled as the reference; otherwise the trainer computes one.
    """
    weights = [1.0] * len(trajectory.turns) if turn_weights is None else list(turn_weights)
    # A column with one number per turn has the same layout as advantages.
    return [
        _side_datum(trim_tail(datum), number, reward, weight, with_reference, has_weights=turn_weights is not None)
        for datum in trajectory_to_datums(trajectory, weights)
    ]


def _side_datum(
    datum: Datum, number: int, reward: float, weight: float, with_reference: bool, *, has_weights: bool
) -> Datum:
    inputs = dict(datum.loss_fn_inputs)
    mask = inputs["mask"].to_numpy()
    turn_weights = inputs["advantages"]
    inputs["pair"] = TensorData([float(number)] * len(mask))
    inputs["advantages"] = TensorData((reward * mask).tolist())
    inputs["weights"] = TensorData((weight * mask).tolist())
    if has_weights:
        inputs["turn_weights"] = turn_weights
    if with_reference:
        inputs["ref_logprobs"] = inputs["logprobs"]
    return Datum(datum.model_input, inputs)
