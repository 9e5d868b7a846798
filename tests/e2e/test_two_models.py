"""Two models negotiate, through the commands that docs/opponents.md prints: a run, its checks, pairs, and ratings."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.credit.branching import turn_probabilities
from turnwise.runlog.reader import RunReader
from turnwise.training.pairs import read_pairs

pytestmark = [pytest.mark.usefixtures("tiny_dir"), pytest.mark.slow]
SMALL = (
    "warmup.steps=120",
    "warmup.demonstrations=512",
    "train.tasks_per_step=4",
    "rollout.group_size=4",
    "eval.tasks=4",
    "eval.every=0",
    "run.dialogues=0",
)
MAX_TURNS = 3
"""Of each side, in the preset."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """A run against the model before training, which plays ahead by one update."""
    assert tiny_dir.is_dir()
    place = tmp_path_factory.mktemp("two") / "run"
    options = ("env.options.opponent=base", "opponent.panel=[base,tough]", "train.max_staleness=1", "train.steps=2")
    assert main(["train", "negotiate_tiny", *SMALL, *options, f"run.dir={place}"]) == 0
    return place


def test_a_run_against_a_model_is_certified_replayed_resumed_and_measured_against_a_panel(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", str(run_dir)]) == 0
    with RunReader(run_dir) as run:
        rows = run.attempts(phase="train")
        assert {run.attempt(row.id).trajectory.labels["opponent"] for row in rows} == {"base"}
    capsys.readouterr()
    for row in rows[:3]:
        assert main(["replay", str(run_dir), "--attempt", str(row.id)]) == 0
        assert "replayed exactly" in capsys.readouterr().out
    assert main(["train", "--resume", str(run_dir), "train.steps=3"]) == 0
    with RunReader(run_dir) as run:
        assert [step for step, _ in run.metric("opponent/reward_base_mean")] == [1, 2, 3]
        assert {"opponent/eval_reward_base", "opponent/eval_reward_tough"} <= set(run.metric_names())
    capsys.readouterr()
    assert main(["eval", str(run_dir), "opponent.panel=[fair,random]", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["by_opponent"]) == {"fair", "random"}


def test_pairs_of_two_models_say_who_played_and_branch_where_the_seed_says(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "refuel.parquet"
    play = ("pairs", str(run_dir), "--kind", "refuel", "--turn", "geometric", "--tasks", "24", "--samples", "4")
    assert main([*play, "--step", "last", "--out", str(file), "env.options.opponent=self"]) == 0
    stored = read_pairs(file)
    expected = turn_probabilities("geometric", MAX_TURNS, p=0.3)
    for one in stored:
        assert (one.opponent, one.world, one.model, one.run) == ("self", "negotiate", "tiny", str(run_dir))
        turn = one.pair.branch_turn
        cut_off = [expected[turn] / expected[:length].sum() for length in range(turn + 1, MAX_TURNS + 1)]
        assert any(one.pair.branch_probability == pytest.approx(value) for value in cut_off), "at the dialogue's end"
    printed = capsys.readouterr().out.split("learn from it: turnwise ")[1].splitlines()[0].split()
    assert {"negotiate", "model.rank=32", "warmup.steps=0", "method=refuel", f"data.pairs={file}"} <= set(printed)
    quick = [option for option in SMALL if not option.startswith("warmup")]
    learned = tmp_path / "learned"
    assert main([*printed, *quick, "train.steps=1", f"run.dir={learned}"]) == 0
    with RunReader(learned) as run:
        assert abs(run.metric("train/pair_margin")[0][1]) < 1e-3, "it begins with the policy that played"


def test_a_run_its_base_and_a_script_are_rated_with_a_picture(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "matrix.svg"
    capsys.readouterr()
    assert main(["tournament", str(run_dir), "base", "tough", "--tasks", "4", "--json", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["players"]) == {str(run_dir), "base", "tough"}
    assert found["num_games"] == 24
    texts = [element.text or "" for element in ET.parse(picture).iter() if element.text]
    assert any(text.startswith("run (") for text in texts)
    assert "joint surplus" in texts


def test_both_seats_learn_from_games_that_were_played_ahead_also_after_a_resume(tmp_path: Path) -> None:
    place = tmp_path / "run"
    options = ("env.options.opponent=self", "opponent.train=both", "opponent.panel=[tough]", "train.max_staleness=1")
    assert main(["train", "negotiate_tiny", *SMALL, *options, "train.steps=3", f"run.dir={place}"]) == 0
    assert main(["train", "--resume", str(place), "train.steps=6"]) == 0
    with RunReader(place) as run:
        rows = run.attempts(phase="train")
        seats = Counter((row.step, row.task_id, run.attempt(row.id).trajectory.labels["seat"]) for row in rows)
        assert set(seats.values()) == {4}, "all games of a task, and both seats of each game"
        assert {step for step, *_ in seats} == set(range(1, 7))
        stale = dict(run.metric("pool/staleness_max"))
        assert max(stale[step] for step in (1, 2, 3)) == max(stale[step] for step in (4, 5, 6)) == 1
        assert all(row.is_exact for row in run.certificates())
    assert main(["certify", str(place)]) == 0
