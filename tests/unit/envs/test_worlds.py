# ruff: noqa: ARG002 - constructors whose arguments matter by their names

from __future__ import annotations

import threading
from typing import Any

import pytest

from turnwise.envs.adapters.base_environment import BaseEnvironment, BaseEnvironmentWorld
from turnwise.envs.base import Env, EnvStep, Task, assistant, user
from turnwise.envs.check import check_env
from turnwise.envs.worlds import EnvClassWorld, as_world, world_parameters
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message


class Dice:
    """A plain env class; the number to say depends on the seed."""

    max_tokens = 4

    def __init__(self, seed: int, sides: int = 6, max_turns: int = 2) -> None:
        self.number = seed % sides

    def start(self) -> list[Message]:
        return [user("Say a number.")]

    def step(self, reply: Message) -> EnvStep:
        return EnvStep(reward=float(reply.content == str(self.number)), terminated=True)

    def close(self) -> None:
        pass


class TaskDice(Dice):
    def __init__(self, task: Task, seed: int) -> None:
        self.given: tuple[str, int] = (task.id, seed)
        super().__init__(task.data["seed"])


class Coin(Dice):
    def __init__(self) -> None:
        super().__init__(0)


class AnyOptions(Dice):
    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed)
        self.options = options


class Words(BaseEnvironment):
    def __init__(self, language: str = "en", max_turns: int = 4) -> None:
        self.language = language
        self.max_turns = max_turns

    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        return float(response == ground_truth), self.language, True


ROWS = [{"prompt": f"p{n}", "ground_truth": f"g{n}"} for n in range(20)]


def test_an_env_class_with_a_seed_is_a_world_whose_test_seeds_are_new() -> None:
    world = as_world(Dice, {"sides": 2})
    assert isinstance(world, EnvClassWorld)
    assert (world.name, world.max_turns, world.max_tokens) == ("Dice", 2, 4)
    train, test = world.tasks("train", 100, 0), world.tasks("test", 100, 0)
    assert train == world.tasks("train", 100, 0)
    assert {task.data["seed"] % 2 for task in train} == {0}
    assert {task.data["seed"] % 2 for task in test} == {1}
    assert len({task.id for task in [*train, *test]}) == 200
    assert world.demonstrations(3, 0) == []


async def test_all_attempts_at_a_task_get_the_seed_of_the_task() -> None:
    world = as_world(Dice)
    task = world.tasks("train", 1, 0)[0]
    answer = assistant(str(task.data["seed"] % 6))
    for attempt_seed in (1, 2):
        env = world.make_env(task, attempt_seed)
        assert (await env.step(answer)).reward == 1.0
        await env.close()


def test_an_env_class_that_takes_a_task_gets_the_seed_of_the_attempt_too() -> None:
    world = as_world(TaskDice)
    task = world.tasks("train", 1, 0)[0]
    env: Any = world.make_env(task, seed=77)
    assert env.given == (task.id, 77)


def test_an_env_class_that_takes_neither_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="takes neither `task` nor `seed`"):
        as_world(Coin)


def test_options_of_an_env_class_are_checked_and_its_seed_is_none_of_them() -> None:
    with pytest.raises(ConfigError, match="world Dice: unknown option 'side'; did you mean 'sides'"):
        as_world(Dice, {"side": 3})
    with pytest.raises(ConfigError, match="unknown option 'seed'"):
        as_world(Dice, {"seed": 3})
    assert as_world(Dice, {"max_turns": 7}).max_turns == 7


def test_a_class_with_any_options_gets_them_all() -> None:
    world = as_world(AnyOptions, {"colour": "red"})
    env: Any = world.make_env(world.tasks("train", 1, 0)[0], 0)
    assert env.options == {"colour": "red"}
    assert world_parameters(AnyOptions) is None


def test_a_base_environment_class_takes_its_dataset_as_an_option() -> None:
    world = as_world(Words, {"dataset": ROWS, "max_turns": 2, "language": "fr"})
    assert isinstance(world, BaseEnvironmentWorld)
    assert world.max_turns == 2
    assert {"dataset", "max_turns", "language"} <= {parameter.name for parameter in world_parameters(Words) or ()}


def test_a_base_environment_class_without_a_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"option 'dataset' is missing; .* env\.options\.dataset=rows\.jsonl"):
        as_world(Words)
    with pytest.raises(ConfigError, match="unknown option 'languag'; did you mean 'language'"):
        as_world(Words, {"dataset": ROWS, "languag": "fr"})


def test_an_env_object_is_no_world() -> None:
    with pytest.raises(ConfigError, match="Dice gives an env, an object of Dice; pass the class Dice itself"):
        as_world(Dice(0))


class _NoStep:
    def __init__(self, seed: int) -> None: ...
    def start(self) -> list[Message]:
        return [user("Say hi.")]

    def close(self) -> None: ...


class _ForgotStep(Env):  # the base declares `step` and does not write it
    def __init__(self, seed: int) -> None: ...
    async def start(self) -> list[Message]:
        return [user("Say hi.")]

    async def close(self) -> None: ...


@pytest.mark.parametrize("env_class", [_NoStep, _ForgotStep])
def test_an_env_class_without_step_is_told_what_an_env_has(env_class: type) -> None:
    for check in (as_world, check_env):
        with pytest.raises(ConfigError, match=r"has no step\(reply\); an env has start\(\), step"):
            check(env_class)


class ShownDice(Dice):
    """Says what is right, in the thread that the env's other methods run in."""

    def start(self) -> list[Message]:
        self.thread = threading.get_ident()
        return super().start()

    def step(self, reply: Message) -> EnvStep:
        is_right = reply.content == str(self.number)
        return EnvStep(reward=float(is_right), terminated=True, is_success=is_right)

    def demonstrate(self) -> str:
        assert threading.get_ident() == self.thread
        return str(self.number)


class AsyncDice(Dice):
    async def demonstrate(self) -> str:
        return str(self.number)


class MuteDice(Dice):
    def demonstrate(self) -> None:
        return None


class ShownCapital(BaseEnvironment):
    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        return float(response == ground_truth), None, True

    def demonstrate(self, ground_truth: Any) -> str:
        return ground_truth


def test_an_env_class_that_demonstrates_has_demonstrations() -> None:
    world = as_world(ShownDice)
    played = world.demonstrations(3, 5)
    assert [dialogue[-1].content for dialogue in played] == [
        str(task.data["seed"] % 6) for task in world.tasks("train", 3, 5)
    ]
    assert check_env(world, num_tasks=2).is_ok
    assert len(as_world(AsyncDice).demonstrations(2, 0)) == 2
    assert as_world(Dice).demonstrations(2, 0) == []


def test_a_class_with_ground_truths_demonstrates_with_them() -> None:
    rows = [{"prompt": f"Say {n}.", "ground_truth": str(n)} for n in range(20)]
    world = BaseEnvironmentWorld(ShownCapital, rows)
    played = world.demonstrations(4, 0)
    assert all(dialogue[0].content == f"Say {dialogue[1].content}." for dialogue in played)
    assert check_env(world, num_tasks=2).is_ok


def test_a_demonstration_that_is_no_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"demonstrate\(\) returned None; expected the text"):
        as_world(MuteDice).demonstrations(1, 0)
