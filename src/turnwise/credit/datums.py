"""Trajectory + one advantage per turn -> datums, and their weights in an optimizer batch.

Turns whose prompt extends all ids before it, id by id, share a datum; where a prompt does not (a chat template that
rewrites history, a compacted context), a new datum starts. Baselines are made per trajectory before this point, so a
split changes neither them nor the number of trained tokens.

A datum's columns are aligned to `target_tokens`: the sequence x_0..x_N is input x_0..x_{N-1} and targets x_1..x_N, and
what belongs to token x_{i+1} stands at index i. The mask is 1 exactly on the sampled ids of trained turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from turnwise.errors import DataError
from turnwise.trajectory import Trajectory, Turn
from turnwise.types import Datum, ModelInput, TensorData


def trajectory_to_datums(trajectory: Trajectory, advantages: Sequence[float]) -> list[Datum]:
    """Merge turns whose prompt extends the last sequence; start a new datum when one does not.

    Every datum has `target_tokens`, `mask`, `logprobs`, `advantages`, `temperature`, and `weights` equal to the mask.
    A sequence in which no turn is trained gives no datum.

    Args:
        advantages: one per turn, for all of the turn's tokens.
    """
    if trajectory.failure is not None:
        raise DataError(f"attempt {trajectory.attempt} at {trajectory.task_id} failed; there is nothing to learn from")
    if len(advantages) != len(trajectory.turns):
        raise DataError(f"{len(advantages)} advantages for {len(trajectory.turns)} turns; expected one per turn")
    sequences: list[_Sequence] = []
    for turn, advantage in zip(trajectory.turns, advantages, strict=True):
        if not math.isfinite(advantage):
            raise DataError(f"an advantage of {advantage} in attempt {trajectory.attempt} at {trajectory.task_id}")
        if not sequences or not sequences[-1].extends_to(turn.prompt_ids):
            sequences.append(_Sequence())
        sequence = sequences[-1]
        sequence.add_context(turn.prompt_ids[len(sequence.ids) :])
        sequence.add_sampled(turn, float(advantage))
    return [sequence.to_datum() for sequence in sequences if any(sequence.mask)]


def dialogue_to_datums(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Datum]:
    """A written dialogue to imitate, as (prompt ids, reply ids) per turn -> datums for `cross_entropy`.

    The mask is 1 on the replies.
    """
    sequences: list[_Sequence] = []
    for prompt_ids, reply_ids in turns:
        if not sequences or not sequences[-1].extends_to(prompt_ids):
            sequences.append(_Sequence())
        sequence = sequences[-1]
        sequence.add_context(prompt_ids[len(sequence.ids) :])
        sequence.add_reply(reply_ids)
    return [sequence.to_imitation_datum() for sequence in sequences]


@dataclass(slots=True)
class _Sequence:
    """One linear sequence; its columns can only grow together."""

    ids: list[int] = field(default_factory=list[int])
    mask: list[float] = field(default_factory=list[float])
    logprobs: list[float] = field(default_factory=list[float])
    advantages: list[float] = field(default_factory=list[float])
    temperatures: list[float] = field(default_factory=list[float])

    def extends_to(self, prompt_ids: Sequence[int]) -> bool:
        return len(prompt_ids) >= len(self.ids) and list(prompt_ids[: len(self.ids)]) == self.ids

    def add_context(self, ids: Sequence[int]) -> None:
        self._add(ids, [0.0] * len(ids), 0.0, 0.0, 1.0)

    def add_sampled(self, turn: Turn, advantage: float) -> None:
        if turn.is_trained:
            self._add(turn.sampled_ids, turn.sampler_logprobs, 1.0, advantage, turn.temperature)
        else:
            self.add_context(turn.sampled_ids)

    def add_reply(self, ids: Sequence[int]) -> None:
        self._add(ids, [0.0] * len(ids), 1.0, 0.0, 1.0)

    def to_datum(self) -> Datum:
        return Datum(
            model_input=ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": TensorData(self.ids[1:], "int64"),
                "mask": TensorData(self.mask[1:]),
                "weights": TensorData(self.mask[1:]),
                "logprobs": TensorData(self.logprobs[1:]),
                "advantages": TensorData(self.advantages[1:]),
                "temperature": TensorData(self.temperatures[1:]),
            },
        )

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
        self, ids: Sequence[int], logprobs: Sequence[float], mask: float, advantage: float, temperature: float
    ) -> None:
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.mask.extend([mask] * len(ids))
        self.advantages.extend([advantage] * len(ids))
        self.temperatures.extend([temperature] * len(ids))


def num_trained_tokens(datum: Datum) -> int:
    """How many targets of the datum are trained."""
    return round(sum(_mask(datum)))


def token_mean(batch: Sequence[Sequence[Datum]]) -> list[Datum]:
    """Every trained token weighs 1/n, n counted over the whole optimizer batch (DAPO, verl, SkyRL).

    `batch` has the datums of each trajectory in a list of their own, here and below; the result is flat, in the same
    order. Weights are set before any token is rejected, so that a rejection does not raise the weight of the others.
    """
    total = sum(num_trained_tokens(datum) for datum in _flat(batch))
    return [_weighted(datum, 1.0 / max(total, 1)) for datum in _flat(batch)]


def seq_mean(batch: Sequence[Sequence[Datum]]) -> list[Datum]:
    """Every trajectory weighs 1/B, shared by its n_j trained tokens: 1/(B n_j) (the first GRPO, GSPO)."""
    weighted: list[Datum] = []
    for datums in batch:
        total = sum(num_trained_tokens(datum) for datum in datums)
        weighted += [_weighted(datum, 1.0 / (len(batch) * max(total, 1))) for datum in datums]
    return weighted


def const(batch: Sequence[Sequence[Datum]], *, max_tokens: int) -> list[Datum]:
    """Every trained token weighs 1/(B L), L fixed for the run: no bias towards a length (Dr.GRPO, arXiv:2503.20783)."""
    if max_tokens < 1:
        raise DataError(f"max_tokens={max_tokens}; expected the most tokens that a trajectory may have")
    return [_weighted(datum, 1.0 / (max(len(batch), 1) * max_tokens)) for datum in _flat(batch)]


Weighting = Callable[[Sequence[Sequence[Datum]]], list[Datum]]


def _flat(batch: Sequence[Sequence[Datum]]) -> Iterator[Datum]:
    return (datum for datums in batch for datum in datums)


def _mask(datum: Datum) -> Sequence[float]:
    if "mask" not in datum.loss_fn_inputs:
        raise DataError("a datum without a mask; weights are shared out over the tokens that the mask names")
    return datum.loss_fn_inputs["mask"].data


def _weighted(datum: Datum, weight: float) -> Datum:
    weights = TensorData([weight * is_trained for is_trained in _mask(datum)])
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": weights})
