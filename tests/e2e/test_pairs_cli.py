"""The two steps of offline preference learning through the real command: make pairs, then learn from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.runlog.reader import RunReader
from turnwise.train.pairs import read_stored_pairs

WORLD = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = ("model=tiny", "eval.tasks=2", "eval.every=0", "run.dialogues=0", "train.tasks_per_step=2")

pytestmark = pytest.mark.usefixtures("tiny_dir")


def turnwise(*arguments: str) -> int:
    return main(list(arguments))


@pytest.mark.parametrize("kind", ["dpo", "refuel"])
def test_pairs_are_played_and_learned_from(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.parquet"
    assert turnwise("pairs", "tiny", "--env", WORLD, "--kind", kind, "--tasks", "6", "--out", str(file)) == 0
    assert f"{kind} pairs from" in capsys.readouterr().out
    stored = read_stored_pairs(file)
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


def test_pairs_come_from_stored_runs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {}
    for method in ("grpo", "rloo", "dpo", "la_grpo"):
        runs[method] = str(tmp_path / method)
        options = (*SMALL, f"method={method}", "train.steps=2", "generator.n_samples_per_prompt=4")
        apart = ("generator.same_start=false",) if method == "rloo" else ()
        assert turnwise("train", WORLD, *options, *apart, f"run.dir={runs[method]}") == 0
    file = str(tmp_path / "p.parquet")
    for method in ("dpo", "grpo"):
        assert turnwise("pairs", runs[method], "--stored", "--out", file) == 0
        assert {(one.kind, one.run) for one in read_stored_pairs(Path(file))} == {("dpo", runs[method])}
    assert turnwise("pairs", runs["la_grpo"], "--stored", "--kind", "refuel", "--out", file) == 0
    for one in read_stored_pairs(Path(file)):
        assert one.pair.chosen.branch is not None
        assert one.pair.branch_turn == one.pair.chosen.branch.turn
    capsys.readouterr()
    assert turnwise("pairs", runs["rloo"], "--stored", "--out", file) == 2
    assert "different env seeds" in capsys.readouterr().err
    assert turnwise("pairs", runs["rloo"], "--stored", "--across-seeds", "--out", file) == 0
    assert turnwise("pairs", runs["grpo"], "--stored", "--kind", "refuel", "--out", file) == 2
    assert "share no dialogue" in capsys.readouterr().err


def test_what_cannot_be_done_is_said_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "p.parquet"))
    for arguments, message in (
        (("pairs", "tiny", *out), "does not say which world it is for"),
        (("pairs", "tiny", "--env", WORLD, "--across-seeds", *out), "--across-seeds is for --stored"),
        (("pairs", "tiny", "--env", WORLD, "--samples", "1", *out), "--samples 1; expected at least 2"),
        (("pairs", "tiny", "--env", WORLD, "--out", str(tmp_path)), "is a directory"),
        (
            ("train", WORLD, *SMALL, "method=dpo", f"data.pairs={tmp_path / 'no'}", f"run.dir={tmp_path / 'r'}"),
            "is not",
        ),
    ):
        assert turnwise(*arguments) == 2
        assert message in capsys.readouterr().err
