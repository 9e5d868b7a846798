"""Which task each group gets: shares of a mix, levels of a curriculum, and going on after a stop."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from cases import for_each
from turnwise.envs.base import Task
from turnwise.training.task_order import CurriculumRules, CurriculumTasks, MixedTasks, WorldTasks

RATES = {"level0": 1.0, "level1": 0.5, "level2": 0.0}
"""How often attempts at each level of the toy succeed."""


def _tasks(name: str, count: int = 5) -> WorldTasks:
    return WorldTasks([Task(id=f"{name}/{index}") for index in range(count)], 2, 0)


def _curriculum(seed: int = 0, **rules: float) -> CurriculumTasks:
    return CurriculumTasks({name: _tasks(name) for name in RATES}, CurriculumRules(**rules), seed)  # type: ignore[arg-type]


def _play(order: CurriculumTasks, first: int, last: int) -> list[str]:
    """Play groups of four and tell the order how they went."""
    found: list[str] = []
    for number in range(first, last):
        task = order.item(number)
        found.append(task.id)
        order.count(number, [index < 4 * RATES[task.id.partition("/")[0]] for index in range(4)])
    return found


def _mix(**shares: float) -> MixedTasks:
    return MixedTasks({name: _tasks(name) for name in shares}, shares)


@for_each("parts", [(5, 2, 0.5), (1, 1, 1), (8, 8, 1, 0.1), (8, 0.1, 0.5, 8, 0.1), (0.1, 0.1, 8, 0.1, 1, 3, 8, 8)])
def test_every_member_has_its_share_of_the_groups_at_any_moment(parts: tuple[float, ...]) -> None:
    shares = {f"m{index}": float(part) for index, part in enumerate(parts)}
    mix, counts = _mix(**shares), Counter[str]()
    for number in range(1500):
        counts[mix.item(number).id.partition("/")[0]] += 1
        for name, share in shares.items():
            assert abs(counts[name] - share / sum(parts) * (number + 1)) < 1


def test_a_member_goes_through_its_tasks_as_in_a_run_of_its_own() -> None:
    mix, alone = _mix(a=2, b=1), _tasks("b")
    found = [task.id for task in (mix.item(number) for number in range(60)) if task.id.startswith("b/")]
    assert found == [alone.item(place).id for place in range(20)]


def test_the_turns_of_a_mix_follow_from_the_number_alone() -> None:
    one, two = _mix(a=3, b=1), _mix(a=3, b=1)
    late = [two.item(number).id for number in range(99, -1, -1)]
    assert [one.item(number).id for number in range(100)] == late[::-1]
    assert one.to_state(50) is None
    assert len(one) == 10


def test_a_curriculum_deals_the_level_near_the_target_most() -> None:
    dealt = Counter(task.partition("/")[0] for task in _play(_curriculum(explore=0.2), 0, 400))
    assert dealt["level1"] > 280
    assert min(dealt["level0"], dealt["level2"]) > 10, "the share that explores reaches every level"


def test_a_curriculum_follows_its_target() -> None:
    order = _curriculum(target=0.9, explore=0.0)
    _play(order, 0, 200)
    chances = {name: chance for name, (_, chance) in order.chances().items()}
    assert chances["level0"] > chances["level1"] > chances["level2"]
    assert sum(chances.values()) == pytest.approx(1.0)


def test_before_anything_is_played_all_levels_are_alike() -> None:
    assert list(_curriculum().chances().values()) == [(0.5, pytest.approx(1 / 3))] * 3


def test_only_the_last_groups_of_a_level_count() -> None:
    order = CurriculumTasks({"level0": _tasks("level0")}, CurriculumRules(window=2), 0)
    for number, is_good in enumerate([False] * 20 + [True] * 2):
        order.item(number)
        order.count(number, [is_good] * 4)
    assert order.rates() == {"level0": pytest.approx((8 + 1) / (8 + 2))}


def test_a_group_that_is_told_twice_counts_once_and_one_without_verdicts_does_not() -> None:
    order, other = _curriculum(), _curriculum()
    for one in (order, other):
        one.item(0)
        one.count(0, [True, True])
    other.count(0, [True, True])
    other.item(1)
    other.count(1, [])
    assert order.rates() == other.rates()


def test_a_curriculum_that_goes_on_from_its_state_deals_what_it_would_have_dealt() -> None:
    whole = _curriculum(seed=3)
    expected = _play(whole, 0, 60)
    before = _curriculum(seed=3)
    _play(before, 0, 30)
    ahead = [before.item(number).id for number in range(30, 34)]  # dealt, and not yet played
    resumed = _curriculum(seed=3)
    resumed.restore(json.loads(json.dumps(before.to_state(28))))
    assert [resumed.item(number).id for number in (28, 29)] == expected[28:30]
    assert [resumed.item(number).id for number in range(30, 34)] == ahead
    fresh = _curriculum(seed=3)
    _play(fresh, 0, 30)
    assert fresh.to_state(28) != before.to_state(28), "what was dealt ahead is part of the state"
    continued = _curriculum(seed=3)
    continued.restore(json.loads(json.dumps(fresh.to_state(30))))
    assert _play(continued, 30, 60) == expected[30:]


def test_a_member_of_a_mix_may_have_a_curriculum_and_keeps_its_state() -> None:
    def make() -> tuple[MixedTasks, CurriculumTasks]:
        order = _curriculum(seed=1)
        return MixedTasks({"flat": _tasks("flat"), "doors": order}, {"flat": 1.0, "doors": 1.0}), order

    def play(mix: MixedTasks, first: int, last: int) -> list[str]:
        found: list[str] = []
        for number in range(first, last):
            found.append(mix.item(number).id)
            rate = RATES.get(found[-1].partition("/")[0], 1.0)
            mix.count(number, [index < 4 * rate for index in range(4)])
        return found

    whole, _ = make()
    expected = play(whole, 0, 80)
    first, _ = make()
    play(first, 0, 41)
    state = json.loads(json.dumps(first.to_state(40)))
    second, inner = make()
    second.restore(state)
    assert play(second, 41, 80) == expected[41:]
    assert set(second.chances()) == {f"doors_{name}" for name in RATES}
    assert inner.chances() == {name.removeprefix("doors_"): one for name, one in second.chances().items()}


def test_what_is_played_beside_the_groups_does_not_move_the_deal() -> None:
    order, other = _curriculum(), _curriculum()
    spread = [order.spread(position).id.partition("/")[0] for position in range(6)]
    assert spread == [*RATES, *RATES]
    assert _play(order, 0, 20) == _play(other, 0, 20)
