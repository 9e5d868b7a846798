"""The options of the commands around training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.config.files import preset_names

PLAN = ("train", "guess_number", "model=tiny", "train.steps=3", "--plan", "--no-time")


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_counts_tasks_attempts_tokens_and_optimizer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("train.tasks_per_step=2", "rollout.group_size=4", "warmup.steps=5", "train.substeps=2")
    assert main([*PLAN, *overrides, "eval.tasks=10", "eval.every=0", "model.rank=8"]) == 0
    out = capsys.readouterr().out
    assert "guess_number: 192 train tasks, 10 held out" in out
    assert "3 steps x 2 tasks x 4 attempts = 24 attempts" in out
    assert "3 times, 30 attempts in all" in out
    assert "11 steps; grpo with importance_sampling" in out
    assert f"at most {(24 + 30) * 5 * 8:,} sampled" in out
    assert "LoRA rank 8" in out


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_says_how_many_threads_will_run_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert main([*PLAN, "engine.device=cpu"]) == 0
    assert "threads      1: 1 of 6 CPUs allowed by affinity, " in capsys.readouterr().out
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([*PLAN, "engine.device=cpu"]) == 0
    assert "threads      1: OMP_NUM_THREADS=1 (1 of 6 CPUs allowed by affinity, " in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dir")
def test_overrides_may_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", "--no-time", "guess_number", "model=tiny", "train.steps=7"]) == 0
    assert "7 steps x" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_says_who_stands_in_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "guess_number", "model=Qwen/Qwen3-0.6B", "model.alias=tiny", "--plan", "--no-time"]) == 0
    assert "tiny (standing in for Qwen/Qwen3-0.6B)" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dir")
def test_a_turn_limit_reaches_a_world_that_tells_its_players(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "rollout.max_turns=2", "rollout.max_tokens_per_turn=3"]) == 0
    assert "up to 2 turns of 3 tokens" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_notes_what_will_not_act(capsys: pytest.CaptureFixture[str]) -> None:
    share = "engine.gpu_memory_utilization=0.7"
    assert main([*PLAN, "method.loss_fn=ppo", "eval.tasks=1000", "engine.device=cpu", share]) == 0
    out = capsys.readouterr().out
    assert f"{share} is an option for GPUs" in out
    assert "ppo never clips" in out
    assert "eval.tasks=1000, but this world holds out 64" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "nothing to train; expected turnwise train NAME|FILE"),
        (["train", "guess_number", "rollout.backend=sglang"], "cannot import sglang"),
        (
            ["train", "guess_number", "rollout.backend=sglang", "rollout.use_conversation_multi_turn=false"],
            "NotImplementedError: `use_conversation_multi_turn=False` is not supported for SGLang backend",
        ),
        (["train", "guess_number", "model=nobody/nothing"], "no model under 'nobody/nothing'"),
        (["train", "guess_number", "model=tinny"], "no model under 'tinny'; did you mean 'tiny'?"),
        (["train", "gues_number", "model=nobody/nothing"], "no world 'gues_number'; did you mean 'guess_number'?"),
        (["train", "guess_number_tny", "model=nobody/nothing"], "did you mean 'guess_number_tiny'?"),
        (["train", "nofile.py:World", "model=nobody/nothing"], "nofile.py; expected path/to/file.py:Class"),
        (["train", "guess_number", "model=nobody/nothing", "env.options.hgih=3"], "did you mean 'high'?"),
        (["train", "guess_number", "lr=1"], "did you mean train.learning_rate?"),
        (["train", "guess_number", "method=gpro"], "did you mean grpo?"),
        (["export", "runs/nowhere", "--peft", "x"], "runs/nowhere is not there; expected a run"),
        (["train", "--resume", "nowhere"], "is no run directory: it is not there"),
        (["certify", "nowhere"], "is no run directory"),
        (["replay", "nowhere"], "is no run directory"),
        (["eval", "tiny"], "add --env NAME"),
        (["eval", "tiny", "--env", "guess_number", "--step", "3"], "tiny is no run's directory; leave it out"),
        (["eval", "tinker://nobody/weights/nothing", "--env", "guess_number"], "no checkpoint in"),
        (["sample", "nobody/nothing"], "no model under 'nobody/nothing'"),
    ],
)
@pytest.mark.usefixtures("tiny_dir")
def test_a_mistake_is_one_message(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.startswith("turnwise: ")
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "x", "--no-such-option"], "unrecognized arguments: --no-such-option\n"),
        (["train", "x", "--learning-rate", "1e-3"], "are written without dashes: train.learning_rate=1e-3\n"),
        (["certify", "run", "a=b"], "unrecognized arguments: a=b\n"),
        (["trian", "x"], "argument COMMAND: no 'trian'; did you mean 'train'?\n"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_unknown_arguments_are_refused(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert expected in capsys.readouterr().err


def test_the_help_of_train_lists_presets_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert f"presets: {', '.join(preset_names())}" in " ".join(out.split())
    assert "rollout.temperature=1 " in out
