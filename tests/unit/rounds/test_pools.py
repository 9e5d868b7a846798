"""What goes into which pool, which tasks are played, and what the file refuses; no model is loaded."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cases import for_each
from e2e.parity_world import ParityWorld
from turnwise.cli import main
from turnwise.config.files import load_config
from turnwise.envs.base import Split, Task, assistant, user
from turnwise.envs.listed import ListedTask, write_tasks
from turnwise.errors import ConfigError
from turnwise.rounds.config import FlywheelConfig, FlywheelFile, read_file
from turnwise.rounds.dial import LevelTasks, TaskDial
from turnwise.rounds.export import pool_rows, write_pool
from turnwise.rounds.flywheel import flywheel
from turnwise.rounds.route import route
from turnwise.rounds.store import AttemptVerdict, PoolStore
from turnwise.training.objects import NO_OBJECTS, PythonObjects
from turnwise.training.stored import HeldOutTasks, own_task, read_critic_attempts, read_file_dialogues, world_words
from turnwise.trajectory import EndReason, Trajectory, TrajectoryGroup, Turn

WORDS = {"red": 11, "blue": 12, "green": 13}


def _trajectory(task: str, attempt: int, words: str, *, is_success: bool) -> Trajectory:
    """Two turns: a word, the world's answer (ids 5 and 6), and another word."""
    first, second = (WORDS[word] for word in words.split())
    turns = []
    for ids, word in (((1, 2), first), ((1, 2, first, 5, 6), second)):
        text = next(name for name, number in WORDS.items() if number == word)
        turns.append(
            Turn(
                prompt_ids=ids,
                sampled_ids=(word,),
                sampler_logprobs=(-0.5,),
                policy_version=0,
                reply=assistant(text),
                observation=(user("and?"),) if word == first else (),
                reward_parts={"outcome": float(is_success) if len(ids) > 2 else 0.0},
            )
        )
    return Trajectory(
        task_id=task,
        attempt=attempt,
        seed=7,
        start=(user("go"),),
        turns=tuple(turns),
        end_reason=EndReason.TERMINATED,
        is_success=is_success,
    )


def _store(tmp_path: Path) -> PoolStore:
    meta = {"world": "key_door", "base_model": "tiny"}
    return PoolStore.create(tmp_path / "wheel", meta)


def _play(store: PoolStore, number: int, task: str, replies: dict[str, bool]) -> None:
    trajectories = [_trajectory(task, i, words, is_success=good) for i, (words, good) in enumerate(replies.items())]
    store.add_group(number, "a checkpoint", TrajectoryGroup(task_id=task, trajectories=tuple(trajectories)))
    judged = store.attempts("a.round = ? AND v.attempt_id IS NULL", number)
    store.add_verdicts([_verdict(one.id, is_good=bool(one.is_success)) for one in judged])


def _verdict(attempt_id: int, *, is_good: bool) -> AttemptVerdict:
    return AttemptVerdict(attempt_id=attempt_id, source="verifier", score=float(is_good), is_good=is_good)


def _tasks(*names: str) -> list[ListedTask]:
    return [ListedTask(task=Task(id=name, data={"n": name}), split="train", difficulty=0) for name in names]


def test_attempts_are_routed_by_their_verdict_and_what_was_said_before_goes_nowhere(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.add_tasks(_tasks("mixed", "solved", "lost"), 1)
        _play(store, 1, "mixed", {"red red": True, "red blue": False, "blue red": True, "blue blue": False})
        _play(store, 1, "solved", {"red red": True, "blue blue": True})
        _play(store, 1, "lost", {"red red": False, "blue blue": False})
        _play(store, 2, "mixed", {"red red": True, "green red": True})
        options = FlywheelConfig(best_per_task=1, continued_steps=1)
        first = route(store.attempts("a.round = 1"), options)
        name = {one.id: (one.task_id, one.trajectory.attempt) for one in store.attempts()}
        assert [name[one] for one in first.sft] == [("mixed", 0), ("solved", 0)]
        assert first.rl == [("mixed", 0.5)]
        assert [(name[a], name[b]) for a, b in first.preference] == [(("mixed", 0), ("mixed", 3))]
        assert sorted(name[one] for one in first.continued) == [("lost", 0), ("lost", 1), ("mixed", 1), ("mixed", 3)]
        second = route(store.attempts("a.round = 2"), options)
        assert second.num_duplicates == 1
        assert len(second.sft) == 1, "what the first round said is not learned twice"
        plain = route(store.attempts("a.round = 1"), FlywheelConfig(routing=False))
        assert (len(plain.sft), plain.rl, plain.preference) == (4, [], [])


def test_a_pool_is_filtered_and_exported_with_its_provenance_and_can_be_learned_from(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.add_tasks(_tasks("mixed"), 1)
        _play(store, 1, "mixed", {"red red": True, "red blue": False, "blue red": True})
        with store.transaction():
            store.insert("sft", [(1, 1), (3, 1)])
            store.insert("continued", [(2, 1)])
        assert write_pool(store, "sft", tmp_path / "sft.jsonl", "attempt = 2") == 1
        (row,) = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
        kept = {key: row[key] for key in ("round", "model", "task_id", "attempt", "verdict", "score", "is_good")}
        assert kept == {
            "round": 1,
            "model": "a checkpoint",
            "task_id": "mixed",
            "attempt": 2,
            "verdict": "verifier",
            "score": 1.0,
            "is_good": 1,
        }
        assert [one["content"] for one in row["messages"]] == ["go", "blue", "and?", "red"]
        write_pool(store, "continued", tmp_path / "continued.jsonl")
        with pytest.raises(ConfigError, match="no such column"):
            list(pool_rows(store, "sft", "colour = 1"))
    config = read_file("key_door_tiny", ["model=tiny"]).run
    (replies,) = read_file_dialogues(str(tmp_path / "sft.jsonl"), config, HeldOutTasks(config))
    (datum,) = replies.datums
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 1, 0, 0, 1], "the replies, and nothing else"
    (words,) = read_file_dialogues(str(tmp_path / "continued.jsonl"), config, HeldOutTasks(config))
    (datum,) = words.datums
    assert datum.loss_fn_inputs["mask"].tolist() == [0, 0, 1, 1], "the world's words, and not the failed replies"
    other = read_file("key_door_tiny", ["env=guess_number"]).run
    with pytest.raises(ConfigError, match=r"was played with env\.name=key_door"):
        read_file_dialogues(str(tmp_path / "sft.jsonl"), other, HeldOutTasks(other))
    held_out = HeldOutTasks(config, [Task(id="mixed")])
    with pytest.raises(ConfigError, match="holds nothing to learn from; 1 are at tasks that this run holds out"):
        read_file_dialogues(str(tmp_path / "sft.jsonl"), config, held_out)
    weighed = read_file("key_door_tiny", ["reward.weights.outcome=2"]).run
    (lesson,) = read_critic_attempts(str(tmp_path / "sft.jsonl"), weighed, HeldOutTasks(weighed))
    assert [turn.reward for turn in lesson.turns] == [0, 2], "a critic learns what this run's attempts would earn"
    with pytest.raises(ConfigError, match=r"critic\.pretrain_from=.* line 1 was played with env\.name=key_door"):
        read_critic_attempts(str(tmp_path / "sft.jsonl"), other, HeldOutTasks(other))


def test_a_history_that_was_rewritten_has_no_words_of_the_world_to_learn() -> None:
    one = _trajectory("t", 0, "red blue", is_success=False)
    assert world_words(one) == [((1, 2, 11), (5, 6))]
    rewritten = replace(one, turns=(one.turns[0], replace(one.turns[1], prompt_ids=(9, 9))))
    assert world_words(rewritten) == []


def test_the_database_refuses_a_held_out_task_by_id_and_by_content(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.add_held_out([ListedTask(task=Task(id="a", data={"n": 1}), split="test")])
        for leak in (Task(id="a", data={"n": 2}), Task(id="b", data={"n": 1})):
            with pytest.raises(sqlite3.IntegrityError, match="held-out"):
                store.add_tasks([ListedTask(task=leak, split="train")], 1)


def _dial(store: PoolStore, **options: object) -> tuple[TaskDial, FlywheelFile]:
    file = read_file("key_door_tiny", [f"flywheel.{key}={json.dumps(value)}" for key, value in options.items()])
    return TaskDial(store, LevelTasks(config=file.run, objects=NO_OBJECTS), file.flywheel), file


def _judge_all(store: PoolStore, number: int, *, is_good: bool) -> None:
    for one in store.active_tasks():
        if one.task.id not in store.played_tasks(number):
            words = {"red red": is_good, "blue blue": is_good}
            _play(store, number, one.task.id, words)


def test_the_dial_rises_when_a_level_is_solved_and_never_proposes_a_task_twice(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        dial, _ = _dial(store, tasks=6, eval_tasks=4, eval_levels=[0, 1, 2])
        dial.hold_out()
        assert dial.begin() == 6
        _judge_all(store, 1, is_good=False)
        stuck = dial.turn(1, store.attempts("a.round = 1"))
        assert (stuck["retired"], stuck["proposed"], stuck["level"]) == (0, 0, 0)
        _judge_all(store, 2, is_good=True)
        solved = dial.turn(2, store.attempts("a.round = 2"))
        assert (solved["retired"], solved["proposed"], solved["level"]) == (6, 6, 1)
        assert {one.difficulty for one in store.active_tasks()} == {1}
        ids = [row["id"] for row in store.query("SELECT id FROM tasks")]
        assert len(ids) == len(set(ids)) == 12
        assert not set(ids) & {one.task.id for one in store.held_out()}


def test_without_a_verdict_nothing_is_solved_so_no_task_is_retired_and_the_level_stays(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        dial, _ = _dial(store, tasks=6, eval_tasks=4, verdict="none")
        dial.hold_out()
        dial.begin()
        _judge_all(store, 1, is_good=True)
        turned = dial.turn(1, store.attempts("a.round = 1"))
        assert (turned["retired"], turned["proposed"], turned["level"]) == (0, 0, 0)


def test_levels_that_share_their_tasks_hold_out_and_propose_each_their_own(tmp_path: Path) -> None:
    """Boards of tic-tac-toe are the same at every level; what differs is the opponent."""
    config, options = load_config("tic_tac_toe"), FlywheelConfig(tasks=4, eval_tasks=3, retire_at=0.5)
    with PoolStore.create(tmp_path / "wheel", {"world": "tic_tac_toe", "base_model": "tiny"}) as store:
        source = LevelTasks(config=config, objects=NO_OBJECTS)
        dial = TaskDial(store, source, options)
        dial.hold_out()
        held_out = store.held_out()
        assert Counter(one.difficulty for one in held_out) == dict.fromkeys(source.levels, 3)
        assert dial.begin() == 4
        for number in (1, 2):
            _judge_all(store, number, is_good=True)
            assert dial.turn(number, store.attempts("a.round = ?", number))["proposed"] == 4
        assert [one.difficulty for one in store.active_tasks()] == [2] * 4
        assert len(store.query("SELECT id FROM tasks")) == 12
        everything = [*store.active_tasks(), *held_out]
    write_tasks(tmp_path / "tasks.jsonl", everything)
    env = config.env.model_copy(update={"tasks": str(tmp_path / "tasks.jsonl")})
    world = NO_OBJECTS.make_world(env, max_turns=0)
    assert all(world.make_env(one.task, 0) for one in everything)
    played = config.model_copy(update={"env": env})
    named = next(one for one in everything if one.task.id.startswith("level"))
    assert own_task(played, named.task.id) == ("tic_tac_toe", named.own_task.id), (
        "an outcome model knows it by its name"
    )


class Unnumbered(ParityWorld):
    """Tasks that are their ids alone."""

    difficulties = ()

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:  # noqa: ARG002
        return [Task(id=f"{split} {number}") for number in range(count)]


def test_tasks_without_data_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        source = LevelTasks(config=load_config("key_door"), objects=PythonObjects(env=Unnumbered()))
        dial = TaskDial(store, source, FlywheelConfig(tasks=4, eval_tasks=3))
        dial.hold_out()
        assert (len(store.held_out()), dial.begin()) == (3, 4)


@for_each(("dial", "levels"), [("fixed", {0}), ("uniform", {0, 1, 2, 3, 4, 5})])
def test_another_dial_does_not_rise(dial: str, levels: set[int], tmp_path: Path) -> None:
    with PoolStore.create(tmp_path / dial, {"world": "key_door", "base_model": "tiny"}) as store:
        wheel, _ = _dial(store, tasks=6, eval_tasks=2, dial=dial)
        wheel.hold_out()
        wheel.begin()
        assert {one.difficulty for one in store.active_tasks()} == levels
        _judge_all(store, 1, is_good=True)
        wheel.turn(1, store.attempts("a.round = 1"))
        assert {one.difficulty for one in store.active_tasks()} == levels


@for_each(
    ("option", "match"),
    [
        ("flywheel.rubric=short", "verdict=judge"),
        ("flywheel.verdict=judge", "needs judge_model"),
        ("flywheel.raise_at=0.2 flywheel.dial=fixed", "not read by dial=fixed"),
        ("flywheel.best_per_task=3 flywheel.routing=false", "best_per_task is not read by routing=false"),
        ("flywheel.threshold=0.3 flywheel.verdict=none", "threshold is not read by verdict=none"),
        ("flywheel.retire_at=0.3 flywheel.verdict=none", "retire_at is not read by verdict=none"),
        ("flywheel.refresh_verdict=2", "refresh_verdict is not read by verdict=verifier"),
        ("flywheel.roundz=3", "did you mean 'rounds'"),
        ("train.stepz=3", "steps"),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(option: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_file("key_door_tiny", option.split())


def test_without_routing_there_are_as_many_steps() -> None:
    whole, plain = FlywheelConfig(sft_steps=5, rl_steps=7), FlywheelConfig(sft_steps=5, rl_steps=7, routing=False)
    assert sum(whole.stage_steps.values()) == sum(plain.stage_steps.values()) == plain.stage_steps["sft"] == 12


@for_each(
    "option",
    [
        "env.tasks=tasks.jsonl",
        "env.difficulty=2",
        "env.options.num_rooms=3",
        "train.steps=7",
        "eval.tasks=5",
        "eval.every=5",
        "eval.keep_best=false",
        "run.dir=elsewhere",
        "cluster.env_workers=2",
    ],
)
def test_an_option_that_a_flywheel_does_not_read_is_refused_before_anything_is_written(
    tmp_path: Path, option: str
) -> None:
    with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} is not read"):
        flywheel("key_door_tiny", directory=tmp_path / "wheel", overrides=[option])
    assert not (tmp_path / "wheel").exists()


@for_each(
    ("option", "match"),
    [
        ("opponent.panel=[mixed]", "opponent.panel is not read: a flywheel plays against scripts"),
        (
            "env.options.opponent=self",
            "opponent=self is a model, and a flywheel plays against scripts.* expected mixed",
        ),
    ],
)
def test_an_opponent_that_is_a_model_is_refused_before_anything_is_spent(
    tmp_path: Path, option: str, match: str
) -> None:
    (tmp_path / "wheel.yaml").write_text("{flywheel: {}, model: tiny, env: {name: negotiate}}")
    with pytest.raises(ConfigError, match=match):
        flywheel(tmp_path / "wheel.yaml", directory=tmp_path / "wheel", overrides=[option])
    assert not (tmp_path / "wheel").exists()


def test_groups_that_could_not_be_played_are_played_again_after_they_are_forgotten(tmp_path: Path) -> None:
    with _store(tmp_path) as store:
        store.add_dropped(1, "a", "failed", "the server is down")
        store.add_dropped(2, "a", "failed", "the server is down")
        store.forget_dropped(1)
        assert (store.played_tasks(1), store.played_tasks(2)) == (set(), {"a"})


def test_pools_are_shown_and_written_to_parquet_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _store(tmp_path) as store:
        store.add_tasks(_tasks("mixed"), 1)
        _play(store, 1, "mixed", {"red red": True, "red blue": False, "blue red": True})
        with store.transaction():
            store.insert("sft", [(1, 1), (3, 1)])
            store.insert("rl", [(1, "mixed", 2 / 3)])
            store.insert("preference", [(1, 2, 1)])
    wheel = str(tmp_path / "wheel")
    written = {pool: tmp_path / f"{pool}.parquet" for pool in ("sft", "rl", "preference")}
    for pool, path in written.items():
        assert main(["pools", wheel, "--pool", pool, "--out", str(path)]) == 0
    rows = {pool: pq.read_table(path).to_pylist() for pool, path in written.items()}
    assert [(row["task_id"], row["attempt"], row["verdict"]) for row in rows["sft"]] == [
        ("mixed", 0, "verifier"),
        ("mixed", 2, "verifier"),
    ]
    assert [(row["task_id"], row["good_share"]) for row in rows["rl"]] == [("mixed", 2 / 3)]
    assert [row["round"] for row in rows["preference"]] == [1]
    capsys.readouterr()
    assert main(["pools", wheel]) == 0
    assert "sft 2, preference 1, rl 1" in capsys.readouterr().out
    assert main(["pools", wheel, "--pool", "sft", "--out", str(tmp_path / "sft.csv")]) == 2
    assert ".parquet" in capsys.readouterr().err
