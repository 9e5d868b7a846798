"""The weights of the trained tokens in an optimizer step.

A loss is a sum over tokens, and the weights contain every normaliser, so micro-batches, packing and splits into datums
change nothing. Weights are set before any token is rejected: a rejection does not raise the other weights.

With n_j trained tokens in trajectory j, n_jk of them in turn k, T_j trained turns, B trajectories, P groups:

    token_mean      1 / n                   every token counts the same (DAPO, verl, SkyRL)
    seq_mean        1 / (B n_j)             every trajectory counts the same (the first GRPO, GSPO)
    seq_sum         1 / B                   plain REINFORCE: a long trajectory weighs more
    const           1 / (B L)               no bias towards a length; L fixed for the run (Dr.GRPO, arXiv:2503.20783)
    turn_mean       1 / (sum T_j * n_jk)    every turn counts the same
    traj_turn_mean  1 / (B T_j n_jk)        every trajectory counts the same, and every turn inside it
    prompt_mean     1 / (P n_group)         every group counts the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, repeat
from typing import Literal

from turnwise.credit.datums import trained_mask
from turnwise.errors import DataError
from turnwise.trajectory import Trajectory
from turnwise.types import Datum, TensorData

Normalisation = Literal["token_mean", "seq_mean", "seq_sum", "const", "turn_mean", "traj_turn_mean", "prompt_mean"]
"""The names of the weightings below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The trained tokens of one trajectory."""

    turn_sizes: tuple[int, ...]
    """Number of tokens of each trained turn, in order."""
    group: int = 0
    """Index of its group in the batch."""

    @property
    def num_tokens(self) -> int:
        return sum(self.turn_sizes)


Weighting = Callable[[Sequence[Share]], list[list[float]]]
"""A function from the shares of an optimizer batch to the weight of one token, per trained turn."""


def token_mean(batch: Sequence[Share]) -> list[list[float]]:
    total = max(sum(share.num_tokens for share in batch), 1)
    return [[1.0 / total for _ in share.turn_sizes] for share in batch]


def seq_mean(batch: Sequence[Share]) -> list[list[float]]:
    return [[1.0 / (len(batch) * share.num_tokens) for _ in share.turn_sizes] for share in batch]


def seq_sum(batch: Sequence[Share]) -> list[list[float]]:
    return [[1.0 / len(batch) for _ in share.turn_sizes] for share in batch]


def const(batch: Sequence[Share], *, max_tokens: int) -> list[list[float]]:
    if max_tokens < 1:
        raise DataError(f"max_tokens={max_tokens}; expected the most tokens that a trajectory may have")
    return [[1.0 / (len(batch) * max_tokens) for _ in share.turn_sizes] for share in batch]


def turn_mean(batch: Sequence[Share]) -> list[list[float]]:
    num_turns = sum(len(share.turn_sizes) for share in batch)
    return [[1.0 / (num_turns * size) for size in share.turn_sizes] for share in batch]


def traj_turn_mean(batch: Sequence[Share]) -> list[list[float]]:
    return [[1.0 / (len(batch) * len(share.turn_sizes) * size) for size in share.turn_sizes] for share in batch]


def prompt_mean(batch: Sequence[Share]) -> list[list[float]]:
    sizes: Counter[int] = Counter()
    for share in batch:
        sizes[share.group] += share.num_tokens
    return [[1.0 / (len(sizes) * sizes[share.group]) for _ in share.turn_sizes] for share in batch]


def weighting(name: Normalisation, *, max_tokens: int) -> Weighting:
    """Find a weighting by name. `const` needs `max_tokens`, the most tokens that an attempt may sample."""
    known: Mapping[Normalisation, Weighting] = {
        "token_mean": token_mean,
        "seq_mean": seq_mean,
        "seq_sum": seq_sum,
        "const": partial(const, max_tokens=max_tokens),
        "turn_mean": turn_mean,
        "traj_turn_mean": traj_turn_mean,
        "prompt_mean": prompt_mean,
    }
    return known[name]


def share_of(trajectory: Trajectory, group: int = 0) -> Share:
    sizes = tuple(len(turn.sampled_ids) for turn in trajectory.turns if turn.is_trained)
    return Share(turn_sizes=sizes, group=group)


def weigh(
    batch: Sequence[Sequence[Datum]], weighting: Weighting, shares: Sequence[Share] | None = None
) -> list[list[Datum]]:
    """Set the weights of datums; returns new datums.

    Args:
        batch: one list of datums per trajectory.
        shares: the trained turns of each trajectory. Without them, each unbroken run of trained tokens counts as a
            turn, as in a written dialogue, where the world speaks between two replies.
    """
    if shares is None:
        shares = [Share(turn_sizes=_runs(datums), group=index) for index, datums in enumerate(batch)]
    return [
        _weighted(datums, share, weights)
        for datums, share, weights in zip(batch, shares, weighting(shares), strict=True)
    ]


def _runs(datums: Sequence[Datum]) -> tuple[int, ...]:
    """Lengths of the runs of trained tokens; a run ends with its datum."""
    runs = (list(run) for datum in datums for is_on, run in groupby(trained_mask(datum), bool) if is_on)
    return tuple(len(run) for run in runs)


def _weighted(datums: Sequence[Datum], share: Share, turn_weights: Sequence[float]) -> list[Datum]:
    """A trajectory's datums hold its trained tokens in the order of turns, so a running count finds each one's turn."""
    rest = iter([w for size, weight in zip(share.turn_sizes, turn_weights, strict=True) for w in repeat(weight, size)])
    weighted: list[Datum] = []
    for datum in datums:
        weights = [next(rest, -1.0) if is_trained else 0.0 for is_trained in trained_mask(datum)]
        weighted.append(Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": TensorData(weights)}))
        assert min(weights, default=0.0) >= 0, "datums train more tokens than their turns sampled"
    assert next(rest, None) is None, "datums train fewer tokens than their turns sampled"
    return weighted
