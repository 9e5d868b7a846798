from __future__ import annotations

from typing import Any

import pytest

from attempts import play_replies, said
from turnwise.envs.base import Task, assistant, system, user
from turnwise.envs.check import check_env
from turnwise.envs.library.sql_databases import draw_database
from turnwise.envs.library.sql_runner import QueryResult
from turnwise.envs.library.text_to_sql import Protocol, SqlAction, TextToSql, TextToSqlEnv, format_result, read_action
from turnwise.errors import ConfigError, DataError

NUMBER = next(n for n in range(400) if draw_database("easy", n, 0).schema == "cats(name, age, color)")
COUNT = "SELECT COUNT(*) FROM cats"
GOLD = f"{COUNT} WHERE age > 3"
TASK = Task(
    id="t",
    data={
        "level": "easy",
        "database": NUMBER,
        "prompt": "cats(name, age, color)\nHow many cats have age over 3?",
        "gold": GOLD,
    },
)
RIGHT = sum(row[1] > 3 for row in draw_database("easy", NUMBER, 0).main.rows)  # type: ignore[operator]


def make_env(gold: str = GOLD, **options: Any) -> TextToSqlEnv:
    return TextToSql(**options).make_env(Task(id="t", data={**TASK.data, "gold": gold}), 0)


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert await env.start() == [
        system("Answer with SQL. Write one query and see its result. Write submit when the last result is the answer."),
        user("cats(name, age, color)\nHow many cats have age over 3?"),
    ]
    steps = await play_replies(env, "SELECT COUNT(*) FROM cat WHERE age > 3", GOLD, "submit")
    assert said(steps) == ["error: no such table: cat", str(RIGHT)]
    assert [message.role for step in steps for message in step.messages] == ["tool", "tool"]
    assert [dict(step.reward_parts) for step in steps] == [{"format": 0.0}, {"format": 0.1}, {"outcome": 1.0}]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)


async def test_queries_are_actions_and_other_replies_are_text() -> None:
    env = make_env()
    await env.start()
    replies = ("I think that it is two.", "SELECT COUNT(*) FROM cat", GOLD, "submit")
    assert [(await env.step(assistant(reply))).is_action for reply in replies] == [False, True, True, False]


@pytest.mark.parametrize(
    ("sql", "is_right"),
    [
        (GOLD, True),
        ("SELECT SUM(age > 3) FROM cats", True),  # another way to say it
        (f"{COUNT} WHERE age >= 4", True),
        (COUNT, False),
        (f"{COUNT} WHERE age > 3 GROUP BY color", False),
        (f"SELECT {RIGHT}", False),  # right by luck here, and wrong on the other variant
        (f"SELECT {RIGHT} FROM cats LIMIT 1", False),
        ("SELECT nothing FROM cats", False),
    ],
)
async def test_a_submission_must_be_right_on_every_variant(sql: str, is_right: bool) -> None:
    (step,) = await play_replies(make_env(), f"submit {sql}")
    assert (step.terminated, step.is_success) == (True, is_right)
    assert step.reward_parts == {"outcome": float(is_right)}


async def test_order_is_judged_when_the_gold_has_one() -> None:
    ordered = "SELECT name FROM cats ORDER BY name"
    for gold, given, is_right in (
        (ordered, "SELECT name FROM cats ORDER BY name DESC", False),
        (ordered, ordered, True),
        ("SELECT name FROM cats", "SELECT name FROM cats ORDER BY name DESC", True),
        ("SELECT color FROM cats", "SELECT DISTINCT color FROM cats", False),
    ):
        (step,) = await play_replies(make_env(gold=gold), f"submit {given}")
        assert step.is_success is is_right


async def test_submit_hands_in_the_last_query_that_ran() -> None:
    steps = await play_replies(make_env(), GOLD, "SELECT broken", "submit")
    assert steps[-1].is_success
    steps = await play_replies(make_env(), GOLD, COUNT, "submit")
    assert steps[-1].is_success is False


async def test_there_is_nothing_to_submit_before_a_query_ran() -> None:
    steps = await play_replies(make_env(), "submit", "SELECT broken", "submit")
    assert said(steps)[0] == said(steps)[2] == "error: no query has run yet; write one first"


async def test_the_format_reward_is_paid_once() -> None:
    steps = await play_replies(make_env(), COUNT, GOLD, "submit")
    assert [step.reward_parts.get("format", 0.0) for step in steps] == [0.1, 0.0, 0.0]
    steps = await play_replies(make_env(format_reward=0.0), COUNT)
    assert steps[0].reward_parts == {"format": 0.0}


async def test_turns_run_out_without_success() -> None:
    steps = await play_replies(make_env(max_turns=3), COUNT, COUNT, COUNT)
    assert [step.terminated for step in steps] == [False, False, True]
    assert steps[-1].is_success is False


async def test_writing_is_told_to_be_refused_and_is_no_unreadable_reply() -> None:
    (step,) = await play_replies(make_env(), "DROP TABLE cats")
    assert said([step]) == ["error: only SELECT is allowed, and the database is read-only"]
    assert not step.is_unparsable


async def test_a_gold_that_does_not_run_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="the gold query 'SELECT nothing FROM cats' does not run"):
        await play_replies(make_env(gold="SELECT nothing FROM cats"), f"submit {COUNT}")


@pytest.mark.parametrize(
    ("text", "protocol", "action"),
    [
        ("SELECT 1", "line", SqlAction(False, "SELECT 1")),
        ("  select 1;\n", "line", SqlAction(False, "select 1")),
        ("```sql\nSELECT 1;\n```", "line", SqlAction(False, "SELECT 1")),
        ("WITH a AS (SELECT 1) SELECT * FROM a", "line", SqlAction(False, "WITH a AS (SELECT 1) SELECT * FROM a")),
        ("submit", "line", SqlAction(True, "")),
        ("Submit.", "line", SqlAction(True, "")),
        ("submit: SELECT 1", "line", SqlAction(True, "SELECT 1")),
        ("submit ```SELECT 1```", "line", SqlAction(True, "SELECT 1")),
        ("submitted", "line", None),
        ("submit 5", "line", None),
        ("The answer is 5", "line", None),
        ("", "line", None),
        ("<sql>SELECT 1</sql>", "tags", SqlAction(False, "SELECT 1")),
        ("I think so. <solution>\nSELECT 1;</solution>", "tags", SqlAction(True, "SELECT 1")),
        ("<sql>SELECT 1</sql><sql>SELECT 2</sql>", "tags", None),
        ("<sql>SELECT 1</sql><solution>SELECT 1</solution>", "tags", None),
        ("<solution></solution>", "tags", None),
        ("<sql>SELECT 1", "tags", None),
        ("SELECT 1", "tags", None),
    ],
)
def test_one_action_is_read_from_a_reply(text: str, protocol: Protocol, action: SqlAction | None) -> None:
    assert read_action(text, protocol) == action


async def test_a_reply_that_is_no_action_is_unparsable() -> None:
    (step,) = await play_replies(make_env(), "The answer is 5")
    assert step.is_unparsable
    assert said([step]) == ["Write one SQL query, or submit."]


def test_results_are_cut_in_rows_cells_and_length() -> None:
    rows = tuple((n, f"line\none {n}") for n in range(8))
    assert format_result(QueryResult(columns=("n", "text"), rows=rows, is_cut=False), 2) == (
        "n | text\n0 | line one 0\n1 | line one 1\n... and 6 more"
    )
    one = QueryResult(columns=("a",), rows=((None,), (b"xyz",), (0.1 + 0.2,), ("x" * 60,)), is_cut=False)
    assert format_result(one, 5) == f"NULL\n(3 bytes)\n0.3\n{'x' * 40}..."
    assert format_result(QueryResult(columns=("a",), rows=(), is_cut=False), 5) == "no rows"
    wide = QueryResult(columns=tuple("abcdefgh"), rows=(("x" * 40,) * 8,) * 9, is_cut=True)
    assert len(format_result(wide, 9)) < 1010


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard", "mixed"])
def test_train_and_test_share_no_database(difficulty: Any) -> None:
    world = TextToSql(difficulty=difficulty)
    train, test = (
        {(task.data["level"], task.data["database"]) for task in world.tasks(split, 150, 3)}
        for split in ("train", "test")
    )
    assert not train & test
    assert len({task.id for task in world.tasks("train", 150, 3)}) == 150


def test_some_demonstrations_mend_a_query_that_failed() -> None:
    dialogues = TextToSql(demonstration_mistakes=0.5).demonstrations(20, 0)
    failed = [any(message.content.startswith("error:") for message in dialogue) for dialogue in dialogues]
    assert 4 < sum(failed) < 16
    assert all(dialogue[-1] == assistant("submit") for dialogue in dialogues)


def test_unskilled_demonstrations_show_the_form_and_not_the_answer() -> None:
    world = TextToSql(demonstration_skill=0.0, demonstration_mistakes=0.0)
    tasks, dialogues = world.tasks("train", 20, 0), world.demonstrations(20, 0)
    same = [dialogue[2].content == task.data["gold"] for task, dialogue in zip(tasks, dialogues, strict=True)]
    assert sum(same) < 8
    assert all(dialogue[2].content.startswith("SELECT") for dialogue in dialogues)


@pytest.mark.parametrize(
    "options",
    [
        {"difficulty": "medium"},
        {"difficulty": "hard", "protocol": "tags"},
        {"difficulty": "mixed", "max_turns": 2},
        {"demonstration_mistakes": 1.0},
    ],
)
def test_every_variant_keeps_the_rules(options: dict[str, Any]) -> None:
    report = check_env(TextToSql(**options), num_tasks=2, deadline_s=120)
    assert report.is_ok, report


@pytest.mark.parametrize(
    "options",
    [
        {"max_turns": 1},
        {"max_rows": 0},
        {"time_limit_s": 0},
        {"time_limit_s": 61},
        {"demonstration_skill": 2},
        {"demonstration_mistakes": -1},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        TextToSql(**options)
