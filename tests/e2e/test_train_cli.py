"""`turnwise train` and its companions through the real command line, on `tiny`, in processes of their own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cases import plain_world_names
from command_line import run_here, run_module, start_cli
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import Phase

SMALL = (
    "model=tiny",
    "train.tasks_per_step=2",
    "rollout.group_size=4",
    "eval.tasks=4",
    "eval.every=0",
    "warmup.batch_size=2",
    "warmup.demonstrations=4",
    "run.dialogues=1",
)


def _turnwise(*arguments: str, stdin: str = "", code: int = 0) -> str:
    return run_module("turnwise.cli", *arguments, stdin=stdin, code=code)


def _weights(run: RunReader, step: int) -> dict[str, np.ndarray]:
    (path,) = [row.path for row in run.checkpoints() if row.step == step]
    return load_file(CheckpointStore(run.directory).directory(path) / "adapter_model.safetensors")


@pytest.mark.usefixtures("tiny_dir")
def test_the_optimizers_eps_reaches_the_weights(tmp_path: Path) -> None:
    """The first step of AdamW is learning_rate * g / (|g| + eps), and the B side of an adapter begins at 0."""
    rate, largest = 1e-2, {}
    for eps in ("1e-8", "1e3"):
        directory = tmp_path / eps
        small = ("model=tiny", "method=sft", "train.steps=1", "warmup.steps=0", "eval.tasks=0", "run.dialogues=0")
        optim = (f"train.learning_rate={rate}", f"train.eps={eps}", "train.grad_clip_norm=1")
        assert main(["train", "calculator", *small, *optim, f"run.dir={directory}"]) == 0
        with RunReader(directory) as run:
            weights = _weights(run, 1)
        largest[eps] = max(float(np.abs(value).max()) for name, value in weights.items() if "lora_B" in name)
    assert largest["1e-8"] == pytest.approx(rate, rel=1e-4), "a gradient of any size makes a full step"
    assert 0 < largest["1e3"] < rate / 1e3, "a clipped gradient is below 1, and eps a thousand"


SHORT_TASKS = {
    "phone": ("env.options.actions=3",),
    "workspace": ("env.options.chores=1", "env.options.interface=shell"),
}
"""Options with which the demonstrations of long worlds fit the context of `tiny`."""


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize("world", plain_world_names())
def test_every_world_trains_for_a_few_steps(world: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    out = run_here(
        "train", world, *SMALL, *SHORT_TASKS.get(world, ()), "train.steps=2", "warmup.steps=2", f"run.dir={directory}"
    )
    for expected in (
        "training     2 steps x 2 tasks x 4 attempts = 16 attempts",
        "step 2/2",
        "curve.svg",
        "--- attempt",
    ):
        assert expected in out
    with RunReader(directory) as run:
        assert [row.label for row in run.evaluations()] == ["start", "warm-up", "end"]
        assert len(run.attempts(phase="train")) == 16
        assert [row.step for row in run.certificates()] == [1, 2]
        assert all(row.is_exact for row in run.certificates())
        assert run.checkpoints()[-1].step == 2


@pytest.fixture(scope="module")
def finished(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    """A short run with all turns in one assistant message."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    single = "rollout.use_conversation_multi_turn=false"
    run_here("train", "guess_number", *SMALL, "train.steps=1", "warmup.steps=0", single, f"run.dir={directory}")
    return directory


def _in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The same command without a new interpreter, for what has no signals and no standard input."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_certify_says_that_a_run_is_exact(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step 1: token exactness: EXACT" in _in_process(capsys, "certify", str(finished))


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_any_attempt_of_a_run_can_be_replayed(finished: Path, phase: Phase, capsys: pytest.CaptureFixture[str]) -> None:
    with RunReader(finished) as run:
        attempt = run.attempts(phase=phase)[-1].id
    assert "replayed exactly" in _in_process(capsys, "replay", str(finished), "--attempt", str(attempt))


def test_eval_measures_a_run_and_its_checkpoint_alike(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_run = json.loads(_in_process(capsys, "eval", str(finished), "eval.tasks=6", "--json"))
    with RunReader(finished) as run:
        checkpoint = CheckpointStore(finished).directory(run.checkpoints()[-1].path)
    single = "rollout.use_conversation_multi_turn=false"
    by_path = ("eval", str(checkpoint), "--env", "guess_number", "eval.tasks=6", single, "--json")
    of_checkpoint = json.loads(_in_process(capsys, *by_path))
    assert of_run["num_attempts"] == 6
    assert {**of_run, "step": 0} == of_checkpoint


def test_export_writes_an_adapter_and_a_whole_model_that_others_load(tmp_path: Path) -> None:
    """Both give the logits that peft computes from the checkpoint itself."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, adapter, merged = tmp_path / "run", tmp_path / "adapter", tmp_path / "deep" / "merged"
    run_here("train", "guess_number", *SMALL, "warmup.steps=2", "train.steps=0", f"run.dir={run}")
    assert "checkpoint: step 0, the best" in run_here("export", str(run), "--peft", str(adapter))
    run_here("export", str(run), "--merged", str(merged))
    load: Any = AutoModelForCausalLM.from_pretrained
    base_dir = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    ids = torch.arange(3, 40).reshape(1, -1)
    with torch.no_grad():
        base = load(base_dir)(ids).logits
        theirs = PeftModel.from_pretrained(load(base_dir), str(adapter))(ids).logits
        ours = load(str(merged))(ids).logits
    assert (theirs - base).abs().max() > 1e-4, "the run has changed the model"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(str(merged)).encode("12") == AutoTokenizer.from_pretrained(base_dir).encode(
        "12"
    )
    assert "exists; name a new directory" in run_here("export", str(run), "--peft", str(adapter), code=2)


def test_sample_answers_every_line_of_a_pipe(finished: Path) -> None:
    out = _turnwise("sample", str(finished), "--max-tokens", "1", "--temperature", "0", stdin="hello\n\nagain\n")
    assert out.count("\n") >= 2


def test_the_plan_is_printed_and_nothing_is_spent(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    out = run_here("train", "guess_number", "--plan", *SMALL, "train.steps=3", f"run.dir={directory}")
    for expected in ("train tasks", "24 attempts", "at most", "GiB", "optimizer"):
        assert expected in out
    assert not directory.exists()


def test_a_users_mistake_is_one_message(tmp_path: Path) -> None:
    out = run_here("train", "guess_number", "model=tiny", "train.stepz=1", code=2)
    assert out == "turnwise: train.stepz is not an option; did you mean train.steps?\n"
    out = run_here("train", "gues_number", "model=tiny", code=2)
    assert "did you mean 'guess_number'?" in out
    out = run_here("train", "guess_number", "model=tiny", f"run.dir={tmp_path}", "env.options.hihg=4", code=2)
    assert "hihg" in out
    assert "Traceback" not in out


def test_an_interrupted_and_resumed_run_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    # One attempt at a time: the sampler's batches, and with them the rounding of its logprobs, are the same.
    common = (*SMALL, "warmup.steps=2", "train.steps=4", "train.learning_rate=1e-2", "rollout.max_concurrency=1")
    common += ("train.lr_schedule=cosine", "train.lr_warmup=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _turnwise("train", "guess_number", *common, f"run.dir={whole}")
    said: list[str] = []
    with start_cli("train", "guess_number", *common, f"run.dir={broken}") as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 2/4"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130, said
    assert said[-1] == f"saved; go on with: turnwise train --resume {broken}\n"
    assert "resume       after 2 steps and 2 warm-up steps" in _turnwise("train", "--resume", str(broken))
    with RunReader(whole) as one, RunReader(broken) as two:
        ours, theirs = _weights(one, 4), _weights(two, 4)
        for name, weights in ours.items():
            np.testing.assert_array_equal(weights, theirs[name], err_msg=name)
        for metric in ("rollout/reward_mean", "train/grad_norm", "train/loss", "eval/success"):
            assert one.metric(metric) == two.metric(metric)
        assert [(r.label, r.step) for r in one.evaluations()] == [(r.label, r.step) for r in two.evaluations()]
        assert len(one.attempts()) == len(two.attempts())


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments = (*SMALL, "warmup.steps=0", "train.steps=40", "train.save_every=1", f"run.dir={directory}")
    with start_cli("train", "guess_number", *arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/40"):  # the checkpoint of step 1 is there, that of step 2 is being written
                process.kill()
    with RunReader(directory) as run:
        done = run.checkpoints()[-1].step
    last = done + 1
    out = _turnwise("train", "--resume", str(directory), f"train.steps={last}")
    assert f"resume       after {done} steps" in out
    with RunReader(directory) as run:
        assert [step for step, _ in run.metric("rollout/attempts")] == list(range(1, last + 1))
        assert len(run.attempts(phase="train")) == 8 * last
