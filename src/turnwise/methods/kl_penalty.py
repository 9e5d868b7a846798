"""A penalty on KL(policy || reference) in the advantages of lessons, for methods whose loss reads advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.datums import TurnAdvantage, is_trained
from turnwise.credit.kl import kl_advantages
from turnwise.methods.base import Lesson
from turnwise.types import Datum, TensorData


def with_kl_penalty(
    lessons: Sequence[Lesson], reference: Sequence[TensorData], *, coef: float, gamma: float = 0.0
) -> list[Lesson]:
    """The lessons of one optimizer step with KL(policy || reference) in their advantages (`credit.kl`).

    Args:
        reference: the reference's logprob of each target, one tensor per datum; datums keep it as `ref_logprobs`.
    """
    rest = iter(reference)
    known = [[next(rest) for _ in lesson.datums] for lesson in lessons]
    log_ratios = [
        np.concatenate([np.zeros(0), *(_log_ratio(d, ref) for d, ref in zip(lesson.datums, refs, strict=True))])
        for lesson, refs in zip(lessons, known, strict=True)
    ]
    changes = kl_advantages(log_ratios, coef=coef, gamma=gamma)
    return [_penalised(*one) for one in zip(lessons, known, changes, strict=True)]


def _log_ratio(datum: Datum, reference: TensorData) -> NDArray[np.float64]:
    """[S] log(sampler / reference) of the trained targets."""
    gaps = datum.loss_fn_inputs["logprobs"].to_numpy().astype(np.float64) - reference.to_numpy()
    return gaps[is_trained(datum)]


def _penalised(lesson: Lesson, reference: Sequence[TensorData], change_S: NDArray[np.float64]) -> Lesson:
    """Add the penalty to one lesson. Its datums hold the trained tokens in the order of its turns."""
    datums: list[Datum] = []
    rest = change_S
    for datum, ref in zip(lesson.datums, reference, strict=True):
        chosen = is_trained(datum)
        advantages = datum.loss_fn_inputs["advantages"].to_numpy().astype(np.float64)
        advantages[chosen] += rest[: chosen.sum()]
        rest = rest[chosen.sum() :]
        inputs = {**datum.loss_fn_inputs, "advantages": TensorData.from_numpy(advantages), "ref_logprobs": ref}
        datums.append(Datum(datum.model_input, inputs))
    if lesson.trajectory is None:
        return replace(lesson, datums=tuple(datums))
    rest, by_turn = change_S, list[TurnAdvantage]()
    for turn, advantage in zip(lesson.trajectory.turns, lesson.advantages, strict=True):
        num_tokens = len(turn.sampled_ids) if turn.is_trained else 0
        by_turn.append(advantage + rest[:num_tokens] if turn.is_trained else advantage)
        rest = rest[num_tokens:]
    return replace(lesson, advantages=tuple(by_turn), datums=tuple(datums))
