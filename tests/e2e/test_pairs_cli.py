"""The two steps of offline preference learning through the real command: make pairs, then learn from them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.config.files import config_from_yaml
from turnwise.runlog.reader import RunReader
from turnwise.training.pairs import read_pairs, read_provenance

WORLD = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = ("model=tiny", "eval.tasks=2", "eval.every=0", "run.dialogues=0", "train.tasks_per_step=2")

pytestmark = pytest.mark.usefixtures("tiny_dir")


def turnwise(*arguments: str) -> int:
    return main(list(arguments))


@pytest.mark.parametrize("kind", ["dpo", "refuel"])
def test_pairs_are_played_and_learned_from(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.parquet"
    play = ("pairs", "tiny", "--env", WORLD, "--kind", kind, "--out", str(file))
    assert turnwise(*play, "--tasks", "6") == 0
    said = capsys.readouterr().out
    assert f"{kind} pairs from" in said
    stored = read_pairs(file)
    made = read_provenance(file)
    assert made is not None
    assert f"{made.num_attempts} attempts and {made.num_sampled_tokens:,} sampled tokens" in said
    assert (made.policies, made.samples) == (("tiny",), 8 if kind == "dpo" else 2)
    assert made.turn == ("" if kind == "dpo" else "uniform")
    assert config_from_yaml(made.config, "the file").env.name == WORLD
    assert all(len(one.rest) == (6 if kind == "dpo" else 0) for one in stored), "the other dialogues of a task are kept"
    assert turnwise(*play, "--tasks", "64", "--tokens", "1") == 0
    num_attempts, num_tokens = _told(capsys)
    assert num_attempts == 16 * (8 if kind == "dpo" else 2), "one part of the tasks is enough"
    assert turnwise(*play, "--tasks", "64", "--tokens", str(2 * num_tokens + 1)) == 0
    more_attempts, more_tokens = _told(capsys)
    assert more_attempts >= 2 * num_attempts
    assert more_tokens == pytest.approx(num_tokens * more_attempts / num_attempts, rel=0.3), "none counts twice"
    assert turnwise(*play, "--tasks", "2", "--tokens", "1000000") == 2
    assert "add --tasks" in capsys.readouterr().err
    assert turnwise(*play, "--tasks", "6") == 0
    assert {(one.kind, one.model, one.run) for one in stored} == {(kind, "tiny", "")}
    for one in stored:
        assert one.pair.reward_difference > 0
        assert one.pair.chosen.seed == one.pair.rejected.seed
        assert one.pair.chosen.turns[0].prompt_ids == one.pair.rejected.turns[0].prompt_ids
    run_dir = tmp_path / "run"
    overrides = (*SMALL, f"method={kind}", f"data.pairs={file}", "train.steps=3", f"run.dir={run_dir}")
    assert turnwise("train", WORLD, *overrides) == 0
    with RunReader(run_dir) as run:
        assert [value > 0 for _, value in run.metric("train/grad_norm")] == [True] * 3
        assert run.attempts(phase="train") == [], "nothing was played"
        margins = [value for _, value in run.metric("train/pair_margin")]
        assert abs(margins[0]) < 1e-3, "the sampling policy is the reference, and training starts there"


@pytest.mark.parametrize("step", [None, "last"])
def test_the_printed_command_learns_from_where_the_pairs_were_played(
    step: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "pairs.parquet"
    shape = ("model.rank=4", "train.learning_rate=0.05")
    assert turnwise("train", WORLD, *SMALL, *shape, "warmup.steps=0", "train.steps=2", f"run.dir={run_dir}") == 0
    capsys.readouterr()
    which = () if step is None else ("--step", step)
    assert turnwise("pairs", str(run_dir), *which, "--kind", "dpo", "--tasks", "6", "--out", str(file)) == 0
    printed = capsys.readouterr().out.split("learn from it: turnwise ")[1].splitlines()[0].split()
    assert "warmup.steps=0" in printed

    def first_margin(name: str, *command: str) -> float:
        place = tmp_path / name
        assert turnwise(*command, *SMALL, "train.steps=1", f"run.dir={place}") == 0
        with RunReader(place) as run:
            return abs(run.metric("train/pair_margin")[0][1])

    assert first_margin("as printed", *printed) < 1e-3
    fresh = [word for word in printed if not word.startswith("model.from=")]
    assert first_margin("fresh", *fresh) > 1e-2, "the base model is not the policy that played"


def _told(capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """The numbers of attempts and of sampled tokens that the command tells."""
    found = re.search(r"from (\d+) attempts and ([\d,]+) sampled tokens", capsys.readouterr().out)
    assert found is not None
    return int(found[1]), int(found[2].replace(",", ""))


def test_pairs_come_from_stored_runs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {}
    for method in ("grpo", "rloo", "dpo", "la_grpo"):
        runs[method] = str(tmp_path / method)
        options = (*SMALL, f"method={method}", "train.steps=2", "rollout.group_size=4")
        apart = ("rollout.same_start=false",) if method == "rloo" else ()
        assert turnwise("train", WORLD, *options, *apart, f"run.dir={runs[method]}") == 0
    file = str(tmp_path / "p.parquet")
    for method in ("dpo", "grpo"):
        assert turnwise("pairs", runs[method], "--stored", "--out", file) == 0
        assert {(one.kind, one.run) for one in read_pairs(Path(file))} == {("dpo", runs[method])}
        made = read_provenance(Path(file))
        assert made is not None
        assert (made.policies, made.is_stored) == ((runs[method],), True)
        assert config_from_yaml(made.config, "the file").method.name == method
    assert turnwise("pairs", runs["la_grpo"], "--stored", "--kind", "refuel", "--out", file) == 0
    for one in read_pairs(Path(file)):
        assert one.pair.chosen.branch is not None
        assert one.pair.branch_turn == one.pair.chosen.branch.turn
    capsys.readouterr()
    assert turnwise("pairs", runs["rloo"], "--stored", "--out", file) == 2
    assert "different env seeds" in capsys.readouterr().err
    assert turnwise("pairs", runs["rloo"], "--stored", "--across-seeds", "--out", file) == 0
    assert turnwise("pairs", runs["grpo"], "--stored", "--kind", "refuel", "--out", file) == 2
    assert "share no dialogue" in capsys.readouterr().err


def test_a_run_that_shapes_rewards_and_trains_one_turn_stores_what_was_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "p.parquet"
    options = ("method=la_grpo", "train.steps=2", "rollout.group_size=4", f"run.dir={run_dir}")
    shaping = ("reward.potential=true", "reward.weights.outcome=2", "reward.turn_decay=0.5")
    assert turnwise("train", WORLD, *SMALL, *options, *shaping) == 0
    with RunReader(run_dir) as run:
        rows = [row for row in run.attempts(phase="train") if row.outcome == "trained"]
        stored = [run.attempt(row.id) for row in rows]
    assert rows
    for one in stored:
        assert sum(bool(mask.all()) for mask in one.masks) == 1, "the method trained one turn"
        assert all(turn.is_trained for turn in one.trajectory.turns), "and the play left none out"
    capsys.readouterr()
    for row in rows[:3]:
        assert turnwise("replay", str(run_dir), "--attempt", str(row.id)) == 0
        assert "replayed exactly" in capsys.readouterr().out
    assert turnwise("certify", str(run_dir)) == 0
    assert turnwise("pairs", str(run_dir), "--stored", "--out", str(file)) == 0
    for pair in (one.pair for one in read_pairs(file)):
        for side in (pair.chosen, pair.rejected):
            assert all(turn.is_trained for turn in side.turns)
            assert {part for turn in side.turns for part in turn.reward_parts} == {"outcome"}


def test_stored_data_of_another_model_or_world_is_refused(
    tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, played = tmp_path / "p.parquet", tmp_path / "run"
    assert turnwise("train", WORLD, *SMALL, "method=dpo", "train.steps=1", f"run.dir={played}") == 0
    assert turnwise("pairs", str(played), "--stored", "--out", str(file)) == 0
    other = shutil.copytree(tiny_dir, tmp_path / "other")
    readers = (
        ("data.dialogues", ("method=sft", f"data.dialogues={played}")),
        ("data.pairs", ("method=dpo", f"data.pairs={file}")),
        ("critic.pretrain_from", ("method=ppo", f"critic.pretrain_from={played}")),
    )
    for option, reader in readers:
        for world, model, message in (
            (WORLD, str(other), f"was played with model.name=tiny; this run has {other}"),
            ("key_door", "tiny", f"was played with env.name={WORLD}; this run has key_door"),
        ):
            command = ("train", world, *SMALL, *reader, f"model={model}", f"run.dir={tmp_path / 'refused'}")
            for more in ((), ("--plan",)):
                assert turnwise(*command, *more) == 2, (option, more)
                said = capsys.readouterr().err
                assert option in said
                assert message in said
            assert not (tmp_path / "refused").exists(), "nothing was begun"
        by_path = ("train", WORLD, *SMALL, *reader, f"model={tiny_dir}", "--plan")
        assert turnwise(*by_path) == 0, f"{option}: the same model by its path"
    second = tmp_path / "second"
    options = (*SMALL, "method=dpo", "train.steps=1", f"model={other}", f"run.dir={second}")
    assert turnwise("train", WORLD, *options) == 0
    assert turnwise("pairs", str(played), str(second), "--stored", "--out", str(file)) == 2
    assert "one file holds pairs of one world and model" in capsys.readouterr().err


def test_what_cannot_be_done_is_said_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "p.parquet"))
    for arguments, message in (
        (("pairs", "tiny", *out), "does not say which world it is for"),
        (("pairs", "tiny", "--env", WORLD, "--across-seeds", *out), "--across-seeds works only with --stored"),
        (("pairs", "a", "--stored", "--across-seeds", "--kind", "refuel", *out), "works only with --kind dpo"),
        (("pairs", "tiny", "--env", WORLD, "--samples", "1", *out), "--samples 1; expected at least 2"),
        (("pairs", "tiny", "--env", WORLD, "--out", str(tmp_path)), "is a directory"),
        (
            ("train", WORLD, *SMALL, "method=dpo", f"data.pairs={tmp_path / 'no'}", f"run.dir={tmp_path / 'r'}"),
            "is not",
        ),
    ):
        assert turnwise(*arguments) == 2
        assert message in capsys.readouterr().err
