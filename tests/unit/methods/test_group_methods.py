"""RLOO, GSPO, REINFORCE++, ReBN, GiGPO, MT-GRPO, RFT and SFT: what each keeps, and what its lessons hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cases import for_each
from turnwise.config.config import Config
from turnwise.credit.advantages import center_by_group
from turnwise.credit.datums import dialogue_to_datums, num_trained_tokens
from turnwise.credit.shaping import shape_group
from turnwise.engine.training.columns import collate_columns, datums_to_columns
from turnwise.engine.training.losses import LossColumns, make_loss
from turnwise.errors import ConfigError, DataError
from turnwise.methods.base import (
    DataConfig,
    Lesson,
    Method,
    MethodSetup,
    datums_of,
    with_old_logprobs,
    with_old_share,
)
from turnwise.methods.lookup import read_method
from turnwise.methods.sft import Dialogue, Sft
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.sources import ReadDialogues
from turnwise.training.assemble import make_method, make_shaping
from turnwise.trajectory import WORLD_LABEL, TrajectoryGroup
from turnwise.types import TensorData
from unit.credit.groups import make_attempt, make_group

GROUP_METHODS = ("grpo", "gspo", "rloo", "reinforce_pp", "rebn", "gigpo", "mt_grpo")
STATES = [["a", "b"], ["a", "c"], ["a", "b"]]
GROUP = make_group([0.0, 1.0], [0.5, 0.0], [0.2, 0.4], states=STATES)


def build(name: str, **options: Any) -> Any:
    setup = MethodSetup(data=DataConfig(), group_size=8, max_turns=4, max_tokens=16)
    return read_method({"name": name, **options}).build(setup)


def advantages_of(lessons: list[Lesson]) -> list[list[float]]:
    return [[float(np.mean(a)) for a in lesson.advantages] for lesson in lessons]


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_permuting_siblings_permutes_their_lessons_and_nothing_else(name: str) -> None:
    order = [2, 0, 1]
    permuted = TrajectoryGroup(task_id="t", trajectories=tuple(GROUP.trajectories[i] for i in order))
    method: Method = build(name)
    plain, other = advantages_of(method.lessons([GROUP])), advantages_of(method.lessons([permuted]))
    assert [np.asarray(own) for own in other] == [pytest.approx(np.asarray(plain[i])) for i in order]


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_a_constant_added_to_every_outcome_changes_nothing(name: str) -> None:
    """Added to the last reward, so that it reaches every turn without a discount."""
    shifted = make_group([0.0, 6.0], [0.5, 5.0], [0.2, 5.4], states=STATES)
    options = {"gamma": 1.0} if name in ("rebn", "gigpo") else {}
    method: Method = build(name, **options)
    plain, other = advantages_of(method.lessons([GROUP])), advantages_of(method.lessons([shifted]))
    assert np.asarray(other) == pytest.approx(np.asarray(plain), abs=1e-9)


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_groups_that_teach_nothing_are_counted_by_reason(name: str) -> None:
    method: Method = build(name)
    constant = make_group([0.5], [0.5], states=[["a"], ["a"]])
    kept = method.keep([constant])
    assert kept.groups == ()
    assert kept.dropped == {"constant": 1}


def test_only_batch_baselines_learn_from_a_group_of_one() -> None:
    alone = [make_group([1.0], states=[["a"]]), make_group([0.0], states=[["a"]])]
    for name in GROUP_METHODS:
        kept = build(name).keep(alone)
        assert (kept.dropped == {}) == (name in ("rebn", "reinforce_pp")), name
        if name not in ("rebn", "reinforce_pp"):
            assert kept.dropped == {"too_small": 2}


def test_a_batch_baseline_learns_from_groups_that_are_constant_in_themselves() -> None:
    groups = [make_group([1.0], [1.0]), make_group([0.0], [0.0])]
    assert build("rebn").keep(groups).dropped == {}
    assert advantages_of(build("rebn").lessons(groups)) == [[pytest.approx(1)]] * 2 + [[pytest.approx(-1)]] * 2
    with_baseline = build("reinforce_pp", group_baseline=True)
    assert with_baseline.keep(groups).dropped == {"constant": 2}


def _in_world(world: str, *rewards: list[float]) -> TrajectoryGroup:
    group = make_group(*rewards)
    labelled = tuple(replace(one, labels={WORLD_LABEL: world}) for one in group.trajectories)
    return replace(group, trajectories=labelled)


@for_each("name", ["rebn", "reinforce_pp"])
def test_each_world_of_a_mix_has_a_batch_baseline_of_its_own(name: str) -> None:
    rich, poor = _in_world("rich", [100.0], [101.0]), _in_world("poor", [0.0], [1.0])
    mixed = advantages_of(build(name).lessons([rich, poor, rich]))
    assert mixed[2:4] == advantages_of(build(name).lessons([poor]))
    assert mixed[:2] == mixed[4:] == [[pytest.approx(-1.0, abs=1e-6)], [pytest.approx(1.0, abs=1e-6)]]


def test_a_world_of_a_mix_whose_returns_are_all_the_same_is_left_out_alone() -> None:
    kept = build("rebn").keep([_in_world("solved", [1.0], [1.0]), _in_world("open", [0.0], [1.0])])
    assert kept.reasons == ("constant", None)


def test_batch_baselines_of_nothing_are_nothing() -> None:
    assert build("rebn").lessons([]) == []
    assert build("rebn").keep([]).groups == ()


def test_rloo_sums_tokens_and_compares_with_the_others() -> None:
    lessons = build("rloo").lessons([make_group([1.0], [0.0], [0.5])])
    assert advantages_of(lessons) == [[pytest.approx(0.75)], [pytest.approx(-0.75)], [pytest.approx(0.0)]]
    weights = [w for datum in datums_of(lessons) for w in datum.loss_fn_inputs["weights"].tolist() if w]
    assert weights == pytest.approx([1 / 3] * 6)


def test_gspo_takes_one_ratio_per_attempt_or_per_turn() -> None:
    whole, apart = build("gspo"), build("gspo", sequence="turn")
    assert (whole.loss_fn, apart.loss_fn) == ("gspo", "gspo")
    assert [len(lesson.datums) for lesson in whole.lessons([GROUP])] == [1, 1, 1]
    lessons = apart.lessons([GROUP])
    assert [len(lesson.datums) for lesson in lessons] == [2, 2, 2]
    total = sum(sum(d.loss_fn_inputs["weights"].tolist()) for d in datums_of(lessons))
    assert total == pytest.approx(1.0)


def test_an_attempt_that_starts_over_has_a_ratio_for_each_stretch_and_weighs_as_one_attempt() -> None:
    """Turn 3 of the first attempt has a prompt of its own, as after a rewritten history."""
    first, other = make_attempt([0.0, 0.0, 1.0], attempt=0), make_attempt([0.0, 0.0, 0.0], attempt=1)
    again = replace(first.turns[2], prompt_ids=(1, 7, 8))
    group = TrajectoryGroup(task_id="t", trajectories=(replace(first, turns=(*first.turns[:2], again)), other))
    lessons = build("gspo").lessons([group])
    assert [len(lesson.datums) for lesson in lessons] == [2, 1]
    for lesson in lessons:
        total = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in lesson.datums)
        assert total == pytest.approx(1 / 2), "an attempt of two"
    assert [len(lesson.datums) for lesson in build("gspo", sequence="turn").lessons([group])] == [3, 3]
    columns = collate_columns(datums_to_columns(datums_of(lessons), loss="gspo", vocab_size=100, max_length=32))
    is_last = (columns.datum_T == 1) & columns.mask_T
    moved = torch.where(is_last, 0.5, 0.0)  # only the stretch after the restart is more likely now
    ratios = gspo_ratios(moved, columns)
    assert ratios[is_last].tolist() == pytest.approx([math.exp(0.5)] * 2)
    assert ratios[columns.mask_T & ~is_last].tolist() == pytest.approx([1.0] * 10)


def gspo_ratios(moved: torch.Tensor, columns: LossColumns) -> torch.Tensor:
    """What gspo scales each token's gradient by, read off the gradient of its loss."""
    p_T = (columns.sampler_logprobs_T + moved).requires_grad_()
    make_loss("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0})(p_T, None, columns).sum().backward()
    assert p_T.grad is not None
    return -p_T.grad / (columns.weights_T * columns.advantages_T)


def test_max_rl_divides_by_the_mean_and_refuses_a_mean_below_zero() -> None:
    method = build("grpo", advantage="max_rl")
    assert advantages_of(method.lessons([make_group([1.0], [0.0], [0.0], [0.0])]))[0][0] == pytest.approx(3.0, 1e-4)
    with pytest.raises(DataError, match="needs rewards from 0 up"):
        method.lessons([make_group([-1.0], [0.5])])


def test_gigpo_needs_states_and_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"give it a method state_key\(\) -> str, or use method=grpo"):
        build("gigpo").keep([make_group([1.0], [0.0])])


def test_gigpo_without_step_part_is_grpo() -> None:
    expected = center_by_group(GROUP.rewards)
    found = build("gigpo", omega=0.0).advantages(GROUP)
    assert [own[0] for own in found] == pytest.approx(expected.tolist())


def test_mt_grpo_compares_a_turn_only_with_attempts_that_have_it() -> None:
    """The second attempt is over after one turn: its only reward is its outcome."""
    found = build("mt_grpo").advantages(make_group([0.0, 1.0], [0.0], [1.0, 1.0]))
    outcome = np.array([1.0, 0.0, 1.0])
    expected = (outcome - outcome.mean()) / (outcome.std(ddof=1) + 1e-4)
    assert [own[-1] for own in found] == pytest.approx(expected.tolist())
    assert found[2][0] - found[0][0] == pytest.approx(2 * 0.5 / (np.std([0, 1], ddof=1) + 1e-4))


def test_rft_imitates_successes_and_drops_groups_without_one() -> None:
    good, bad = make_attempt([0.0], is_success=True), make_attempt([9.0], attempt=1, is_success=False)
    unjudged = make_attempt([0.1], attempt=2)
    group = TrajectoryGroup(task_id="t", trajectories=(good, bad, unjudged))
    method = build("rft")
    assert [lesson.trajectory for lesson in method.lessons([group])] == [good, unjudged]
    assert method.loss_fn == "cross_entropy"
    hopeless = TrajectoryGroup(task_id="t", trajectories=(bad, bad))
    assert method.keep([group, hopeless]).dropped == {"no_success": 1}
    by_reward = build("rft", threshold=1.0)
    assert [lesson.trajectory for lesson in by_reward.lessons([group])] == [bad]


def test_sft_weighs_reply_tokens_alike() -> None:
    items = [
        Dialogue(datums=tuple(dialogue_to_datums([([1, 2], [3, 4])]))),
        Dialogue(datums=tuple(dialogue_to_datums([([1], [2])]))),
    ]
    lessons = Sft(source=ReadDialogues()).lessons(items)
    weights = [w for d in datums_of(lessons) for w in d.loss_fn_inputs["weights"].tolist() if w]
    assert weights == pytest.approx([1 / 3] * 3)
    assert all(lesson.trajectory is None for lesson in lessons)
    assert build("sft").source == ReadDialogues(path="")


def test_sft_weighs_turns_alike_when_it_is_told_to() -> None:
    """Replies of 2 and 1 tokens in one dialogue, one of 1 token in the other."""
    items = [
        Dialogue(datums=tuple(dialogue_to_datums([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]))),
        Dialogue(datums=tuple(dialogue_to_datums([([1], [2])]))),
    ]
    for name, expected in (
        ("turn_mean", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
        ("traj_turn_mean", [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
        ("seq_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
    ):
        lessons = build("sft", normalisation=name).lessons(items)
        weights = [w for d in datums_of(lessons) for w in d.loss_fn_inputs["weights"].tolist() if w]
        assert weights == pytest.approx(expected), name


def test_potentials_of_any_size_leave_gigpos_advantages_as_they_are() -> None:
    """The config builds both: turns are discounted, whole attempts are not, and neither may see a potential."""
    rng = np.random.default_rng(0)
    states = [["s", "a", "b"], ["s", "b"], ["s", "a", "a", "b"], ["s", "c"]]
    rewards = [[0.0, 0.1, 1.0], [0.3, 0.0], [0.0, 0.0, 0.2, 0.5], [0.0, 0.7]]
    for _ in range(5):
        phi = {state: float(rng.normal(scale=10)) for state in "sabc"}
        attempts = [
            make_attempt(own, attempt=index, states=keys, potentials=[*(phi[key] for key in keys), 99.0])
            for index, (own, keys) in enumerate(zip(rewards, states, strict=True))
        ]
        group = TrajectoryGroup(task_id="t", trajectories=tuple(attempts))
        for weight in (1.0, 0.5, 0.0):
            reward = {"potential": True, "weights": {"shaping": weight}}
            config = Config.model_validate({"method": {"name": "gigpo", "gamma": 0.9}, "reward": reward})
            shaped = shape_group(group, make_shaping(config))
            assert weight == 0 or shaped.rewards != pytest.approx(group.rewards)
            method: Any = make_method(config, RolloutLimits(max_turns=8, max_tokens_per_turn=256))
            found = method.advantages(shaped)
            for before, after in zip(build("gigpo", gamma=0.9).advantages(group), found, strict=True):
                assert after == pytest.approx(before)


def test_old_logprobs_go_to_the_datum_that_they_are_of() -> None:
    lessons = build("grpo").lessons([GROUP])
    columns = [TensorData([float(i)] * datum.model_input.length) for i, datum in enumerate(datums_of(lessons))]
    found = [d.loss_fn_inputs["old_logprobs"] for d in datums_of(with_old_logprobs(lessons, columns))]
    assert found == columns


def test_a_token_that_lags_further_has_its_old_policy_nearer_to_the_trainer() -> None:
    """Turns of two sampled ids, drawn by the weights of version 3 and 5, learned from at version 5."""
    drawn_by = (3, 5)
    attempts = [
        replace(
            one,
            turns=tuple(replace(turn, policy_version=by) for turn, by in zip(one.turns, drawn_by, strict=True)),
        )
        for one in GROUP.trajectories
    ]
    lessons = build("grpo").lessons([replace(GROUP, trajectories=tuple(attempts))])
    for datum in datums_of(with_old_share(lessons, 5)):
        inputs = datum.loss_fn_inputs
        trained = [share for share, on in zip(inputs["old_share"].data, inputs["mask"].data, strict=True) if on]
        assert trained == pytest.approx([2 / 3, 2 / 3, 0.0, 0.0])
        assert len(inputs["old_share"].data) == datum.model_input.length


def test_every_method_trains_all_sampled_tokens_of_its_groups() -> None:
    for name in GROUP_METHODS:
        lessons = build(name).lessons([GROUP])
        assert sum(num_trained_tokens(datum) for datum in datums_of(lessons)) == 12, name
