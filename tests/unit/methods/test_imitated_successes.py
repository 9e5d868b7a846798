from __future__ import annotations

import pytest

from turnwise.credit.datums import trajectory_to_datums
from turnwise.envs.base import assistant, user
from turnwise.methods.base import Lesson, imitated_successes
from turnwise.trajectory import EndReason, Trajectory, Turn


def lesson(*, is_success: bool, lengths: tuple[int, ...]) -> Lesson:
    """An attempt whose prompts were rewritten each time, so that every turn is a datum of its own."""
    turns = tuple(
        Turn(
            prompt_ids=(9, index),
            sampled_ids=(3,) * length,
            sampler_logprobs=(-1.0,) * length,
            policy_version=0,
            reply=assistant("x"),
            observation=(user("y"),),
        )
        for index, length in enumerate(lengths)
    )
    trajectory = Trajectory(
        task_id="t",
        attempt=0,
        seed=0,
        start=(user("z"),),
        turns=turns,
        end_reason=EndReason.TERMINATED,
        is_success=is_success,
    )
    advantages = (0.0,) * len(turns)
    return Lesson(
        trajectory=trajectory, advantages=advantages, datums=tuple(trajectory_to_datums(trajectory, advantages))
    )


def test_only_successes_are_imitated_and_all_their_tokens_weigh_the_same() -> None:
    lessons = [
        lesson(is_success=True, lengths=(2, 3)),
        lesson(is_success=False, lengths=(7,)),
        lesson(is_success=True, lengths=(5,)),
    ]
    datums = imitated_successes(lessons, 0.1)
    assert len(datums) == 3
    weights = [weight for datum in datums for weight in datum.loss_fn_inputs["weights"].tolist() if weight]
    assert weights == pytest.approx([0.1 / 10] * 10)
    assert all("advantages" not in datum.loss_fn_inputs for datum in datums)


def test_without_a_success_there_is_nothing_to_imitate() -> None:
    assert imitated_successes([lesson(is_success=False, lengths=(2,))], 0.1) == []
