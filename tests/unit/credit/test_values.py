"""Which states a critic is asked about, and where its answers and lessons go."""

from __future__ import annotations

import math

import numpy as np
import pytest

from turnwise.credit.values import (
    TrajectoryValues,
    error_by_position,
    explained_variance,
    read_values,
    value_datums,
    value_sequences,
)
from turnwise.errors import DataError
from turnwise.trajectory import EndReason, Message, Trajectory, Turn

SAID = Message(role="assistant", content="x")


def turn(prompt: list[int], sampled: list[int], *, is_trained: bool = True) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        sampler_logprobs=(-1.0,) * len(sampled),
        policy_version=1,
        reply=SAID,
        is_trained=is_trained,
    )


def played(*turns: Turn, stop: EndReason = EndReason.TERMINATED) -> Trajectory:
    return Trajectory(task_id="t", attempt=0, seed=0, turns=turns, end_reason=stop)


TWO = played(turn([10, 11], [12, 13]), turn([10, 11, 12, 13, 20], [21, 22, 23]))
REWRITTEN = played(turn([10, 11], [12, 13]), turn([10, 20], [21, 22]))


def test_a_value_is_read_at_the_position_before_its_token() -> None:
    (sequence,) = value_sequences(TWO)
    assert sequence.ids == (10, 11, 12, 13, 20, 21, 22)
    mask = sequence.question().loss_fn_inputs["mask"].tolist()
    assert mask == [0, 1, 1, 0, 1, 1, 1]
    values = read_values(TWO, [sequence], [[float(i) for i in range(7)]])
    assert [v.tolist() for v in values.turns] == [[1, 2], [4, 5, 6]]


def test_a_rewritten_history_is_asked_in_sequences_of_their_own() -> None:
    sequences = value_sequences(REWRITTEN)
    assert [sequence.ids for sequence in sequences] == [(10, 11, 12), (10, 20, 21)]
    values = read_values(REWRITTEN, sequences, [[0, 1, 2], [5, 6, 7]])
    assert [v.tolist() for v in values.turns] == [[1, 2], [6, 7]]


def test_a_truncated_attempt_is_asked_where_its_next_turn_would_begin() -> None:
    cut = played(*TWO.turns, stop=EndReason.MAX_TURNS)
    (sequence,) = value_sequences(cut, [10, 11, 12, 13, 20, 21, 22, 23, 30])
    assert sequence.bootstrap_at == 8
    assert sequence.question().loss_fn_inputs["mask"].tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 1]
    assert read_values(cut, [sequence], [[0.0] * 8 + [0.75]]).bootstrap == 0.75


def test_a_truncated_attempt_whose_next_prompt_was_rewritten_bootstraps_from_it() -> None:
    cut = played(*TWO.turns, stop=EndReason.MAX_TURNS)
    sequences = value_sequences(cut, [10, 30])
    assert [sequence.ids for sequence in sequences] == [(10, 11, 12, 13, 20, 21, 22), (10, 30)]
    assert read_values(cut, sequences, [[0.0] * 7, [9.0, 0.5]]).bootstrap == 0.5


def test_without_a_next_prompt_the_last_value_stands_in() -> None:
    cut = played(*TWO.turns, stop=EndReason.MAX_TOKENS)
    assert read_values(cut, value_sequences(cut), [[float(i) for i in range(7)]]).bootstrap == 6.0
    assert read_values(TWO, value_sequences(TWO), [[float(i) for i in range(7)]]).bootstrap == 0.0


def test_lessons_stand_where_values_are_read_and_nowhere_else() -> None:
    values = TrajectoryValues(turns=(np.array([0.1, 0.2]), np.array([0.3, 0.4, 0.5])))
    returns = (np.array([1.0, 1.0]), np.array([2.0, 2.0, 2.0]))
    (datum,) = value_datums(value_sequences(TWO), returns, values, weight=0.25)
    columns = {key: column.tolist() for key, column in datum.loss_fn_inputs.items()}
    assert columns["mask"] == [0, 1, 1, 0, 1, 1, 1]
    assert columns["weights"] == [0, 0.25, 0.25, 0, 0.25, 0.25, 0.25]
    assert columns["returns"] == [0, 1, 1, 0, 2, 2, 2]
    assert columns["values"] == pytest.approx([0, 0.1, 0.2, 0, 0.3, 0.4, 0.5])
    (datum,) = value_datums(value_sequences(TWO), returns, values, weight=0.5, first_only=True)
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 1, 0, 0, 1, 0, 0]


def test_a_turn_that_the_policy_does_not_train_still_teaches_the_critic() -> None:
    masked = played(turn([10, 11], [12, 13], is_trained=False))
    values = TrajectoryValues(turns=(np.array([0.1, 0.2]),))
    (datum,) = value_datums(value_sequences(masked), [np.ones(2)], values, weight=1.0)
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 1, 1]


def test_explained_variance_is_1_for_the_truth_0_for_a_constant_and_below_for_worse() -> None:
    returns = [0.0, 1.0, 2.0, 3.0]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, [0.7] * 4) == pytest.approx(0.0)
    assert explained_variance(returns, [r + 5 for r in returns]) == pytest.approx(1.0)
    assert explained_variance(returns, [-r for r in returns]) == pytest.approx(-3.0)
    assert math.isnan(explained_variance([1.0, 1.0], [0.0, 1.0]))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="2 values for 7 positions"):
        read_values(TWO, value_sequences(TWO), [[0.0, 1.0]])
    with pytest.raises(DataError, match="expected a finite one per token"):
        TrajectoryValues(turns=(np.array([math.nan]),))
    values = TrajectoryValues(turns=(np.zeros(2), np.zeros(3)), bootstrap=0.5)
    with pytest.raises(DataError, match="ended with terminated: nothing comes after that"):
        values.check(TWO)


def test_errors_are_told_apart_by_place_in_the_attempt() -> None:
    """Attempts of other lengths and turns; a critic that knows the end and nothing before it."""
    shapes = [(1.0, (2, 3)), (0.0, (10,)), (1.0, (4, 4, 2)), (0.0, (1, 4))]
    returns = [[np.full(size, due) for size in sizes] for due, sizes in shapes]
    values: list[list[np.ndarray]] = []
    for due, sizes in shapes:
        total = sum(sizes)
        said = np.array([due if place >= total * 0.8 else 0.5 for place in range(total)])
        values.append(np.split(said, np.cumsum(sizes)[:-1]))
    found = error_by_position(returns, values, num_parts=5)
    assert [error for error, _ in found] == pytest.approx([0.5] * 4 + [0.0])
    assert [share for _, share in found] == pytest.approx([0.0] * 4 + [1.0])


def test_a_part_without_a_token_has_no_error() -> None:
    found = error_by_position([[np.ones(2)]], [[np.zeros(2)]], num_parts=4)
    assert [math.isnan(error) for error, _ in found] == [False, True, False, True]
