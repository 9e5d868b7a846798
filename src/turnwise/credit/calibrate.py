"""A critic's values, corrected by the returns of the other attempts of the batch.

    V'(s) = V(s) + a + b V(s) + c turn(s)          a, b, c: ridge regression of R - V over all *other* attempts

A new critic says 0 everywhere, and one that has learned little is wrong by about the same amount in all states. Then
every advantage has a large common part. It says nothing about the actions, but its noise is as large as it is, and Adam
scales what is left to full steps. The line takes this part away, and costs no sample. It follows from other attempts
alone, so it does not depend on the actions that it judges: the policy's gradient stays unbiased, whatever the critic
says. A critic that is right is left as it is, since nothing is left to correct.

Every attempt counts the same in the fit. The ridge is worth a tenth of an attempt that says that the critic is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnwise.credit.gae import Gae
from turnwise.credit.values import FloatArray, TrajectoryValues, Values
from turnwise.trajectory import WORLD_LABEL, Trajectory

RIDGE = 0.1
"""In attempts."""


def calibrate_by_world(values: Values, trajectories: Sequence[Trajectory], gae: Gae) -> list[TrajectoryValues]:
    """`calibrate` over the attempts of each world of a mix by itself; of one world, over all."""
    found = list(values)
    worlds = [one.labels.get(WORLD_LABEL, "") for one in trajectories]
    for world in set(worlds):
        inside = [index for index, name in enumerate(worlds) if name == world]
        own = calibrate([values[index] for index in inside], [trajectories[index] for index in inside], gae)
        for index, corrected in zip(inside, own, strict=True):
            found[index] = corrected
    return found


def calibrate(values: Values, trajectories: Sequence[Trajectory], gae: Gae) -> list[TrajectoryValues]:
    """The corrected values of each attempt; of a single attempt, its values as they are."""
    if len(values) < 2:
        return list(values)
    plain = replace(gae, critic_lambda=1.0)
    fits = [
        _Fit(gae.learned(known.turns), gae.learned(plain.returns(one, known)))
        for known, one in zip(values, trajectories, strict=True)
    ]
    squares, products, errors = (sum(getattr(fit, name) for fit in fits) for name in ("squares", "products", "error"))
    found: list[TrajectoryValues] = []
    for fit, known, one in zip(fits, values, trajectories, strict=True):
        error = (errors - fit.error) / (len(fits) - 1)
        if error <= 0:  # the critic was right about all the others
            found.append(known)
            continue
        longest = max(len(other.turns) for other in values if other is not known)
        prior = RIDGE * np.diag([1.0, error, float(longest**2)])
        line = np.asarray(np.linalg.solve(squares - fit.squares + prior, products - fit.products), np.float64)
        found.append(_corrected(known, line, is_truncated=one.is_truncated))
    return found


class _Fit:
    """What one attempt adds to a regression: means over its states."""

    def __init__(self, values: Sequence[FloatArray], returns: Sequence[FloatArray]) -> None:
        features_NF = np.concatenate([_features(v_S, turn) for turn, v_S in enumerate(values)])
        missed_N = np.concatenate(list(returns)) - np.concatenate(list(values))
        self.squares = features_NF.T @ features_NF / len(missed_N)
        self.products = features_NF.T @ missed_N / len(missed_N)
        self.error = float(np.mean(missed_N**2))


def _features(values_S: FloatArray, turn: int) -> FloatArray:
    """[S, F] of the states of one turn: 1, the value, and the turn."""
    return np.stack([np.ones_like(values_S), values_S, np.full_like(values_S, turn)], axis=1)


def _corrected(values: TrajectoryValues, line: FloatArray, *, is_truncated: bool) -> TrajectoryValues:
    turns = tuple(v_S + _features(v_S, turn) @ line for turn, v_S in enumerate(values.turns))
    if not is_truncated:
        return TrajectoryValues(turns=turns)
    last = np.array([values.bootstrap])
    return TrajectoryValues(turns=turns, bootstrap=float((last + _features(last, len(values.turns)) @ line)[0]))
