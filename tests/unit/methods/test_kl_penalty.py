"""Lessons with KL(policy || reference) in their advantages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from turnwise.methods.base import Lesson, datums_of
from turnwise.methods.grpo import Grpo
from turnwise.methods.kl_penalty import with_kl_penalty
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import TensorData
from unit.credit.groups import make_attempt, make_group
from unit.credit.test_datums import column, make_trajectory, make_turn

METHOD = Grpo(loss_fn="importance_sampling", loss_config={})


def penalise(*trajectories: Trajectory, gaps: list[float], **options: float) -> list[Lesson]:
    """`gaps`: log(sampler / reference) of the trained tokens, in the order of attempts."""
    lessons = METHOD.lessons([TrajectoryGroup(task_id="t", trajectories=trajectories)])
    rest, reference = iter(gaps), list[TensorData]()
    for datum in datums_of(lessons):
        columns = zip(column(datum, "logprobs"), column(datum, "mask"), strict=True)
        reference.append(TensorData([q - next(rest) if is_trained else 99.0 for q, is_trained in columns]))
    return with_kl_penalty(lessons, reference, **{"coef": 0.1, **options})


def test_every_trained_token_pays_for_itself_on_top_of_what_its_attempt_deserves() -> None:
    lessons = penalise(*make_group([1.0], [0.0]).trajectories, gaps=[0.4, 0.0, 0.2, 0.2])
    (first,), (second,) = (lesson.advantages for lesson in lessons)
    assert first == pytest.approx([0.5 - 0.02, 0.5 + 0.02])
    assert second == pytest.approx([-0.5, -0.5])
    (datum,) = lessons[0].datums
    trained = np.array(column(datum, "mask")) > 0
    assert np.array(column(datum, "advantages"))[trained] == pytest.approx(first)
    assert np.array(column(datum, "advantages"))[~trained].tolist() == [0.0] * int((~trained).sum())
    assert np.array(column(datum, "ref_logprobs"))[trained] == pytest.approx([-1.4, -1.0])


def test_a_turn_that_is_not_trained_neither_pays_nor_counts() -> None:
    whole = make_attempt([0.0, 1.0])
    masked = replace(whole, turns=(replace(whole.turns[0], is_trained=False), whole.turns[1]))
    lessons = penalise(masked, make_attempt([0.0], attempt=1), gaps=[0.4, 0.0, 0.2, 0.2])
    first, second = lessons[0].advantages
    assert first == 0.5
    assert second == pytest.approx([0.48, 0.52])


@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_t07_a_history_that_was_rewritten_pays_the_same(gamma: float) -> None:
    other = make_trajectory(make_turn([1], [2]))
    gaps = [0.3, -0.1, 0.2, 0.0]
    merged = make_trajectory(make_turn([1, 2], [3, 4]), make_turn([1, 2, 3, 4, 9], [5]))
    split = make_trajectory(make_turn([1, 2], [3, 4]), make_turn([8, 9], [5]))
    found = [penalise(one, other, gaps=gaps, gamma=gamma)[0] for one in (merged, split)]
    assert [len(lesson.datums) for lesson in found] == [1, 2]
    for a, b in zip(found[0].advantages, found[1].advantages, strict=True):
        assert a == pytest.approx(b)
