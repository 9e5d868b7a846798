"""A data set and reward functions in TRL's form are a world of one turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import Task, assistant
from turnwise.envs.prompts import PromptWorld
from turnwise.errors import AttemptFailed, ConfigError

ROWS = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


def constant(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
    assert len(prompts) == len(completions) == 1
    assert set(columns) <= {"answer"}
    return [None if "0" in str(prompts[0]) else 0.5]


async def play(world: PromptWorld, task: Task, reply: str) -> Any:
    env = world.make_env(task, seed=0)
    await env.start()
    return await env.step(assistant(reply))


async def test_a_function_gets_the_columns_that_it_names_and_the_rewards_are_weighed() -> None:
    world = PromptWorld(rows=ROWS, reward_funcs=[right, constant], reward_weights=[2.0, 1.0])
    task = Task(id="x", data={"row": {"prompt": "Say 7.", "answer": "7"}})
    step = await play(world, task, "7")
    assert (step.reward, step.terminated) == (2.5, True)
    assert step.info == {"right": 1.0, "constant": 0.5}
    none = await play(world, Task(id="y", data={"row": {"prompt": "Say 0.", "answer": "0"}}), "no")
    assert (none.reward, dict(none.info)) == (0.0, {"right": 0.0})


async def test_messages_come_as_messages_and_async_functions_are_awaited() -> None:
    seen: list[Any] = []

    async def slow(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.append((prompts, completions))
        return [1.0]

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    world = PromptWorld(rows=[{"prompt": prompt}], reward_funcs=slow)  # type: ignore[arg-type]
    task = Task(id="x", data={"row": {"prompt": prompt}})
    env = world.make_env(task, seed=0)
    assert [message.role for message in await env.start()] == ["system", "user"]
    assert (await env.step(assistant("Hello."))).reward == 1.0
    assert seen == [([prompt], [[{"role": "assistant", "content": "Hello."}]])]


def test_a_fifth_is_held_out_and_no_row_is_in_both_splits() -> None:
    world = PromptWorld(rows=ROWS, reward_funcs=[right])
    splits = {split: {task.id for task in world.tasks(split, 40, seed=1)} for split in ("train", "test")}
    assert not splits["train"] & splits["test"]
    assert len(splits["train"]) + len(splits["test"]) == len(ROWS)
    assert 2 <= len(splits["test"]) <= 16


def test_rows_given_for_evaluations_never_train(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    world = PromptWorld(rows=str(file), reward_funcs=[right], test_rows=ROWS[:5])
    train = {task.data["row"]["prompt"] for task in world.tasks("train", 99, seed=0)}
    assert train == {row["prompt"] for row in ROWS[5:]}


@pytest.mark.parametrize("broken", [lambda **_: "abc", lambda **_: [], lambda **_: 1 / 0])
async def test_a_function_that_fails_is_blamed_and_the_attempt_is_not_scored(broken: Any) -> None:
    world = PromptWorld(rows=ROWS, reward_funcs=[broken])
    with pytest.raises(AttemptFailed, match="reward") as caught:
        await play(world, world.tasks("train", 1, seed=0)[0], "x")
    assert caught.value.party == "reward"


def test_what_cannot_work_is_refused_with_what_came() -> None:
    with pytest.raises(ConfigError, match="row 1 of the data set has no column 'prompt'; it has question"):
        PromptWorld(rows=[{"question": "?"}], reward_funcs=[right])
    with pytest.raises(ConfigError, match="expected a text, or messages"):
        PromptWorld(rows=[{"prompt": 5}], reward_funcs=[right])
    with pytest.raises(ConfigError, match="called alike"):
        PromptWorld(rows=ROWS, reward_funcs=[right, right])
    with pytest.raises(ConfigError, match="2 numbers for 1 reward functions"):
        PromptWorld(rows=ROWS, reward_funcs=[right], reward_weights=[1, 2])
    with pytest.raises(ConfigError, match="holds no rows"):
        PromptWorld(rows=[], reward_funcs=[right])


def test_rows_that_ask_the_same_are_in_one_split() -> None:
    """Data sets number their rows, so a prompt that is there twice has two rows that differ."""
    twice = [{"prompt": f"Say {n % 40}.", "answer": str(n % 40), "index": n} for n in range(80)]

    def asked(world: PromptWorld, split: Any) -> set[str]:
        return {task.data["row"]["prompt"] for task in world.tasks(split, 200, 0)}

    world = PromptWorld(rows=twice, reward_funcs=[right])
    assert asked(world, "test")
    assert not asked(world, "train") & asked(world, "test")
    given = PromptWorld(rows=twice, reward_funcs=[right], test_rows=[{"prompt": "Say 7.", "answer": "seven"}])
    assert "Say 7." not in asked(given, "train")
    assert len(asked(given, "train")) == 39
