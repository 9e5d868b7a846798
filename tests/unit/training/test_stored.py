"""Stored data: what may be learned from, what is left out and counted, and what is refused up front."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from turnwise.cli import main
from turnwise.config.files import config_to_yaml, load_config
from turnwise.credit.datums import num_trained_tokens
from turnwise.credit.preferences import PreferencePair
from turnwise.envs.base import Task
from turnwise.envs.listed import ListedTask, write_tasks
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError
from turnwise.models.facts import read_facts
from turnwise.renderers import Renderer
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import DATABASE, AttemptRecord, Phase
from turnwise.runlog.writer import RunWriter
from turnwise.training.assemble import assemble
from turnwise.training.pairs import StoredPair, read_pairs, write_pairs
from turnwise.training.pretrain import Batches
from turnwise.training.supply import Supply
from turnwise.trajectory import Trajectory, Turn
from turnwise.watch.watchdog import Watchdog
from unit.credit.branches import make_branches, make_continuation
from unit.credit.groups import make_attempt

pytestmark = pytest.mark.usefixtures("tiny_dir")

Row = tuple[Phase, int, Trajectory]


def write_run(directory: Path, rows: Iterable[Row], *overrides: str, preset: str = "key_door") -> str:
    """A run with `tiny` that played these attempts: (phase, step, trajectory)."""
    config = load_config(preset, ["model=tiny", *overrides])
    writer = RunWriter.create(directory, config_to_yaml(config), max_size_mb=8)
    for phase, step, trajectory in rows:
        writer.task(trajectory.task_id, phase, {})
        writer.attempts(step, phase, [AttemptRecord(trajectory=trajectory, outcome="trained")])
    writer.commit(1)
    writer.close()
    return str(directory)


def as_older_turnwise(directory: str) -> None:
    """What the attempts of a run look like that was begun before they were stored as played."""
    database = sqlite3.connect(Path(directory) / DATABASE)
    database.execute("UPDATE trajectories SET is_as_played = NULL")
    database.commit()
    database.close()


def masked(trajectory: Trajectory, *turns: int) -> Trajectory:
    """The same with these turns left out of the loss."""

    def leave_out(index: int, turn: Turn) -> Turn:
        return replace(turn, is_trained=index not in turns)

    return replace(trajectory, turns=tuple(leave_out(i, turn) for i, turn in enumerate(trajectory.turns)))


def make_pairs(run: str, out: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[StoredPair], str]:
    assert main(["pairs", run, "--stored", "--kind", kind, "--out", str(out)]) == 0
    return read_pairs(out), capsys.readouterr().out


async def items_of(renderer: Renderer, tiny_dir: Path, *overrides: str, count: int) -> Sequence[Any]:
    """What the steps of a run learn from, `count` at a time."""
    config = load_config("key_door", ["model=tiny", f"train.tasks_per_step={count}", *overrides])
    supply = Supply(assemble(config, read_facts(tiny_dir)), renderer, Watchdog())
    await supply.check()
    return (await supply.batch(0)).items


async def test_sft_imitates_successes_of_training_and_never_of_an_evaluation(
    tmp_path: Path, renderer: Renderer, tiny_dir: Path
) -> None:
    def attempt(size: int, *, is_success: bool = True) -> Trajectory:
        return make_attempt([1.0], sizes=[size], is_success=is_success)

    rows: list[Row] = [
        ("eval", 0, attempt(2)),
        ("train", 1, attempt(3)),
        ("train", 1, attempt(4, is_success=False)),
        ("train", 2, attempt(5)),
        ("eval", 2, attempt(6)),
    ]
    run = write_run(tmp_path / "run", rows)
    items = await items_of(renderer, tiny_dir, "method=sft", f"data.dialogues={run}", count=8)
    sizes = {round(sum(datum.loss_fn_inputs["mask"].data)) for item in items for datum in item.datums}
    assert sizes == {3, 5}
    only_held_out = write_run(tmp_path / "held_out", [("eval", 0, attempt(2))])
    with pytest.raises(ConfigError, match="no success of its training"):
        await items_of(renderer, tiny_dir, "method=sft", f"data.dialogues={only_held_out}", count=8)


async def test_nothing_is_learned_from_a_task_that_a_file_holds_out(
    tmp_path: Path, renderer: Renderer, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stored run trained on the world's own split; the file has another one, and another id for a task."""
    *tasks, fourth = get_world("key_door").tasks("train", 4, 0)
    listed, held_out = tmp_path / "tasks.jsonl", [tasks[1], replace(tasks[2], id="renamed")]
    own = ["model=tiny", f"env.tasks={listed}"]

    def hold_out(held_out: Sequence[Task], train: Task) -> None:
        test = [ListedTask(task=one, split="test") for one in held_out]
        write_tasks(listed, [ListedTask(task=train, split="train"), *test])

    def attempts(index: int) -> list[Trajectory]:
        """A bad one and a good one; a reply has as many tokens as no other attempt."""
        made = [
            make_attempt([float(good)], attempt=good, sizes=[2 * index + good + 1], is_success=bool(good))
            for good in (0, 1)
        ]
        return [replace(one, task_id=tasks[index].id, seed=3) for one in made]

    run = write_run(tmp_path / "run", [("train", 1, one) for index in range(3) for one in attempts(index)])
    database = sqlite3.connect(tmp_path / "run" / DATABASE)
    database.executemany("UPDATE tasks SET data = ? WHERE id = ?", [(json.dumps(dict(t.data)), t.id) for t in tasks])
    database.commit()
    database.close()
    hold_out(held_out, tasks[0])
    items = await items_of(renderer, tiny_dir, *own, "method=sft", f"data.dialogues={run}", count=3)
    assert {num_trained_tokens(datum) for item in items for datum in item.datums} == {2}
    config = load_config("key_door", [*own, "method=ppo", f"critic.pretrain_from={run}"])
    batches = Batches(assemble(config, read_facts(tiny_dir)), renderer, run)
    studied = await batches.batch(0, None)  # type: ignore[arg-type] - nothing is sampled
    assert {one.task_id for one in studied.trajectories} == {tasks[0].id}
    make_pairs(run, tmp_path / "pairs", "dpo", capsys)
    config = load_config("key_door", [*own, "method=dpo", f"data.pairs={tmp_path / 'pairs'}"])
    supply = Supply(assemble(config, read_facts(tiny_dir)), renderer, Watchdog())
    await supply.check()
    assert {pair.chosen.task_id for pair in (await supply.batch(0)).items} == {tasks[0].id}
    assert supply.left_out is not None
    assert supply.left_out.numbers == {"left_out": 2}
    hold_out(tasks, fourth)
    with pytest.raises(ConfigError, match="nothing to imitate; 3 are at tasks that this run holds out"):
        await items_of(renderer, tiny_dir, *own, "method=sft", f"data.dialogues={run}", count=1)


async def test_sft_imitates_only_the_turns_of_a_success_that_its_run_trained(
    tmp_path: Path, renderer: Renderer, tiny_dir: Path
) -> None:
    success = make_attempt([0.0, 0.0, 1.0], sizes=[2, 3, 5], is_success=True)
    only_masked = masked(make_attempt([1.0], sizes=[7], is_success=True), 0)
    run = write_run(tmp_path / "run", [("train", 1, masked(success, 0, 1)), ("train", 1, only_masked)])
    items = await items_of(renderer, tiny_dir, "method=sft", f"data.dialogues={run}", count=8)
    trained = {tuple(num_trained_tokens(datum) for datum in item.datums) for item in items}
    assert trained == {(5,)}, "two turns of the success and the whole other attempt were left out of the loss"


def test_a_pair_with_a_side_that_no_loss_reads_is_counted_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*branched: Trajectory) -> list[Row]:
        """Each pair in a step of its own."""
        return [("train", 1 + index // 2, one) for index, one in enumerate(branched)]

    good = make_branches([0.0, 1.0], turn=1).trajectories
    worse_is_masked = (masked(good[0], 0, 1, 2, 3), good[1])
    branch_is_masked = (good[0], masked(good[1], 1))
    run = write_run(tmp_path / "run", rows(*good, *worse_is_masked, *branch_is_masked))
    found, said = make_pairs(run, tmp_path / "dpo", "dpo", capsys)
    assert [one.step for one in found] == [1, 3], "dpo trains the other turns of the third"
    assert "left out: 1 masked" in said
    found, said = make_pairs(run, tmp_path / "refuel", "refuel", capsys)
    assert [one.step for one in found] == [1]
    assert "left out: 2 masked" in said


def test_attempts_in_other_seats_or_against_other_opponents_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def attempt(number: int, reward: float, seed: int, **labels: str) -> Trajectory:
        one = make_attempt([reward], attempt=number, sizes=[number + 1])
        turn = replace(one.turns[0], prompt_ids=(1, int(labels.get("seat", "0"))))
        return replace(one, seed=seed, turns=(turn,), labels=labels)

    seats = [attempt(i, reward, 7, seat=str(i % 2), opponent="self") for i, reward in enumerate((0.9, 0.1, 0.7, 0.3))]
    run = write_run(tmp_path / "seats", [("train", 1, one) for one in seats])
    found, said = make_pairs(run, tmp_path / "seats.parquet", "dpo", capsys)
    assert sorted((one.pair.chosen.total_reward, one.pair.rejected.total_reward) for one in found) == [
        (0.3, 0.1),
        (0.9, 0.7),
    ]
    assert "left out" not in said
    rewards = ((0.9, "base"), (0.8, "base"), (0.2, "tough"), (0.1, "tough"))
    met = [attempt(i, reward, i, opponent=opponent) for i, (reward, opponent) in enumerate(rewards)]
    run = write_run(tmp_path / "pool", [("train", 1, one) for one in met])
    assert main(["pairs", run, "--stored", "--across-seeds", "--out", str(tmp_path / "pool.parquet")]) == 0
    pairs = read_pairs(tmp_path / "pool.parquet")
    assert {one.opponent: one.pair.reward_difference for one in pairs} == pytest.approx({"base": 0.1, "tough": 0.1})


def test_the_printed_command_evaluates_on_the_games_that_were_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = [("train", 1, make_attempt([one], sizes=[size])) for one, size in ((0.0, 2), (1.0, 3))]
    rows = [(phase, step, replace(one, seed=0)) for phase, step, one in rows]
    for number, (preset, options) in enumerate(
        [
            ("study_negotiate", ["env.options.num_issues=3", "env.options.opponent=tough"]),
            ("study_negotiate", ["env.options.opponent=base", "env.difficulty=1"]),
            ("negotiate", []),
        ]
    ):
        run = write_run(tmp_path / str(number), rows, *options, preset=preset)
        _, said = make_pairs(run, tmp_path / f"{number}.parquet", "dpo", capsys)
        printed = said.split("learn from it: turnwise train ")[1].split()
        learns, played = load_config(printed[0], printed[1:]).env, load_config(preset, options).env
        if "base" in played.options.values():  # learning from a file needs no other model
            played = played.model_copy(update={"options": {**played.options, "opponent": learns.options["opponent"]}})
        assert get_world(learns.name, **learns.options) == get_world(played.name, **played.options), printed
        assert learns.difficulty == played.difficulty
        assert options or not any(word.startswith("env.") for word in printed), "nothing differs"
    elsewhere = write_run(tmp_path / "elsewhere", rows, preset=str(tmp_path / "gone.py:World"))
    assert "gone.py:World model=tiny method=dpo" in make_pairs(elsewhere, tmp_path / "e.parquet", "dpo", capsys)[1]


def test_refuel_pairs_that_say_the_same_where_they_part_are_counted_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = [make_continuation(i, float(i), turn=1, replies=[70, 71]) for i in range(2)]
    other = make_branches([0.0, 1.0], turn=1).trajectories
    assert same[0].turns[2].sampled_ids != same[1].turns[2].sampled_ids, "they go on differently"
    rows: list[Row] = [*(("train", 1, one) for one in same), *(("train", 2, one) for one in other)]
    run = write_run(tmp_path / "run", rows)
    found, said = make_pairs(run, tmp_path / "refuel", "refuel", capsys)
    assert [one.step for one in found] == [2]
    assert "left out: 1 identical" in said
    found, _ = make_pairs(run, tmp_path / "dpo", "dpo", capsys)
    assert [one.step for one in found] == [1, 2], "whole dialogues differ"


def test_refuel_pairs_of_many_continuations_differ_by_as_much_as_two_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Best against worst of eight would differ by 7/9 in the mean, where any two do by 1/3."""
    draw, groups = random.Random(0), 150
    rewards = [[draw.random() for _ in range(8)] for _ in range(groups)]
    drawn = [
        [replace(one, seed=step) for one in make_branches(own, turn=1).trajectories] for step, own in enumerate(rewards)
    ]
    run = write_run(tmp_path / "run", [("train", step, one) for step, group in enumerate(drawn) for one in group])
    found, _ = make_pairs(run, tmp_path / "refuel", "refuel", capsys)
    assert len(found) == 4 * groups, "every continuation is in one pair"
    used = {(one.step, side.attempt) for one in found for side in (one.pair.chosen, one.pair.rejected)}
    assert len(used) == 8 * groups
    assert fmean(one.pair.reward_difference for one in found) == pytest.approx(1 / 3, abs=0.03)
    assert make_pairs(run, tmp_path / "again", "refuel", capsys)[0] == found, "the lot is the same every time"
    odd = write_run(
        tmp_path / "odd", [("train", 1, one) for one in make_branches([0.0, 1.0, 2.0], turn=1).trajectories]
    )
    found, said = make_pairs(odd, tmp_path / "odd.parquet", "refuel", capsys)
    assert len(found) == 1
    assert "1 left over" in said


def test_a_file_with_pairs_that_cannot_be_trained_is_refused_before_anything_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make_branches([0.0, 1.0], turn=1).trajectories, tmp_path / "bad.parquet"

    def file(kind: str, *rejected: Trajectory) -> None:
        pairs = [PreferencePair(chosen=good[1], rejected=one, branch_turn=1) for one in rejected]
        write_pairs(bad, [StoredPair(pair=one, kind=kind, world="key_door", model="tiny", task={}) for one in pairs])  # type: ignore[arg-type]

    def train(method: str) -> str:
        command = ["train", "key_door", "model=tiny", f"method={method}", f"data.pairs={bad}", "--plan"]
        return capsys.readouterr().err if main(command) else ""

    file("refuel", good[0], masked(good[0], 0, 1, 2, 3))
    assert "1 of 2 pairs, the first in row 1, have a side with nothing to train in any turn" in train("dpo")
    file("refuel", masked(good[0], 1))
    assert "nothing to train at the turn where they part; method=refuel" in train("refuel")
    assert train("dpo") == "", "it trains the other turns"
    file("dpo", good[0])
    assert "holds the best against the worst" in train("refuel")
    assert train("dpo") == ""


async def test_a_critic_credits_stored_attempts_as_its_own_run_does(
    tmp_path: Path, renderer: Renderer, tiny_dir: Path
) -> None:
    played = make_attempt([0.5, 1.0], potentials=[0.0, 0.25, 0.5])
    run = write_run(tmp_path / "run", [("train", 1, played), ("eval", 1, played)], "reward.weights.outcome=3")

    async def credited(*overrides: str) -> list[list[float]]:
        config = load_config("key_door", ["model=tiny", "method=ppo", f"critic.pretrain_from={run}", *overrides])
        parts = assemble(config, read_facts(tiny_dir))
        batches = Batches(parts, renderer, config.critic.pretrain_from)
        stored = await batches.batch(0, None)  # type: ignore[arg-type] - nothing is sampled
        return [[turn.reward for turn in one.turns] for one in stored.trajectories[:1]]

    assert await credited() == [[0.5, 1.0]]
    assert await credited("reward.weights.outcome=2") == [[1.0, 2.0]]
    shaped = await credited("reward.potential=true", "method.gamma=1")
    assert shaped == [pytest.approx([0.75, 0.75])]
    as_older_turnwise(run)
    assert await credited("reward.weights.outcome=3") == [[0.5, 1.0]], "it has been shaped like that already"
    with pytest.raises(ConfigError, match="written by an older turnwise, with its rewards shaped"):
        await credited()


def test_a_run_of_an_older_turnwise_gives_only_pairs_that_its_method_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_branches([0.0, 1.0], turn=1).trajectories
    rows: list[Row] = [("train", 1, masked(one, 0, 2, 3)) for one in good]
    run = write_run(tmp_path / "run", rows, "method=la_grpo")
    as_older_turnwise(run)
    assert main(["pairs", run, "--stored", "--kind", "dpo", "--out", str(tmp_path / "p")]) == 2
    assert "stored the method's own mask in place of what was played" in capsys.readouterr().err
    found, _ = make_pairs(run, tmp_path / "refuel", "refuel", capsys)
    assert len(found) == 1, "the turn that refuel trains is the turn that la_grpo trained"
    with RunReader(run) as reader:
        assert reader.attempts()[0].is_as_played is False


MIX = "env.mix={doors: {name: key_door}, guess: {name: guess_number}}"


def _mixed_run(directory: Path) -> str:
    def attempt(task: str, size: int, index: int) -> Row:
        one = make_attempt([float(index % 2)], attempt=index, sizes=[size], is_success=True)
        return "train", 1, replace(one, task_id=task, seed=3)

    rows = [attempt("doors/a", 2, 0), attempt("doors/a", 3, 1), attempt("guess/a", 4, 0), attempt("guess/a", 5, 1)]
    return write_run(directory, rows, MIX)


async def test_one_world_of_a_mixed_run_can_be_imitated_alone(
    renderer: Renderer, tiny_dir: Path, tmp_path: Path
) -> None:
    run = _mixed_run(tmp_path / "run")
    found = await items_of(renderer, tiny_dir, "method=sft", f"data.dialogues={run}", "data.world=doors", count=4)
    assert {num_trained_tokens(datum) for item in found for datum in item.datums} == {2, 3}
    for options, told in (
        ([f"data.dialogues={run}"], "env.name=mix of guess_number, key_door"),
        ([f"data.dialogues={run}", "data.world=guess"], "env.name=guess_number"),
        ([f"data.dialogues={run}", "data.world=other"], "no member 'other' in this run's mix; there are: doors, guess"),
        (["data.world=doors"], "set data.dialogues to a run directory too"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            await items_of(renderer, tiny_dir, "method=sft", *options, count=1)


def test_pairs_of_one_world_of_a_mixed_run(tmp_path: Path) -> None:
    run, out = _mixed_run(tmp_path / "run"), tmp_path / "pairs.parquet"
    assert main(["pairs", run, "--stored", "--out", str(out), "--world", "doors"]) == 0
    assert [(one.world, one.pair.chosen.task_id) for one in read_pairs(out)] == [("key_door", "doors/a")]
    assert main(["pairs", run, "--stored", "--out", str(out)]) == 0
    assert [one.pair.chosen.task_id for one in read_pairs(out)] == ["doors/a", "guess/a"]
