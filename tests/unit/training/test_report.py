"""What a finished run prints, and the commands that look back at it."""

from __future__ import annotations

import pytest

from turnwise.cli import main
from turnwise.rollout.certify import Certificate
from turnwise.runlog.writer import RunWriter
from turnwise.training.checkpoint import best_evaluation
from turnwise.watch.report import report_lines
from unit.training.conftest import MakeRig


async def test_a_report_has_before_and_after_the_curve_and_the_dialogues(make_rig: MakeRig) -> None:
    rig = make_rig({"eval": {"tasks": 6, "samples": 2}, "warmup": {"steps": 1}})
    await rig.loop().run()
    text = "\n".join(report_lines(rig.run(), best_evaluation(rig.run()), title="coin", num_dialogues=3))
    for expected in ("start ", "warm-up ", "end (step 2)", "points of held-out success since warm-up", "curve.svg"):
        assert expected in text
    assert text.count("--- attempt") == 3
    assert ", success, reward 1" in text
    assert ", no success, reward 0" in text
    assert (rig.directory / "curve.svg").is_file()


async def test_certify_prints_every_certificate_and_fails_when_one_is_not_exact(
    make_rig: MakeRig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = make_rig({"eval": {"tasks": 0}})
    await rig.loop().run()  # this trainer computes no logprobs
    assert main(["certify", str(rig.directory)]) == 1
    assert "NOT EXACT" in capsys.readouterr().out
    assert main(["certify", str(rig.directory), "--turns"]) == 1
    with rig.run() as run:
        turns = [turn for row in run.certificates() for turn in Certificate.from_json(row.content).turns]
    lines = [line for line in capsys.readouterr().out.splitlines() if "ids equal" in line]
    assert len(lines) == len(turns) > 0
    assert all(line.endswith("DRIFTS") for line in lines)


async def test_a_report_says_what_the_size_rule_did_not_keep(make_rig: MakeRig) -> None:
    rig = make_rig({"eval": {"tasks": 0}})
    await rig.loop().run()
    assert "not kept" not in "\n".join(
        report_lines(rig.run(), best_evaluation(rig.run()), title="coin", num_dialogues=0)
    )
    writer = RunWriter.reopen(rig.directory, max_size_mb=1)
    for count in (2, 3):
        writer.event(2, "dropped", what="token arrays", phase="train", num_trajectories=count)
    writer.close()
    lines = report_lines(rig.run(), best_evaluation(rig.run()), title="coin", num_dialogues=0)
    assert (
        "not kept      token arrays of 5 train attempts, the oldest ones, because run.max_size_mb limits run.db"
        in lines
    )


async def test_replay_without_an_attempt_lists_some(make_rig: MakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    rig = make_rig({"eval": {"tasks": 0}})
    await rig.loop().run()
    assert main(["replay", str(rig.directory)]) == 0
    assert "48 attempts; the last 20" in capsys.readouterr().out
