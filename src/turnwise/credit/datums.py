"""Trajectory + advantages -> datums.

Turns share a datum as long as each prompt extends all earlier ids, id by id. If a prompt does not (a chat template that
rewrites history, a compacted context), a new datum starts. Baselines are computed per trajectory before this point, so
a split changes neither the baselines nor the number of trained tokens.

A datum's columns are aligned to `target_tokens`: the sequence x_0..x_N is input x_0..x_{N-1} and targets x_1..x_N, and
the entry for token x_{i+1} is at index i. The mask is 1 exactly on the sampled ids of trained turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError
from turnwise.trajectory import Trajectory, Turn
from turnwise.types import Datum, ModelInput, TensorData

TurnAdvantage = float | NDArray[np.float64]
"""One number for all tokens of a turn, or [S] one for each of its sampled tokens."""


def trajectory_to_datums(
    trajectory: Trajectory, advantages: Sequence[TurnAdvantage], *, is_split: bool = False
) -> list[Datum]:
    """Merge turns whose prompt extends the last sequence; start a new datum where a prompt does not.

    Every datum has `target_tokens`, `mask`, `logprobs`, `advantages`, `temperature`, and `weights` equal to the mask
    (`credit.weights` sets them for a batch). A sequence in which no turn is trained gives no datum.

    Args:
        advantages: one entry per turn.
        is_split: give every turn a datum of its own, for a loss that looks at whole datums.
    """
    if trajectory.failure is not None:
        raise DataError(f"attempt {trajectory.attempt} at {trajectory.task_id} failed; there is nothing to learn from")
    if len(advantages) != len(trajectory.turns):
        raise DataError(f"{len(advantages)} advantages for {len(trajectory.turns)} turns; expected one per turn")
    sequences: list[_SequenceBuilder] = []
    for turn, advantage in zip(trajectory.turns, advantages, strict=True):
        if is_split or not sequences or not sequences[-1].extends_to(turn.prompt_ids):
            sequences.append(_SequenceBuilder())
        sequence = sequences[-1]
        sequence.add_context(turn.prompt_ids[len(sequence.ids) :])
        sequence.add_sampled(turn, _by_token(advantage, turn, trajectory))
    return [sequence.to_datum() for sequence in sequences if any(sequence.mask)]


def _by_token(advantage: TurnAdvantage, turn: Turn, trajectory: Trajectory) -> list[float]:
    where = f"attempt {trajectory.attempt} at {trajectory.task_id}"
    if isinstance(advantage, np.ndarray):
        if advantage.shape != (len(turn.sampled_ids),):
            shape = list(advantage.shape)
            raise DataError(f"advantages of shape {shape} for {len(turn.sampled_ids)} sampled ids in {where}")
        found = [float(value) for value in advantage]
    else:
        found = [float(advantage)] * len(turn.sampled_ids)
    for value in found:
        if not math.isfinite(value):
            raise DataError(f"an advantage of {value} in {where}")
    return found


def dialogue_to_datums(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Datum]:
    """Make datums for `cross_entropy` from a written dialogue, given as (prompt ids, reply ids) per turn.

    The mask is 1 on the replies.
    """
    sequences: list[_SequenceBuilder] = []
    for prompt_ids, reply_ids in turns:
        if not sequences or not sequences[-1].extends_to(prompt_ids):
            sequences.append(_SequenceBuilder())
        sequence = sequences[-1]
        sequence.add_context(prompt_ids[len(sequence.ids) :])
        sequence.add_reply(reply_ids)
    return [sequence.to_imitation_datum() for sequence in sequences]


@dataclass(slots=True)
class _SequenceBuilder:
    """One linear sequence; its columns can only grow together."""

    ids: list[int] = field(default_factory=list[int])
    mask: list[float] = field(default_factory=list[float])
    logprobs: list[float] = field(default_factory=list[float])
    advantages: list[float] = field(default_factory=list[float])
    temperatures: list[float] = field(default_factory=list[float])

    def extends_to(self, prompt_ids: Sequence[int]) -> bool:
        return len(prompt_ids) >= len(self.ids) and list(prompt_ids[: len(self.ids)]) == self.ids

    def add_context(self, ids: Sequence[int]) -> None:
        self._add(ids, [0.0] * len(ids), 0.0, [0.0] * len(ids), 1.0)

    def add_sampled(self, turn: Turn, advantages: Sequence[float]) -> None:
        if turn.is_trained:
            self._add(turn.sampled_ids, turn.sampler_logprobs, 1.0, advantages, turn.temperature)
        else:
            self.add_context(turn.sampled_ids)

    def add_reply(self, ids: Sequence[int]) -> None:
        self._add(ids, [0.0] * len(ids), 1.0, [0.0] * len(ids), 1.0)

    def to_datum(self) -> Datum:
        columns = {"logprobs": self.logprobs, "advantages": self.advantages, "temperature": self.temperatures}
        imitated = self.to_imitation_datum()
        extra = {name: TensorData(column[1:]) for name, column in columns.items()}
        return Datum(imitated.model_input, {**imitated.loss_fn_inputs, **extra})

    def to_imitation_datum(self) -> Datum:
        return Datum(
            model_input=ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(self.ids[1:], "int64"),
                "mask": TensorData(self.mask[1:]),
                "weights": TensorData(self.mask[1:]),
            },
        )

    def _add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        mask: float,
        advantages: Sequence[float],
        temperature: float,
    ) -> None:
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.mask.extend([mask] * len(ids))
        self.advantages.extend(advantages)
        self.temperatures.extend([temperature] * len(ids))


def num_trained_tokens(datum: Datum) -> int:
    """Number of trained targets of the datum."""
    return round(sum(trained_mask(datum)))


def trained_mask(datum: Datum) -> Sequence[float]:
    """The datum's mask: 1 on each trained target, else 0."""
    if "mask" not in datum.loss_fn_inputs:
        raise DataError("the datum has no mask; weights are distributed over the tokens that the mask selects")
    return datum.loss_fn_inputs["mask"].data


def is_trained(datum: Datum) -> NDArray[np.bool_]:
    """Whether each target is trained."""
    return np.asarray(trained_mask(datum)) > 0
