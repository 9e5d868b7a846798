"""Needs reasoning-gym (138 MB with what it drags in), which is in the extra `adapters` and not in `dev`."""

from __future__ import annotations

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym", reason="run by tests/contract/test_adapters_packages.py")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def _answer(number: int) -> str:
    return reasoning_gym.create_dataset("chain_sum", seed=0, size=1_000_000, **SMALL)[number]["answer"]


async def test_the_data_sets_own_answer_is_worth_one() -> None:
    world = get_world("reasoning_gym:chain_sum", config=SMALL)
    for task in world.tasks("train", 5, 0):
        _, steps = await play(world, [f"I think <answer>{_answer(task.data['item'])}</answer>"], task)
        assert (steps[0].reward, steps[0].terminated, steps[0].is_success) == (1.0, True, True)
        assert steps[0].labels == {"answer": _answer(task.data["item"])}


async def test_with_several_attempts_the_rewards_add_up_to_the_best_score() -> None:
    world = get_world("reasoning_gym:chain_sum", config=SMALL, attempts=3)
    task = world.tasks("train", 1, 0)[0]
    right = _answer(task.data["item"])
    _, steps = await play(world, ["no answer", f"<answer>{right} I think</answer>", f"<answer>{right}</answer>"], task)
    assert [step.is_unparsable for step in steps] == [True, False, False]
    rewards = [step.reward_parts["outcome"] for step in steps]
    assert 0 < rewards[1] < 1
    assert sum(rewards) == pytest.approx(1.0)
    assert steps[-1].is_success
    assert [len(step.messages) for step in steps] == [1, 1, 0]


def test_no_question_of_the_test_split_occurs_in_training() -> None:
    world = get_world("reasoning_gym:chain_sum", config=SMALL)
    items = reasoning_gym.create_dataset("chain_sum", seed=0, size=1_000_000, **SMALL)
    train = {items[task.data["item"]]["question"] for task in world.tasks("train", 100, 0)}
    test = {items[task.data["item"]]["question"] for task in world.tasks("test", 100, 1)}
    assert train
    assert test
    assert not train & test


def test_demonstrations_are_the_data_sets_answers() -> None:
    demonstrations = get_world("reasoning_gym:leg_counting").demonstrations(2, 0)
    assert [dialogue[-1].role for dialogue in demonstrations] == ["assistant", "assistant"]
    assert all(dialogue[-1].content.startswith("<answer>") for dialogue in demonstrations)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("chain_sums", {}, "no data set 'chain_sums'; did you mean 'chain_sum'"),
        ("chain_sum", {"config": {"min_term": 1}}, "no option 'min_term'; did you mean 'min_terms'"),
        ("chain_sum", {"config": {"min_terms": -1}}, "chain_sum refuses config="),
        ("chain_sum", {"attempts": 0}, "attempts=0; expected at least 1"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        get_world(f"reasoning_gym:{name}", **options)
