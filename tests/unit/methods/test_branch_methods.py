"""LA-GRPO, REFUEL and DPO: which groups they keep, what they train, and where their data comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from turnwise.credit.preferences import PreferencePair, best_and_worst
from turnwise.errors import DataError
from turnwise.methods.base import DataConfig, MethodSetup, datums_of
from turnwise.methods.lookup import read_method
from turnwise.rollout.sources import PlayBranches, PlayGroups, ReadPairs
from turnwise.trajectory import TrajectoryGroup
from unit.credit.branches import make_branches, make_continuation
from unit.credit.groups import make_group


def build(name: str, pairs: str = "", **options: Any) -> Any:
    return read_method({"name": name, **options}).build(
        MethodSetup(data=DataConfig(pairs=pairs), group_size=8, max_turns=5, max_tokens=100)
    )


def test_each_method_says_where_its_data_comes_from() -> None:
    assert build("la_grpo").source == PlayBranches(continuations=8)
    assert build("la_grpo", branch_turn="geometric", branch_p=0.5).source == PlayBranches(
        continuations=8, turn="geometric", p=0.5
    )
    assert build("la_grpo", divide_by_probability=True).source == PlayBranches(continuations=8, redraw=False)
    assert build("refuel").source == PlayBranches(continuations=8)
    assert build("dpo").source == PlayGroups()
    assert build("dpo", pairs="p.parquet").source == ReadPairs(path="p.parquet")
    assert build("refuel", pairs="p.parquet").source == ReadPairs(path="p.parquet", only_branch_turn=True)


def test_settings_reach_the_loss() -> None:
    assert build("dpo", beta=0.3, reward_offset=0.5).loss_config == {"beta": 0.3, "reward_offset": 0.5}
    assert build("refuel", eta=10, form="repo").loss_config == {"eta": 10, "form": "repo"}
    assert (build("dpo").loss_fn, build("refuel").loss_fn) == ("dpo", "refuel")
    assert build("la_grpo", loss_fn="ppo", kl_coef=0.1, kl_place="loss").loss_config == {"kl_coef": 0.1}
    assert build("la_grpo", loss_fn="ppo", kl_coef=0.1).loss_config == {}, "the advantages hold it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "grpo", "branch_turn": "uniform"}, "branch_turn is not read by method=grpo, only by la_grpo, refuel"),
        ({"name": "dpo", "eta": 2.0}, "eta is not read by loss_fn=dpo, only by refuel"),
        ({"name": "refuel", "advantage": "centered"}, "advantage is not read by method=refuel"),
        ({"name": "refuel", "kl_coef": 0.1}, "kl_coef is not read by refuel"),
        (
            {"name": "la_grpo", "branch_p": 0.5},
            "branch_p is not read by branch_turn=uniform; set branch_turn: geometric",
        ),
        ({"name": "dpo", "dmpo_gamma": 0.5}, "dmpo_gamma is not read by turn_weights=none; set turn_weights: dmpo"),
    ],
)
def test_an_option_that_is_not_read_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_method(options)


def masked(group: TrajectoryGroup, turn: int) -> TrajectoryGroup:
    def without(trajectory: Any) -> Any:
        turns = tuple(replace(t, is_trained=i != turn) for i, t in enumerate(trajectory.turns))
        return replace(trajectory, turns=turns)

    return replace(group, trajectories=tuple(without(trajectory) for trajectory in group.trajectories))


def test_groups_that_teach_nothing_are_dropped_by_reason() -> None:
    same = TrajectoryGroup(
        task_id="t",
        trajectories=tuple(make_continuation(i, float(i), turn=1, replies=[9, 9]) for i in range(2)),
        branch_turn=1,
    )
    good, constant = make_branches([0.0, 1.0], turn=1), make_branches([1.0, 1.0], turn=1)
    small = make_branches([1.0], turn=1)
    groups = [good, constant, small, masked(good, 1)]
    assert build("la_grpo").keep(groups).reasons == (None, "constant", "too_small", "masked")
    assert build("refuel").keep([*groups, same]).reasons == (None, "constant", "too_small", "masked", "identical")
    mixed = make_branches([0.0, 1.0, 1.0, 1.0, 0.5], turn=1)
    assert build("refuel").keep([mixed]).reasons == (None,), "one pair of two tells something"
    assert [lesson.trajectory.attempt for lesson in build("refuel").lessons([mixed])] == [1, 0]
    identical = make_group([0.0, 1.0], [0.0, 0.0])
    played = [make_group([0.0], [1.0, 1.0]), make_group([1.0], [1.0]), make_group([1.0]), identical]
    assert build("dpo").keep(played).reasons == (None, "constant", "too_small", "identical")


def test_dpo_trains_all_of_the_best_and_the_worst_and_nothing_of_the_others() -> None:
    group = make_group([0.5, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0])
    lessons = build("dpo").lessons([group, group])
    assert [lesson.trajectory.attempt for lesson in lessons] == [1, 2, 1, 2]
    numbers = [datum.loss_fn_inputs["pair"].tolist()[0] for datum in datums_of(lessons)]
    assert numbers == [1, -1, 2, -2]
    for lesson in lessons:
        assert sum(lesson.datums[0].loss_fn_inputs["mask"].tolist()) == 2 * len(lesson.trajectory.turns)
        assert max(lesson.datums[0].loss_fn_inputs["weights"].tolist()) == 0.5, "one over the number of pairs"


def test_the_base_model_as_reference_leaves_the_logprobs_to_the_trainer() -> None:
    for datum in datums_of(build("dpo", reference="base").lessons([make_group([0.0], [1.0])])):
        assert "ref_logprobs" not in datum.loss_fn_inputs


@pytest.mark.parametrize("name", ["dpo", "refuel"])
def test_stored_pairs_give_the_datums_that_the_same_pairs_gave_when_played(name: str) -> None:
    group = make_branches([0.0, 1.0], turn=1)
    pair = best_and_worst(group)
    assert pair is not None
    played, stored = build(name).lessons([group]), build(name, pairs="p.parquet").lessons([pair])
    assert datums_of(stored) == datums_of(played)
    assert all(lesson.trajectory is None for lesson in stored), "nobody played them in this run"


def test_a_pair_from_two_states_is_refused() -> None:
    early, late = make_continuation(0, 1.0, turn=1), make_continuation(1, 0.0, turn=2)
    with pytest.raises(DataError, match="differ before turn 2"):
        PreferencePair(chosen=early, rejected=late, branch_turn=2)
    with pytest.raises(DataError, match="attempts at two tasks: t and u"):
        PreferencePair(chosen=early, rejected=replace(late, task_id="u"))
    with pytest.raises(DataError, match="has 4 turns, and its pair branches at turn 4"):
        PreferencePair(chosen=early, rejected=early, branch_turn=4)
