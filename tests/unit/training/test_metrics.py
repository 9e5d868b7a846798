"""How the numbers of several optimizer steps become one, and where a lesson's logprobs belong."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.credit.datums import trajectory_to_datums
from turnwise.methods.base import Kept, Lesson
from turnwise.rollout.group import RolloutResult
from turnwise.rollout.stats import RolloutStats
from turnwise.training.metrics import Times, logprobs_by_turn, merge_outputs, step_metrics, strip_reductions
from turnwise.trajectory import EndReason, Message, Trajectory, TrajectoryGroup, Turn
from turnwise.types import ForwardBackwardOutput, TensorData


def _output(**metrics: float) -> ForwardBackwardOutput:
    named = {key.replace("__", ":"): value for key, value in metrics.items()}
    return ForwardBackwardOutput("ArrayRecord", [], named)


def test_sums_add_maxima_compare_and_means_weigh_by_tokens() -> None:
    merged = merge_outputs(
        [
            _output(num_trained_tokens__sum=1.0, ratio__mean=1.0, ratio__max=3.0),
            _output(num_trained_tokens__sum=3.0, ratio__mean=2.0, ratio__max=2.0),
        ]
    )
    assert merged == {"num_trained_tokens:sum": 4.0, "ratio:mean": 1.75, "ratio:max": 3.0}


def test_reductions_leave_the_names() -> None:
    assert strip_reductions({"ratio:mean": 1.0, "ratio:max": 2.0, "grad_norm": 3.0}) == {
        "ratio": 1.0,
        "ratio_max": 2.0,
        "grad_norm": 3.0,
    }


def _turn(prompt: tuple[int, ...], sampled: tuple[int, ...], *, is_trained: bool = True) -> Turn:
    return Turn(
        prompt_ids=prompt,
        sampled_ids=sampled,
        sampler_logprobs=tuple(-1.0 for _ in sampled),
        policy_version=0,
        reply=Message(role="assistant", content=""),
        is_trained=is_trained,
    )


def test_the_trainers_logprobs_are_told_apart_by_turn_over_splits_and_masked_turns() -> None:
    turns = (
        _turn((1, 2), (3, 4)),
        _turn((1, 2, 3, 4, 5), (6,), is_trained=False),
        _turn((1, 9), (7, 8, 9)),  # the history was rewritten: a datum of its own
    )
    trajectory = Trajectory(task_id="t", attempt=0, seed=0, turns=turns, end_reason=EndReason.TERMINATED)
    datums = tuple(trajectory_to_datums(trajectory, [1.0, 1.0, 1.0]))
    lesson = Lesson(trajectory=trajectory, advantages=(1.0, 1.0, 1.0), datums=datums)
    outputs = []
    for datum in datums:  # each target's logprob is minus its id
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        outputs.append({"logprobs": TensorData.from_numpy(-targets.astype(np.float32))})
    first, second, third = logprobs_by_turn(lesson, outputs)
    assert first is not None
    assert first.tolist() == [-3.0, -4.0]
    assert second is None
    assert third is not None
    assert third.tolist() == pytest.approx([-7.0, -8.0, -9.0])


def test_the_entropy_is_of_everything_that_was_played_whether_or_not_it_taught_something() -> None:
    trajectory = Trajectory(
        task_id="t", attempt=0, seed=0, turns=(_turn((1,), (2, 3)),), end_reason=EndReason.TERMINATED
    )
    played = RolloutResult(
        groups=(TrajectoryGroup(task_id="t", trajectories=(trajectory,)),), dropped=(), stats=RolloutStats()
    )
    nothing = Kept(groups=(), reasons=("constant",))
    metrics = step_metrics(played, nothing, [], Times(rollout_s=1.0, train_s=0.0, publish_s=0.0))
    assert metrics["rollout/entropy_estimate"] == 1.0
