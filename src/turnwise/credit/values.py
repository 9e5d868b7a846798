"""A critic's values of the states of a trajectory: which states to ask for, and where the answers belong.

A value belongs to the state in which a token was sampled, so it is read at the position before that token. The env's
tokens have no values. An attempt that a limit cut short has one more value, that of the state in which its next turn
would have begun: its return continues from there.

Axes: `_S` the sampled tokens of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError
from turnwise.trajectory import Trajectory
from turnwise.types import Datum, ModelInput, TensorData

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryValues:
    """A critic's values of one trajectory."""

    turns: tuple[FloatArray, ...]
    """[S] per turn: the value of the state in which each token was sampled."""
    bootstrap: float = 0.0
    """The value of a truncated attempt's last state; 0 if the task ended by itself."""

    def __post_init__(self) -> None:
        for turn, values_S in enumerate(self.turns):
            if not len(values_S) or not np.isfinite(values_S).all():
                raise DataError(f"turn {turn} has the values {values_S.tolist()}; expected a finite one per token")
        if not math.isfinite(self.bootstrap):
            raise DataError(f"a bootstrap value of {self.bootstrap}; expected a finite number")

    def check(self, trajectory: Trajectory) -> None:
        """Refuse values that belong to another trajectory."""
        lengths = [len(turn.sampled_ids) for turn in trajectory.turns]
        if [len(values_S) for values_S in self.turns] != lengths:
            came = [len(values_S) for values_S in self.turns]
            raise DataError(f"values for turns of {came} tokens; attempt {trajectory.attempt} has turns of {lengths}")
        if self.bootstrap and not trajectory.is_truncated:
            raise DataError(
                f"a bootstrap value of {self.bootstrap}, but attempt {trajectory.attempt} at {trajectory.task_id} "
                f"ended with {trajectory.end_reason}: nothing comes after that"
            )


Values = Sequence[TrajectoryValues]
"""One entry per trajectory, in the order of the groups and of the attempts in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPositions:
    """Positions [start, stop) of a sequence hold the states in which a turn's tokens were sampled."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSequence:
    """One linear sequence of a trajectory, and the positions whose values are wanted."""

    ids: tuple[int, ...]
    """[N] the ids up to the last position that is wanted."""
    turns: tuple[TurnPositions, ...]
    bootstrap_at: int | None = None

    def question(self) -> Datum:
        """The datum that asks the critic (`forward`) for the values of all wanted positions."""
        mask = np.zeros(len(self.ids), np.float32)
        for positions in self.turns:
            mask[positions.start : positions.stop] = 1.0
        if self.bootstrap_at is not None:
            mask[self.bootstrap_at] = 1.0
        return Datum(ModelInput.from_ints(list(self.ids)), {"mask": TensorData.from_numpy(mask)})


def value_sequences(trajectory: Trajectory, next_prompt_ids: Sequence[int] = ()) -> list[ValueSequence]:
    """The sequences at which a trajectory's values are read. Turns whose prompt extends the last sequence share it.

    Args:
        next_prompt_ids: the prompt of the turn after the last; its end is the state to bootstrap from.
    """
    if trajectory.failure is not None:
        raise DataError(f"attempt {trajectory.attempt} at {trajectory.task_id} failed; its states have no return")
    found: list[_Growing] = []
    for index, turn in enumerate(trajectory.turns):
        if not found or not found[-1].extends_to(turn.prompt_ids):
            found.append(_Growing())
        found[-1].add_turn(index, turn.prompt_ids, turn.sampled_ids)
    if next_prompt_ids:
        if not found[-1].extends_to(next_prompt_ids):
            found.append(_Growing())
        found[-1].add_end(next_prompt_ids)
    return [sequence.done() for sequence in found]


class _Growing:
    """A sequence under construction."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._turns: list[TurnPositions] = []
        self._bootstrap_at: int | None = None

    def extends_to(self, prompt_ids: Sequence[int]) -> bool:
        return len(prompt_ids) >= len(self._ids) and list(prompt_ids[: len(self._ids)]) == self._ids

    def add_turn(self, index: int, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> None:
        start = len(prompt_ids) - 1
        self._ids = [*prompt_ids, *sampled_ids]
        self._turns.append(TurnPositions(turn=index, start=start, stop=start + len(sampled_ids)))

    def add_end(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._bootstrap_at = len(prompt_ids) - 1

    def done(self) -> ValueSequence:
        last = self._bootstrap_at if self._bootstrap_at is not None else self._turns[-1].stop - 1
        return ValueSequence(
            ids=tuple(self._ids[: last + 1]), turns=tuple(self._turns), bootstrap_at=self._bootstrap_at
        )


def read_values(
    trajectory: Trajectory, sequences: Sequence[ValueSequence], answers: Sequence[Sequence[float]]
) -> TrajectoryValues:
    """Sort the critic's answers, [N] per sequence, by turn. Answers at positions that are not wanted are ignored.

    If a truncated attempt has no state to bootstrap from (its next prompt did not fit into the model), its last value
    is used.
    """
    turns: dict[int, FloatArray] = {}
    bootstrap = None
    for sequence, answer in zip(sequences, answers, strict=True):
        if len(answer) != len(sequence.ids):
            raise DataError(f"{len(answer)} values for {len(sequence.ids)} positions; expected one per position")
        values_N = np.asarray(answer, dtype=np.float64)
        turns |= {positions.turn: values_N[positions.start : positions.stop] for positions in sequence.turns}
        if sequence.bootstrap_at is not None:
            bootstrap = float(values_N[sequence.bootstrap_at])
    ordered = tuple(turns[index] for index in range(len(trajectory.turns)))
    if not trajectory.is_truncated:
        bootstrap = 0.0
    elif bootstrap is None:
        bootstrap = float(ordered[-1][-1])
    return TrajectoryValues(turns=ordered, bootstrap=bootstrap)


def value_datums(
    sequences: Sequence[ValueSequence],
    returns: Sequence[FloatArray],
    values: TrajectoryValues,
    *,
    weight: float,
    first_only: bool = False,
) -> list[Datum]:
    """The datums that the critic learns from: the returns as targets, and its old values, for the clip.

    Args:
        returns: [S] per turn.
        weight: weight of each learned position.
        first_only: learn only the state at the start of each turn.
    """
    datums: list[Datum] = []
    for sequence in sequences:
        if not sequence.turns:
            continue
        mask_N, returns_N, values_N = np.zeros((3, len(sequence.ids)), np.float32)
        for positions in sequence.turns:
            own = slice(positions.start, positions.stop)
            mask_N[positions.start : positions.start + 1 if first_only else positions.stop] = 1.0
            returns_N[own] = returns[positions.turn]
            values_N[own] = values.turns[positions.turn]
        inputs = {
            "mask": mask_N,
            "weights": mask_N * weight,
            "returns": returns_N * mask_N,
            "values": values_N * mask_N,
        }
        tensors = {key: TensorData.from_numpy(column_N) for key, column_N in inputs.items()}
        datums.append(Datum(ModelInput.from_ints(list(sequence.ids)), tensors))
    return datums


def explained_variance(returns: Sequence[float] | FloatArray, values: Sequence[float] | FloatArray) -> float:
    """`1 - Var(R - V) / Var(R)`: 1 is perfect, 0 is no better than a constant, below 0 is worse than one.

    It is nan if all returns are the same, because there is no variance to explain.

    >>> explained_variance([0.0, 1.0], [0.0, 1.0])
    1.0
    """
    returns_N, values_N = np.asarray(returns, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if returns_N.shape != values_N.shape or returns_N.ndim != 1:
        raise DataError(f"{returns_N.shape} returns and {values_N.shape} values; expected as many of each")
    spread = float(returns_N.var()) if len(returns_N) else 0.0
    return 1.0 - float((returns_N - values_N).var()) / spread if spread > 1e-12 else math.nan


def error_by_position(
    returns: Sequence[Sequence[FloatArray]], values: Sequence[Sequence[FloatArray]], *, num_parts: int
) -> list[tuple[float, float]]:
    """(root mean square error, explained variance) in each part of the attempts, from first to last; nan if a part has
    no token. The token at place t of n belongs to part t * num_parts // n. Less is left to happen in later parts, so a
    good critic has smaller errors there.

    Args:
        returns: [S] per turn of each attempt.
        values: the critic's values, in the same form.

    >>> won, lost = [np.ones(2)], [np.zeros(2)]
    >>> error_by_position([won, lost], [[np.array([0.5, 1.0])], [np.array([0.5, 0.0])]], num_parts=2)
    [(0.5, 0.0), (0.0, 1.0)]
    """
    came: list[list[float]] = [[] for _ in range(num_parts)]
    said: list[list[float]] = [[] for _ in range(num_parts)]
    for returns_of, values_of in zip(returns, values, strict=True):
        pairs = list(zip(concatenated(returns_of), concatenated(values_of), strict=True))
        for place, (due, known) in enumerate(pairs):
            part = place * num_parts // len(pairs)
            came[part].append(due)
            said[part].append(known)
    found: list[tuple[float, float]] = []
    for due, known in zip(came, said, strict=True):
        error = math.sqrt(float(np.mean((np.array(due) - np.array(known)) ** 2))) if due else math.nan
        found.append((error, explained_variance(due, known)))
    return found


def concatenated(turns: Sequence[FloatArray], *, first_only: bool = False) -> Iterator[float]:
    """The numbers of all tokens of all turns, or only of each turn's first token."""
    for numbers_S in turns:
        yield from (float(number) for number in (numbers_S[:1] if first_only else numbers_S))
