from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.gsm8k_multi_turn import (
    LAST_TURN,
    RULES,
    TRY_AGAIN,
    Gsm8kMultiTurn,
    Gsm8kMultiTurnEnv,
    load_gsm8k,
    read_answer,
)
from turnwise.errors import ConfigError

QUESTION = "Ben has 5 pears and buys 3 bags with 4 pears in each. How many pears does Ben have now?"


def make_env(max_turns: int = 5, solution: str = "3 * 4 = 12\n5 + 12 = 17\n#### 17") -> Gsm8kMultiTurnEnv:
    task = Task(id="t", data={"question": QUESTION, "solution": solution})
    return Gsm8kMultiTurn(max_turns=max_turns).make_env(task, seed=0)


async def play(env: Gsm8kMultiTurnEnv, *replies: str) -> list[EnvStep]:
    await env.start()
    return [await env.step(assistant(reply)) for reply in replies]


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert await env.start() == [system(RULES), user(QUESTION)]
    wrong = await env.step(assistant("5 + 3 + 4 = 12. #### 12"))
    assert wrong.messages == [user(TRY_AGAIN)]
    assert wrong.reward == {"format": pytest.approx(0.04)}
    right = await env.step(assistant("3 * 4 = 12. 5 + 12 = 17. #### 17"))
    assert (right.reward, right.terminated, right.is_success) == ({"outcome": 1.0}, True, True)


async def test_rewards_by_turn_and_the_words_before_the_last() -> None:
    steps = await play(make_env(), "no idea", "#### 1", "17", "#### 2", "#### 3")
    assert [step.reward for step in steps] == [
        {"format": 0.0},
        {"format": pytest.approx(0.04)},
        {"format": 0.0},
        {"format": pytest.approx(0.04)},
        {"format": pytest.approx(0.04)},
    ]
    assert [list(step.messages) for step in steps[:4]] == [[user(TRY_AGAIN)]] * 3 + [[user(LAST_TURN)]]
    assert (steps[-1].terminated, steps[-1].is_success, steps[-1].messages) == (True, False, ())


async def test_the_last_answer_is_recorded_in_the_form_in_which_samples_vote() -> None:
    assert [step.labels for step in await play(make_env(), "#### 1", "#### 17.0")] == [{}, {"answer": "17"}]
    (wrong,), (silent,) = [await play(make_env(max_turns=1), reply) for reply in ("#### 1,200", "no idea")]
    assert (wrong.labels, silent.labels) == ({"answer": "1200"}, {})


async def test_the_answer_gives_nothing_away() -> None:
    wrong, formless = make_env(), make_env()
    (near,) = await play(wrong, "#### 16")
    (far,) = await play(formless, "?")
    assert near.messages == far.messages


@pytest.mark.parametrize("max_turns", [1, 2, 4])
async def test_well_formed_turns_share_a_fifth_of_a_point(max_turns: int) -> None:
    steps = await play(make_env(max_turns), *["#### 0"] * max_turns)
    assert sum(sum(step.reward_parts.values()) for step in steps) == pytest.approx(0.2)
    assert steps[-1].terminated


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 17", 17),
        ("####17", 17),
        ("#### 1,234", 1234),
        ("#### $5", 5),
        ("#### -3", -3),
        ("#### 2.50", Decimal("2.5")),
        ("#### 17.", 17),
        ("#### 1\n#### 2", 2),
        ("17", None),
        ("### 17", None),
        ("#### seventeen", None),
        ("####", None),
        ("#### ,", None),
    ],
)
def test_answers_are_read_strictly(text: str, number: Decimal | int | None) -> None:
    assert read_answer(text) == number


def test_generated_problems_have_solutions_that_add_up() -> None:
    for task in Gsm8kMultiTurn().tasks("train", 400, 0):
        lines = task.data["solution"].splitlines()
        last = 0
        for line in lines[:-1]:
            a, sign, b, result = re.match(r"(\d+) ([-+*/]) (\d+) = (\d+) \w+", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
            a, b, last = int(a), int(b), int(result)
            assert last == {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else None}[sign], line
            assert last > 0
        assert lines[-1] == f"#### {last}"
        assert task.data["question"].endswith("?")


def test_every_number_of_the_first_step_is_in_the_question() -> None:
    for task in Gsm8kMultiTurn(max_steps=1).tasks("train", 200, 0):
        numbers = set(re.findall(r"\d+", task.data["question"]))
        a, b = re.findall(r"\d+", task.data["solution"])[:2]
        assert {a, b} <= numbers


@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_problems_have_at_most_as_many_steps_as_asked_for(max_steps: int) -> None:
    tasks = Gsm8kMultiTurn(max_steps=max_steps).tasks("train", 100, 0)
    assert {len(task.data["solution"].splitlines()) - 1 for task in tasks} == set(range(1, max_steps + 1))


def test_splits_of_generated_problems_never_meet() -> None:
    world = Gsm8kMultiTurn()
    train, test = (
        {task.data["question"] for seed in range(3) for task in world.tasks(split, 300, seed)}
        for split in ("train", "test")
    )
    assert not train & test


def write_gsm8k(path: Path, numbers: range) -> None:
    rows = [
        {"question": f"What is {n} + 1?", "answer": f"{n}+1=<<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"} for n in numbers
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def test_the_published_folder_keeps_its_splits(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "train.jsonl", range(20))
    write_gsm8k(tmp_path / "test.jsonl", range(18, 30))  # two questions are in both: they are no test
    world = Gsm8kMultiTurn(path=tmp_path)
    assert len({task.id for task in world.tasks("train", 20, 0)}) == 20
    assert {task.data["question"] for task in world.tasks("test", 10, 0)} == {
        f"What is {n} + 1?" for n in range(20, 30)
    }


def test_a_single_file_is_split_by_hash(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "all.jsonl", range(100))
    tasks = load_gsm8k(tmp_path / "all.jsonl")
    assert len(tasks["train"]) + len(tasks["test"]) == 100
    assert 5 < len(tasks["test"]) < 40


def test_demonstrations_of_published_problems_leave_out_the_notes(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "all.jsonl", range(50))
    dialogue = Gsm8kMultiTurn(path=tmp_path / "all.jsonl").demonstrations(1, 0)[0]
    assert re.fullmatch(r"(\d+)\+1=(\d+)\n#### \2", dialogue[-1].content)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_turns": 0}, "expected at least 1"),
        ({"max_steps": 4}, "expected 1 to 3"),
        ({"path": Path("/no/such/place")}, "does not exist"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Gsm8kMultiTurn(**options)


def test_files_that_are_not_gsm8k_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no train\.jsonl and no train\*\.parquet"):
        load_gsm8k(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"question": "q", "answer": "17"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1: expected a question and an answer that ends with"):
        load_gsm8k(tmp_path / "x.jsonl")
