# ruff: noqa: ARG002 - scripted envs do not look at what they are given

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from turnwise.envs.adapters.base_environment import (
    BaseEnvironment,
    BaseEnvironmentWorld,
    observation_to_messages,
)
from turnwise.envs.base import EnvStep, assistant, system, user
from turnwise.errors import ConfigError, DataError

ROWS = [{"prompt": f"Say {n}.", "ground_truth": n} for n in range(30)]


class Scripted(BaseEnvironment):
    """Returns what it is told to; notes `current_turn` as `step` sees it."""

    def __init__(self, result: Any = (0.5, "Go on.", False), max_turns: int = 3) -> None:
        self.result = result
        self.max_turns = max_turns
        self.current_turn = 0
        self.seen: list[int] = []
        self.was_reset = False
        self.is_closed = False

    def reset(self) -> None:
        self.was_reset = True

    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        self.seen.append(self.current_turn)
        return self.result

    def close(self) -> None:
        self.is_closed = True


class CountsInHelper(Scripted):
    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        self._tick()
        return super().step(response, ground_truth)

    def _tick(self) -> None:
        self.current_turn += 1


class CountsItself(Scripted):
    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        self.current_turn += 1
        return super().step(response, ground_truth)


class InheritsItsCount(CountsItself):
    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        return super().step(response, ground_truth)


class OverridesItsCount(CountsItself):
    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        self.seen.append(self.current_turn)
        return self.result


async def play(env_class: type[Scripted], turns: int, **options: Any) -> tuple[list[EnvStep], Scripted]:
    made: list[Scripted] = []

    class Kept(env_class):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    world = BaseEnvironmentWorld(Kept, ROWS, env_options=options)
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    steps = [await env.step(assistant("hm")) for _ in range(turns)]
    await env.close()
    return steps, made[-1]


@pytest.mark.parametrize("env_class", [Scripted, CountsItself, CountsInHelper, InheritsItsCount, OverridesItsCount])
async def test_current_turn_is_the_turn_being_judged_whoever_counts(env_class: type[Scripted]) -> None:
    steps, inner = await play(env_class, 3)
    assert inner.seen == [1, 2, 3]
    assert [step.is_over for step in steps] == [False, False, True]


async def test_reset_and_close_are_called() -> None:
    _, inner = await play(Scripted, 1)
    assert inner.was_reset
    assert inner.is_closed


async def test_done_without_an_observation_ends_the_attempt() -> None:
    (step,), _ = await play(Scripted, 1, result=(1.0, None, True))
    assert (step.reward, step.terminated, step.is_success, step.messages) == (1.0, True, True, [])


async def test_the_last_turn_needs_no_observation() -> None:
    (step,), _ = await play(Scripted, 1, result=(0.0, None, False), max_turns=1)
    assert (step.terminated, step.is_success) == (True, False)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ((0.0, None, False), "no observation but done=False"),
        ((0.0, "hm"), r"expected \(reward, observation, done\)"),
        ("hm", r"expected \(reward, observation, done\)"),
        (("1", "hm", False), "expected a number and True or False"),
        ((0.0, "hm", "no"), "expected a number and True or False"),
        ((float("nan"), "hm", False), "expected a finite number"),
        ((0.0, 7, False), "7 is not a message"),
        ((0.0, [{"role": "narrator", "content": "hm"}], False), "is not a message"),
    ],
)
async def test_what_step_may_not_return_is_refused(result: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        await play(Scripted, 1, result=result)


def test_observations_may_be_text_or_messages() -> None:
    assert observation_to_messages("hi") == [user("hi")]
    assert observation_to_messages({"role": "system", "content": "s"}) == [system("s")]
    assert observation_to_messages([{"role": "system", "content": "s"}, user("u")]) == [system("s"), user("u")]


async def test_a_prompt_may_be_messages() -> None:
    rows = [
        {"prompt": [{"role": "system", "content": f"s{n}"}, {"role": "user", "content": "u"}], "ground_truth": n}
        for n in range(9)
    ]
    world = BaseEnvironmentWorld(Scripted, rows)
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    assert [message.role for message in await env.start()] == ["system", "user"]
    await env.close()


def test_max_turns_reaches_the_class_and_comes_from_it() -> None:
    class Noting(Scripted):
        made: ClassVar[list[int]] = []

        def __init__(self, max_turns: int = 3) -> None:
            super().__init__(max_turns=max_turns)
            self.made.append(max_turns)

    assert BaseEnvironmentWorld(Scripted, ROWS).max_turns == 3
    assert BaseEnvironmentWorld(Scripted, ROWS, max_turns=7).max_turns == 7
    world = BaseEnvironmentWorld(Noting, ROWS, max_turns=7)
    world.make_env(world.tasks("train", 1, 0)[0], 0)
    assert Noting.made[-1] == 7


def test_rows_are_split_by_hash_and_drawn_by_seed() -> None:
    world = BaseEnvironmentWorld(Scripted, ROWS)
    train, test = world.tasks("train", 20, 1), world.tasks("test", 3, 1)
    assert train == world.tasks("train", 20, 1)
    assert not {task.id for task in train} & {task.id for task in test}


def test_a_test_dataset_is_the_test_split() -> None:
    world = BaseEnvironmentWorld(Scripted, ROWS[:20], test_dataset=ROWS[20:])
    assert {task.data["ground_truth"] for task in world.tasks("train", 20, 0)} == set(range(20))
    assert {task.data["ground_truth"] for task in world.tasks("test", 10, 0)} == set(range(20, 30))
    with pytest.raises(ConfigError, match=r'1 tasks are both trained on and held out, .*"Say 5\."'):
        BaseEnvironmentWorld(Scripted, ROWS[:20], test_dataset=ROWS[5:6])


def test_rows_that_ask_the_same_are_in_one_split() -> None:
    rows = [{"prompt": f"Say{' ' * copy} {n}.", "ground_truth": copy} for n in range(60) for copy in (1, 2, 3)]
    world = BaseEnvironmentWorld(Scripted, rows)
    train, test = ({task.data["prompt"].split()[1] for task in world.tasks(s, 180, 0)} for s in ("train", "test"))
    assert not train & test
    with pytest.raises(ConfigError, match="60 tasks are both trained on and held out"):
        BaseEnvironmentWorld(Scripted, rows[::3], test_dataset=rows[1::3])
    by_truth = BaseEnvironmentWorld(Scripted, rows[::3], test_dataset=rows[1::3], row_key="prompt, ground_truth")
    assert len(by_truth.tasks("test", 60, 0)) == 60


def test_a_dataset_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    assert BaseEnvironmentWorld(Scripted, file).tasks("train", 5, 0) == BaseEnvironmentWorld(Scripted, ROWS).tasks(
        "train", 5, 0
    )


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "p"}], "a row with 'prompt'; expected 'prompt' and 'ground_truth'"),
        ([{}], "a row with nothing"),
        ([{"prompt": "p", "ground_truth": {1, 2}}], "is not JSON"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(rows: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        BaseEnvironmentWorld(Scripted, rows)


def test_a_dataset_too_small_to_hold_out_says_so() -> None:
    world = BaseEnvironmentWorld(Scripted, ROWS[:1])
    with pytest.raises(ConfigError, match="give it more rows, or a test_dataset"):
        [world.tasks(split, 1, 0) for split in ("train", "test")]
