from __future__ import annotations

import random
import sqlite3
from contextlib import closing

import pytest

from turnwise.envs.library.sql_compare import asks_for_order, same_result
from turnwise.envs.library.sql_databases import LEVELS, DatabaseFolder, Level, draw_database
from turnwise.envs.library.sql_questions import draw_question


def test_variants_share_the_schema_and_not_the_rows() -> None:
    for level in LEVELS:
        for number in range(30):
            first, second = (draw_database(level, number, variant) for variant in (0, 1))
            assert first.schema == second.schema
            assert first.main.rows != second.main.rows


def test_the_same_number_gives_the_same_database() -> None:
    assert draw_database("hard", 7, 0) == draw_database("hard", 7, 0)
    assert draw_database("hard", 7, 0) != draw_database("hard", 8, 0)


def test_easy_databases_have_one_small_table_and_the_others_two() -> None:
    for number in range(50):
        (table,) = draw_database("easy", number, 0).tables
        assert 3 <= len(table.columns) <= 4
        assert len(draw_database("medium", number, 0).tables) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_golds_answer_with_something_and_no_constant_answers_both_variants(level: Level) -> None:
    for number in range(40):
        question = draw_question(level, number, random.Random(number))
        assert question is not None
        answers = []
        for variant in (0, 1):
            with closing(draw_database(level, number, variant).open()) as connection:
                answers.append(connection.execute(question.gold).fetchall())
        assert all(answers)
        assert not same_result(answers[0], answers[1], ordered=asks_for_order(question.gold))


def test_levels_ask_for_what_they_promise() -> None:
    def golds(level: Level) -> str:
        drawn = [draw_question(level, number, random.Random(number)) for number in range(60)]
        return " ; ".join(question.gold for question in drawn if question is not None)

    easy, medium, hard = (golds(level) for level in LEVELS)
    assert "COUNT(*)" in easy
    assert not any(word in easy for word in ("JOIN", "GROUP", "ORDER", "(SELECT"))
    assert all(word in medium for word in ("JOIN", "GROUP BY"))
    assert all(word in hard for word in ("HAVING", "ORDER BY", "(SELECT", "NOT IN"))


def test_an_order_that_is_asked_for_has_no_ties() -> None:
    num_ordered = 0
    for number in range(120):
        question = draw_question("hard", number, random.Random(number))
        if question is None or question.tie_free is None:
            continue
        num_ordered += 1
        for variant in (0, 1):
            with closing(draw_database("hard", number, variant).open()) as connection:
                keys = connection.execute(question.tie_free).fetchall()
            assert len(set(keys)) == len(keys)
    assert num_ordered > 10


def test_files_hold_the_drawn_rows_and_go_with_their_folder() -> None:
    folder = DatabaseFolder()
    path = folder.file("medium", 3, 1)
    assert folder.file("medium", 3, 1) == path
    with closing(sqlite3.connect(path)) as connection:
        table = draw_database("medium", 3, 1).main
        assert connection.execute(f"SELECT * FROM {table.name}").fetchall() == list(table.rows)
    assert [file.name for file in path.parent.iterdir()] == ["medium-3-1.sqlite"]
    del folder
    assert not path.parent.exists()
