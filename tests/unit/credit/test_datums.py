"""Vectors D1 and V5 of the algorithms' specification; where datums begin and what stands in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from turnwise.credit.advantages import reward_to_go
from turnwise.credit.datums import dialogue_to_datums, num_trained_tokens, trajectory_to_datums
from turnwise.errors import DataError, Party
from turnwise.trajectory import EndReason, Failure, Message, Trajectory, Turn
from turnwise.types import Datum

REPLY = Message(role="assistant", content="")


def make_turn(prompt_ids: Sequence[int], sampled_ids: Sequence[int], **fields: object) -> Turn:
    settings: dict[str, object] = {
        "sampler_logprobs": tuple(-0.1 * (i + 1) for i in range(len(sampled_ids))),
        "policy_version": 1,
        "reply": REPLY,
        **fields,
    }
    return Turn(prompt_ids=tuple(prompt_ids), sampled_ids=tuple(sampled_ids), **settings)  # type: ignore[arg-type]


def make_trajectory(*turns: Turn, **fields: object) -> Trajectory:
    settings: dict[str, object] = {"end_reason": EndReason.TERMINATED, **fields}
    return Trajectory(task_id="t", attempt=0, seed=0, turns=turns, **settings)  # type: ignore[arg-type]


def chain(*lengths: tuple[int, int], start: int = 0) -> Trajectory:
    """Turns of (observation, action) lengths; ids count up, so every one is different."""
    ids: list[int] = []
    turns: list[Turn] = []
    for num_observed, num_sampled in lengths:
        ids += range(start + len(ids), start + len(ids) + num_observed)
        sampled = list(range(start + len(ids), start + len(ids) + num_sampled))
        turns.append(make_turn(ids, sampled))
        ids += sampled
    return make_trajectory(*turns)


def column(datum: Datum, key: str) -> list[float]:
    return datum.loss_fn_inputs[key].tolist()


D1 = chain((4, 2), (2, 3), (1, 2))


def test_turns_that_extend_each_other_share_a_datum() -> None:
    (datum,) = trajectory_to_datums(D1, [1.0, 2.0, 3.0])
    assert datum.model_input.to_ints() == list(range(13))
    assert column(datum, "target_tokens") == list(range(1, 14))
    assert column(datum, "mask") == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1]
    assert column(datum, "weights") == column(datum, "mask")
    assert column(datum, "advantages") == [0, 0, 0, 1, 1, 0, 0, 2, 2, 2, 0, 3, 3]
    assert column(datum, "logprobs") == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0, -0.1, -0.2, -0.3, 0, -0.1, -0.2])
    assert num_trained_tokens(datum) == 7


def test_every_column_is_as_long_as_the_input_and_the_first_action_stands_before_its_token() -> None:
    (datum,) = trajectory_to_datums(D1, [1.0, 1.0, 1.0])
    assert {len(tensor) for tensor in datum.loss_fn_inputs.values()} == {datum.model_input.length}
    assert column(datum, "mask").index(1) == len(D1.turns[0].prompt_ids) - 1


def test_the_temperature_of_each_sampled_token_travels_with_it() -> None:
    warm = make_trajectory(*(dataclasses.replace(turn, temperature=0.7) for turn in D1.turns))
    (datum,) = trajectory_to_datums(warm, [0.0] * 3)
    assert column(datum, "temperature") == pytest.approx(np.where(column(datum, "mask"), 0.7, 1.0))


def test_a_masked_turn_stays_in_the_context_and_out_of_the_loss() -> None:
    first, second, third = D1.turns
    masked = make_trajectory(first, dataclasses.replace(second, is_trained=False), third)
    (datum,) = trajectory_to_datums(masked, [1.0, 2.0, 3.0])
    assert column(datum, "mask") == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert sum(column(datum, "advantages")) == 1 * 2 + 3 * 2


def test_a_sequence_without_a_trained_turn_gives_no_datum() -> None:
    untrained = make_trajectory(*(dataclasses.replace(turn, is_trained=False) for turn in D1.turns))
    assert trajectory_to_datums(untrained, [1.0] * 3) == []


def test_a_prompt_that_does_not_extend_the_last_ids_starts_a_datum() -> None:
    rewritten = make_trajectory(
        make_turn([1, 2], [3, 4]), make_turn([1, 2, 4, 5], [6]), make_turn([1, 2, 4, 5, 6], [7])
    )
    first, second = trajectory_to_datums(rewritten, [1.0, 2.0, 3.0])
    assert (first.model_input.to_ints(), column(first, "target_tokens")) == ([1, 2, 3], [2, 3, 4])
    assert (second.model_input.to_ints(), column(second, "target_tokens")) == ([1, 2, 4, 5, 6], [2, 4, 5, 6, 7])
    assert column(second, "advantages") == [0, 0, 0, 2, 3]


def test_a_prompt_that_is_shorter_than_the_last_ids_starts_a_datum() -> None:
    shorter = make_trajectory(make_turn([1, 2], [3, 4]), make_turn([1, 2, 3], [5]))
    assert len(trajectory_to_datums(shorter, [1.0, 1.0])) == 2


def test_reward_to_go_crosses_what_the_env_said() -> None:
    """V5: mask [1, 1, 0, 0, 1, 1] and a reward of 1 at the end."""
    trajectory = chain((1, 2), (2, 2))
    (datum,) = trajectory_to_datums(trajectory, reward_to_go([0.0, 1.0]).tolist())
    assert column(datum, "mask") == [1, 1, 0, 0, 1, 1]
    assert column(datum, "advantages") == [1, 1, 0, 0, 1, 1]


def test_nothing_is_learned_from_a_failed_attempt() -> None:
    failure = Failure(party=Party.ENV, detail="it fell over")
    failed = make_trajectory(*D1.turns, end_reason=EndReason.FAILED, failure=failure)
    with pytest.raises(DataError, match="failed"):
        trajectory_to_datums(failed, [0.0] * 3)


def test_advantages_come_one_per_turn_and_finite() -> None:
    with pytest.raises(DataError, match="2 advantages for 3 turns"):
        trajectory_to_datums(D1, [1.0, 1.0])
    with pytest.raises(DataError, match="nan"):
        trajectory_to_datums(D1, [1.0, float("nan"), 1.0])


def test_a_written_dialogue_is_learned_on_its_replies() -> None:
    (datum,) = dialogue_to_datums([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])
    assert column(datum, "mask") == [0, 1, 1, 0, 1]
    assert set(datum.loss_fn_inputs) == {"target_tokens", "mask", "weights"}


def test_a_turn_may_bring_an_advantage_for_each_of_its_tokens() -> None:
    per_token = [np.array([1.0, 2.0]), 3.0, np.array([4.0, 5.0])]
    (datum,) = trajectory_to_datums(D1, per_token)
    mask = np.asarray(column(datum, "mask")) > 0
    assert np.asarray(column(datum, "advantages"))[mask].tolist() == [1, 2, 3, 3, 3, 4, 5]
    with pytest.raises(DataError, match=r"shape \[3\] for 2 sampled ids"):
        trajectory_to_datums(D1, [np.zeros(3), 0.0, 0.0])
    with pytest.raises(DataError, match="nan"):
        trajectory_to_datums(D1, [np.array([0.0, np.nan]), 0.0, 0.0])


def test_one_datum_per_turn_holds_the_same_trained_tokens() -> None:
    (whole,) = trajectory_to_datums(D1, [1.0, 2.0, 3.0])
    apart = trajectory_to_datums(D1, [1.0, 2.0, 3.0], is_split=True)
    assert [num_trained_tokens(datum) for datum in apart] == [2, 3, 2]
    assert [datum.model_input.length + 1 for datum in apart] == [6, 11, 14]
    for key in ("advantages", "logprobs", "target_tokens"):
        trained = [
            value
            for datum in apart
            for value, is_on in zip(column(datum, key), column(datum, "mask"), strict=True)
            if is_on
        ]
        assert trained == [v for v, on in zip(column(whole, key), column(whole, "mask"), strict=True) if on]
