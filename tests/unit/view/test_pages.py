"""What the viewer answers about runs: found, grouped by seed, filtered, searched, drawn as trees."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turnwise.errors import ConfigError, DataError
from turnwise.runlog.schema import DATABASE
from turnwise.runlog.writer import RunWriter
from turnwise.trajectory import EndReason
from turnwise.view.pages import Pages, Query
from view_runs import PICTURE, Play, WrittenRun

PLAYS = (
    Play(task_id="t1", attempt=0, replies=("8", "4", "call weather"), reward=1.0, answers="It rains in Paris."),
    Play(task_id="t1", attempt=1, replies=("8", "4", "6"), reward=0.0),
    Play(task_id="t1", attempt=2, replies=("8", "12"), reward=0.25, end_reason=EndReason.MAX_TURNS),
    Play(task_id="t2", attempt=0, replies=("1",), reward=-0.5),
)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    place = tmp_path / "runs"
    for seed in (0, 1):
        WrittenRun(seed=seed, plays=PLAYS if seed == 0 else ()).write(place / f"grpo-s{seed}")
    WrittenRun(overrides=["train.learning_rate=0.5"]).write(place / "deep" / "fast")
    (place / "broken").mkdir()
    (place / "broken" / DATABASE).write_bytes(b"this is no database, and long enough to be read as one" * 9)
    opened = Pages(place)
    yield opened
    opened.close()


def eventually(ask: Callable[[Query], dict], query: Query, is_right: Callable[[dict], bool]) -> dict:
    """The answer, once the side index is as far as it has to be."""
    ends_s = time.monotonic() + 20
    while not is_right(answer := ask(query)):
        assert time.monotonic() < ends_s, answer
        time.sleep(0.02)
    return answer


def test_runs_are_found_at_any_depth_and_a_damaged_one_does_not_hide_the_others(pages: Pages) -> None:
    runs = {run["name"]: run for run in pages.runs({})["runs"]}
    assert sorted(runs) == ["broken", "deep/fast", "grpo-s0", "grpo-s1"]
    assert runs["broken"]["state"] == "damaged"
    assert "cannot be read" in runs["broken"]["error"]
    assert (runs["grpo-s0"]["world"], runs["grpo-s0"]["step"]) == ("guess_number", 4)
    assert pages.run({"run": "broken"})["summary"]["state"] == "damaged"


def test_runs_that_differ_in_their_seed_only_are_one_group_with_an_interval(pages: Pages) -> None:
    found = pages.curves({"metric": "eval/success", "runs": "grpo-s0,grpo-s1,deep/fast,broken"})
    groups = {group["group"]: group for group in found["groups"]}
    assert groups["grpo"]["runs"] == ["grpo-s0", "grpo-s1"]
    last = {key: groups["grpo"][key][-1] for key in ("x", "y", "low", "high")}
    assert last["x"] == 4
    assert last["y"] == pytest.approx(0.71)  # 0.70 and 0.72
    assert last["high"] - last["y"] == pytest.approx(12.706 * 0.01, rel=1e-3)  # Student's t, one degree of freedom
    assert groups["deep/fast"]["low"] == found["curves"]["deep/fast"]["low"]


def test_only_options_that_differ_are_listed(pages: Pages) -> None:
    found = pages.differences({"runs": "grpo-s0,grpo-s1,deep/fast"})
    assert found["groups"] == ["deep/fast", "grpo"]
    assert {row["option"]: row["values"] for row in found["rows"]} == {
        "train.seed": ["0", "0, 1"],
        "train.learning_rate": ["0.5", "0.001"],
    }


def test_every_filter_chooses_by_what_it_says(pages: Pages) -> None:
    for query, ids in (
        ({}, [4, 3, 2, 1]),
        ({"stop_reason": "max_turns"}, [3]),
        ({"reward_from": "0", "reward_to": "0.5"}, [3, 2]),
        ({"success": "yes"}, [1]),
        ({"task": "t2"}, [4]),
        ({"phase": "eval"}, []),
        ({"step_to": "3"}, []),
        ({"order": "best"}, [1, 3, 2, 4]),
        ({"order": "longest", "size": "1"}, [1]),
        ({"first": "2", "size": "1"}, [2]),
    ):
        for run in ("grpo-s0", ""):  # one run, and all of them
            answer = pages.attempts({"run": run, **query})
            assert [row["id"] for row in answer["rows"]] == ids, (run, query)
    with pytest.raises(ConfigError, match="step_from='x'; expected a number"):
        pages.attempts({"run": "grpo-s0", "step_from": "x"})


def test_a_world_is_chosen_among_runs_and_inside_a_run_that_mixes_worlds(tmp_path: Path) -> None:
    mixed = ("guess_number/t1", "key_door/t1", "key_door/t2")
    plays = [Play(task_id=name, attempt=0, replies=("8",)) for name in mixed]
    WrittenRun(plays=plays, overrides=["env.mix=guess_number=1,key_door=1"]).write(tmp_path / "both")
    WrittenRun(plays=PLAYS).write(tmp_path / "one")
    pages = Pages(tmp_path)
    runs = {run["name"]: run["worlds"] for run in pages.runs({})["runs"]}
    assert runs == {"both": ["guess_number", "key_door"], "one": ["guess_number"]}
    for query, found in (
        ({"world": "key_door"}, {"both": 2}),
        ({"world": "guess_number"}, {"both": 1, "one": 4}),
        ({"run": "both", "world": "key_door"}, {"both": 2}),
        ({"run": "both"}, {"both": 3}),
        ({"run": "one", "world": "key_door"}, {}),
    ):
        rows = pages.attempts(query)["rows"]
        assert Counter(row["run"] for row in rows) == found, query
        assert pages.groups(query)["total"] == len({(row["run"], row["task_id"]) for row in rows}), query
        counted = eventually(pages.facets, query, lambda answer: answer["is_complete"])
        assert sum(counted["phase"].values()) == len(rows), query
    assert pages.attempts({"run": "both", "world": "key_door", "task": "t1"})["total"] == 1
    pages.close()


def test_pictures_stand_where_they_were_seen_and_what_an_opponent_said_is_no_label(tmp_path: Path) -> None:
    labels = {"screenshot.0": PICTURE, "screenshot.2": PICTURE, "opponent": "base", "opponent_said": '["Hi"]'}
    WrittenRun(plays=[Play(task_id="t1", attempt=0, replies=("8", "4"), labels=labels)]).write(tmp_path / "run")
    pages = Pages(tmp_path)
    attempt = pages.attempt({"run": "run", "id": "1"})
    pages.close()
    assert attempt["labels"] == {"opponent": "base"}
    assert attempt["start"][-1]["images"] == [PICTURE]
    assert ["images" in turn["observation"][-1] for turn in attempt["turns"]] == [False, True]


def test_the_group_of_a_seat_has_no_attempt_of_the_other_seat(tmp_path: Path) -> None:
    plays = [Play(task_id="t1", attempt=i, replies=("8",), labels={"seat": str(i % 2)}) for i in range(4)]
    WrittenRun(plays=plays).write(tmp_path / "run")
    pages = Pages(tmp_path)
    assert [one["id"] for one in pages.group({"run": "run", "id": "2"})["attempts"]] == [2, 4]
    pages.close()


def test_words_are_found_in_replies_answers_and_tool_calls(pages: Pages) -> None:
    for text, ids in (
        ("paris", [1]),
        ("rains par", [1]),
        ("weather", [1]),
        ("12", [3]),
        ("search", [1]),
        ('"x OR', []),
    ):
        answer = eventually(pages.attempts, {"run": "grpo-s0", "text": text}, lambda found: found["num_searched"] == 4)
        assert [row["id"] for row in answer["rows"]] == ids, text


def test_a_list_follows_a_run_that_was_resumed_and_gave_ids_to_others(pages: Pages) -> None:
    directory = pages.directory("grpo-s0")
    query = {"run": "grpo-s0", "text": "banana"}
    eventually(pages.attempts, query, lambda found: found["num_searched"] == 4)
    writer = RunWriter.reopen(directory, max_size_mb=500)
    writer.forget_after(3, warmup_steps=0, critic_batches=0)
    writer.attempts(4, "train", [Play(task_id="t3", attempt=0, replies=("banana",), reward=1.0).record()])
    writer.commit(4)
    writer.close()
    assert [row["task_id"] for row in pages.attempts({"run": "grpo-s0"})["rows"]] == ["t3"]
    found = eventually(pages.attempts, query, lambda found: found["total"] == 1)
    assert [(row["id"], row["task_id"]) for row in found["rows"]] == [(1, "t3")]
    assert pages.attempts({"run": "grpo-s0", "text": "paris"})["total"] == 0


def test_a_group_is_a_tree_that_parts_where_its_attempts_do(pages: Pages) -> None:
    found = pages.group({"run": "grpo-s0", "id": "2"})
    assert [one["id"] for one in found["attempts"]] == [1, 2, 3]
    nodes = [(node["parent"], node["turn"], node["attempts"]) for node in found["nodes"]]
    # Attempt 1 gets another answer after its first turn, so it shares that turn only.
    assert nodes == [(None, 0, [1, 2, 3]), (0, 1, [1]), (1, 2, [1]), (0, 1, [2]), (3, 2, [2]), (0, 1, [3])]
    groups = pages.groups({"run": "grpo-s0", "reward_from": "0.9"})["groups"]
    assert [(group["task_id"], len(group["attempts"])) for group in groups] == [("t1", 3)]


def test_an_attempt_has_every_number_of_every_token(pages: Pages) -> None:
    attempt = pages.attempt({"run": "grpo-s0", "id": "1"})
    turn = attempt["turns"][2]
    assert turn["reply"]["tool_calls"] == [{"name": "search", "arguments": {"query": "weather"}}]
    assert turn["reward_parts"] == {"outcome": 1.0, "format": 0.0}
    tokens = turn["tokens"]
    assert {len(tokens[name]) for name in ("ids", "texts", "sampler", "trainer", "advantage", "mask", "value")} == {12}
    assert (tokens["trainer"][0], tokens["advantage"][0], tokens["mask"][0]) == (-0.2, 0.5, True)
    assert tokens["value"][-1] == 1.0
    assert attempt["task"] == {"secret": 5}
    with pytest.raises(DataError, match="no attempt 99"):
        pages.attempt({"run": "grpo-s0", "id": "99"})


def test_an_attempt_that_was_dropped_to_keep_the_file_small_says_so(tmp_path: Path) -> None:
    long = Play(task_id="t1", attempt=0, replies=("word " * 40_000,))
    WrittenRun(plays=[long]).write(tmp_path / "run")
    writer = RunWriter.reopen(tmp_path / "run", max_size_mb=0)
    writer.commit(4)
    writer.close()
    pages = Pages(tmp_path / "run")
    attempt = pages.attempt({"run": "run", "id": "1"})
    pages.close()
    assert attempt["turns"] == []
    assert "dropped to keep run.max_size_mb" in attempt["missing"][0]


def test_a_run_tells_its_plan_and_what_can_be_steered(pages: Pages) -> None:
    run = pages.run({"run": "grpo-s0"})
    assert run["plan"].startswith("world        guess_number")
    assert run["settings"]["train.steps"] == 4
    metric = next(one for one in run["metrics"] if one["name"] == "time/env_share")
    assert (metric["unit"], metric["x"]) == ("share", [1, 2, 3, 4])
    with pytest.raises(ConfigError, match="did you mean 'grpo-s"):
        pages.run({"run": "grpo-s"})


def test_findings_are_the_doctors_and_how_the_run_ended(pages: Pages) -> None:
    directory = pages.directory("grpo-s1")
    before = pages.findings({"run": "grpo-s1"})["findings"]
    writer = RunWriter.reopen(directory, max_size_mb=500)
    writer.metrics(4, {"train/kl_sampler_trainer_k2": 3.0})
    writer.event(4, "failed", error="the disk is full")
    writer.commit(4)
    writer.close()
    found = {one["title"]: one for one in pages.findings({"run": "grpo-s1"})["findings"]}
    new = {title: one for title, one in found.items() if one not in before}
    assert new["the run failed at step 4"]["text"] == "the disk is full"
    assert any("KL(sampler || trainer)" in one["text"] and one["fixes"] for one in new.values())


def test_an_index_that_is_damaged_is_made_anew(pages: Pages, turnwise_home: Path) -> None:
    eventually(pages.facets, {"run": "grpo-s0"}, lambda found: found["is_complete"])
    for file in (turnwise_home / "view").iterdir():
        file.write_bytes(b"this is no database" * 500)
    again = Pages(pages.folder.place)
    assert [row["id"] for row in again.attempts({"run": "grpo-s0"})["rows"]] == [4, 3, 2, 1]
    eventually(again.facets, {"run": "grpo-s0"}, lambda found: found["is_complete"])
    again.close()
