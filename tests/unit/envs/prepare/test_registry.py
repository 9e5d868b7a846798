from __future__ import annotations

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise.envs.library.sql_datasets import load_dataset
from turnwise.envs.prepare.registry import PreparedData, prepare_data
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    return folder


def prepare(name: str, source: Path) -> PreparedData:
    return prepare_data(name, source, source.parent / "prepared")


def gsm8k(source: Path) -> None:
    rows = [
        {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in range(9)
    ]
    write_lines(source / "train.jsonl", rows[:6])
    write_lines(source / "test.jsonl", rows[5:])


def test_gsm8k_is_read_by_its_world_and_a_question_of_both_splits_is_left_out(source: Path) -> None:
    gsm8k(source)
    done = prepare("gsm8k", source)
    assert dict(done.rows) == {"train.jsonl": 6, "test.jsonl": 3}
    assert list(done.dropped.values()) == [1]
    world = get_world("gsm8k_multi_turn", path=done.target)
    train, test = ({task.data["question"] for task in world.tasks(split, 20, 0)} for split in ("train", "test"))
    assert (len(train), len(test), train & test) == (6, 3, set())


def test_a_missing_and_a_malformed_file_are_named_and_nothing_is_written(source: Path) -> None:
    gsm8k(source)
    (source / "test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"gsm8k: no test split in .*; expected test\.jsonl or "):
        prepare("gsm8k", source)
    write_lines(source / "test.jsonl", [{"question": "What?", "answer": "none"}])
    with pytest.raises(ConfigError, match=r"test\.jsonl, row 1: the answer has no `#### number`"):
        prepare("gsm8k", source)
    (source / "test.jsonl").write_text('{"question": "What?', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"test\.jsonl, line 1: Unterminated string"):
        prepare("gsm8k", source)
    assert [path.name for path in source.parent.iterdir()] == ["published"]


def test_parts_of_a_file_are_read_together_and_files_of_which_one_must_be_meant_are_named(source: Path) -> None:
    rows = [{"question": f"who is {n}", "answer": [str(n)]} for n in range(6)]
    parts = {"train-00000-of-00002": rows[:2], "train-00001-of-00002": rows[2:4], "dev-00000-of-00001": rows[4:]}
    for name, part in parts.items():
        pq.write_table(pa.Table.from_pylist(part), source / f"{name}.parquet")
    done = prepare("nq", source)
    assert dict(done.rows) == {"train.jsonl": 4, "test.jsonl": 2}
    assert done.num_sources == 3
    (source / "old").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), source / "old" / "train-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"nq: 3 files could be its train split: old/train-00000.*; leave one in"):
        prepare("nq", source)


def test_a_folder_of_something_else_is_never_replaced(source: Path) -> None:
    gsm8k(source)
    mine = source.parent / "prepared" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("all of it")
    with pytest.raises(ConfigError, match="holds something else"):
        prepare("gsm8k", source)
    assert mine.read_text() == "all of it"
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        prepare_data("gsm8k", source, mine)
    mine.unlink()
    assert prepare("gsm8k", source).rows == prepare("gsm8k", source).rows  # the second takes the place of the first


def test_nq_keeps_every_answer(source: Path) -> None:
    write_lines(
        source / "NQ-open.train.jsonl", [{"question": f"who is {n}", "answer": [f"a {n}", f"b {n}"]} for n in range(4)]
    )
    write_lines(source / "NQ-open.dev.jsonl", [{"question": "who is five", "answer": ["five"]}])
    done = prepare("nq", source)
    world = get_world("search", path=done.target, retriever_url="http://127.0.0.1:1")
    assert world.tasks("test", 1, 0)[0].data["answers"] == ["five"]
    assert min(task.data["answers"] for task in world.tasks("train", 4, 0)) == ["a 0", "b 0"]
    write_lines(source / "NQ-open.dev.jsonl", [{"question": "who is five", "answer": "five"}])
    with pytest.raises(ConfigError, match="row 1: answer is 'five'; expected a list of texts"):
        prepare("nq", source)


def hotpot(number: int) -> dict[str, Any]:
    context = [
        [f"Town {number}", [f"Town {number} lies in Land {number}.", " It is small."]],
        ["Shared", ["Known to all."]],
    ]
    facts = [[f"Town {number}", 0]]
    return {
        "_id": f"q{number}",
        "question": f"Where is Town {number}?",
        "answer": f"Land {number}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": facts,
        "context": context,
    }


def test_hotpotqa_gives_questions_and_a_corpus_that_answers_them(source: Path) -> None:
    write_json(source / "hotpot_train_v1.1.json", [hotpot(n) for n in range(6)])
    write_json(source / "hotpot_dev_distractor_v1.json", [hotpot(n) for n in range(6, 8)])
    done = prepare("hotpotqa", source)
    assert dict(done.rows) == {"train.jsonl": 6, "test.jsonl": 2, "corpus.jsonl": 9}
    get_world("search", path=done.target, corpus=done.target / "corpus.jsonl")
    write_json(source / "hotpot_train_v1.1.json", [{**hotpot(0), "context": [1]}])
    with pytest.raises(ConfigError, match="row 1: the context cannot be read"):
        prepare("hotpotqa", source)


def write_pets(database: Path) -> None:
    database.parent.mkdir(parents=True)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE pets (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO pets VALUES (?, ?)", [(f"pet {n}", n) for n in range(5)])
        connection.commit()


def spider(source: Path) -> None:
    write_pets(source / "database" / "pets" / "pets.sqlite")
    rows = [
        {"db_id": "pets", "question": f"How many are over {n}?", "query": f"SELECT COUNT(*) FROM pets WHERE age > {n}"}
        for n in range(3)
    ]
    write_json(
        source / "train_spider.json", [*rows, {"db_id": "pets", "question": "Broken?", "query": "SELECT x FROM pet"}]
    )
    write_json(source / "dev.json", rows[:1])


def test_spider_leaves_out_what_does_not_run_and_says_how_many(source: Path) -> None:
    spider(source)
    done = prepare("spider", source)
    assert dict(done.rows) == {"train_spider.json": 3, "dev.json": 1}
    assert dict(done.dropped) == {"questions whose gold query does not run": 1}
    assert len(get_world("text_to_sql", path=done.target).tasks("train", 3, 0)) == 3
    (source / "database" / "pets" / "pets.sqlite").unlink()
    with pytest.raises(ConfigError, match=r"asks about pets, but there is no pets/pets\.sqlite"):
        prepare("spider", source)


def test_bird_keeps_its_two_folders_and_its_hints(source: Path) -> None:
    row = {"db_id": "pets", "question": "How many are old?", "evidence": "old is over 3"}
    for split in ("train", "dev"):
        write_pets(source / split / f"{split}_databases" / "pets" / "pets.sqlite")
        gold = {"SQL": "SELECT COUNT(*) FROM pets WHERE age > 3;"}
        write_json(source / split / f"{split}.json", [{**row, **gold}, {**row, "SQL": "SELECT old FROM pets"}])
    done = prepare("bird", source)
    assert dict(done.rows) == {"train/train.json": 1, "dev/dev.json": 1}
    assert dict(done.dropped) == {"questions whose gold query does not run": 2}
    get_world("text_to_sql", path=done.target)
    found = load_dataset(done.target)
    assert [found[split][0].text for split in ("train", "test")] == ["How many are old?\nHint: old is over 3"] * 2
    (source / "dev" / "dev.json").write_text("[{}]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"dev\.json, row 1: expected db_id, question, and the gold as query or SQL"):
        prepare("bird", source)


def test_chinook_is_read_from_the_rows_of_a_package(source: Path) -> None:
    fields = {
        "album": {"title": "One", "artist": 1},
        "artist": {"name": "Ada"},
        "customer": {"firstname": "Bo", "support_rep": 1},
        "employee": {"lastname": "Cole", "reports_to": None},
        "genre": {"name": "Rock"},
        "invoice": {"customer": 1, "total": 1.98},
        "invoiceline": {"invoice": 1, "track": 1, "unit_price": 0.99, "quantity": 2},
        "mediatype": {"name": "file"},
        "playlist": {"name": "All"},
        "playlisttrack": {"playlist": 1, "track": 1},
        "track": {"name": "Song", "album": 1, "genre": 1, "mediatype": 1, "milliseconds": 1000},
    }
    rows = [{"pk": 1, "model": f"chinook.{name}", "fields": values} for name, values in fields.items()]
    write_json(source / "fixtures" / "initial_data.json", rows)
    (source / "photos.db").write_text("another program's")
    done = prepare("chinook", source)
    with closing(sqlite3.connect(done.target / "chinook.sqlite")) as connection:
        sql = """SELECT artist.name, total FROM invoiceline JOIN invoice ON invoice_id = invoice.id
            JOIN track ON track_id = track.id JOIN album ON album_id = album.id JOIN artist ON artist_id = artist.id"""
        assert connection.execute(sql).fetchall() == [("Ada", 1.98)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    write_json(source / "fixtures" / "initial_data.json", rows[:3])
    with pytest.raises(ConfigError, match="has the tables album, artist, customer; expected album"):
        prepare("chinook", source)


def test_swe_rows_find_their_repositories(source: Path) -> None:
    repo = source / "repos" / "acme__adder"
    (repo / "tests").mkdir(parents=True)
    (repo / "adder.py").write_text("def add(a, b):\n    return a - b\n")
    (repo / "tests" / "test_adder.py").write_text(
        "from adder import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    )
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(repo), *command], check=True)
    commit = subprocess.run(["git", "-C", str(repo), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    row = {
        "instance_id": "acme__adder-1",
        "repo": "acme/adder",
        "base_commit": commit.stdout.strip(),
        "problem_statement": "add subtracts",
        "test_patch": "",
        "FAIL_TO_PASS": json.dumps(["tests/test_adder.py::test_add"]),
        "PASS_TO_PASS": "[]",
    }
    write_lines(source / "swe.jsonl", [row])
    done = prepare("swe", source)
    assert dict(done.rows) == {"tasks.jsonl": 1}
    written = json.loads((done.target / "tasks.jsonl").read_text())
    assert written["repo"] == str(repo.resolve())
    write_lines(source / "swe.jsonl", [{**row, "repo": "acme/other"}])
    with pytest.raises(
        ConfigError, match=r"row 1: no repository acme/other in .*repos; expected a clone or an archive"
    ):
        prepare("swe", source)
    write_lines(source / "swe.jsonl", [{**row, "base_commit": "0" * 40}])
    with pytest.raises(ConfigError, match=r"git archive of 0+ in .* failed"):
        prepare("swe", source)


def test_the_command_prints_what_it_wrote_and_finds_a_changed_file(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gsm8k(source)
    target = source.parent / "gsm"
    assert main(["data", "prepare", "gsm8k", "--from", str(source), "--to", str(target)]) == 0
    said = capsys.readouterr().out
    assert "6  train.jsonl" in said
    assert f"use it: turnwise train gsm8k_multi_turn env.options.path={target}" in said
    manifest = json.loads((target / "manifest.json").read_text())
    assert set(manifest["sources"]) == {"train.jsonl", "test.jsonl"}
    assert all(len(value) == 64 for value in manifest["sources"].values())
    assert main(["data", "check", str(target)]) == 0
    (target / "test.jsonl").write_text("{}")
    assert main(["data", "check", str(target)]) != 0
    assert "test.jsonl was changed" in capsys.readouterr().out


def test_an_unknown_name_and_a_missing_folder_are_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no data set 'gsm8'"):
        prepare("gsm8", source)
    with pytest.raises(ConfigError, match="is not a folder; expected the files of nq as published"):
        prepare_data("nq", source / "nowhere", source.parent / "out")
    assert main(["data", "check", str(source)]) == 2
    assert "has no manifest.json" in capsys.readouterr().err
