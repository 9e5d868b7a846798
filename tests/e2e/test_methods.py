"""Every method through the real command on `tiny`: it plays or reads, learns, and writes down what it did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command_line import ECHO_RUN
from turnwise.cli import main
from turnwise.losses.table import LOSSES
from turnwise.methods.lookup import SHIPPED
from turnwise.methods.registry import METHODS
from turnwise.runlog.reader import RunReader

WORLD = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (*ECHO_RUN, "eval.tasks=2", "eval.every=0")
SHORTER = {"ppo": ("critic.pretrain_steps=2",)}


def run_train(directory: Path, *overrides: str) -> RunReader:
    assert main(["train", WORLD, *SMALL, *overrides, f"run.dir={directory}"]) == 0
    return RunReader(directory)


def test_every_method_has_a_name_of_its_own_a_builder_and_a_loss() -> None:
    assert len(SHIPPED) == len(METHODS)
    assert all(options.default_loss in LOSSES for options in SHIPPED.values())
    assert all("build" in vars(options) and options.__doc__ for options in SHIPPED.values())


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_method_learns_for_two_steps(name: str, tmp_path: Path) -> None:
    with run_train(tmp_path / "run", f"method={name}", *SHORTER.get(name, ())) as run:
        norms = [value for _, value in run.metric("train/grad_norm")]
        assert len(norms) == 2
        assert all(norm > 0 for norm in norms)
        assert run.checkpoints()[-1].step == 2
        outcomes = {row.outcome for row in run.attempts(phase="train")}
        assert outcomes == set() if SHIPPED[name].only_stored else "trained" in outcomes
        assert all(row.is_exact for row in run.certificates())
        assert len(run.certificates()) == (0 if SHIPPED[name].only_stored else 2)
        trained = [value for _, value in run.metric("train/num_trained_tokens")]
        assert all(value > 0 for value in trained)
        if not SHIPPED[name].only_stored:
            assert all(value > 0 for _, value in run.metric("rollout/tokens_drawn"))


@pytest.mark.usefixtures("tiny_dir")
def test_kl_in_the_advantages_makes_the_tokens_of_a_turn_differ(tmp_path: Path) -> None:
    with run_train(tmp_path / "run", "method.kl_coef=0.5", "train.learning_rate=0.05") as run:
        kl = [value for _, value in run.metric("train/kl_reference")]
        assert kl[0] == pytest.approx(0, abs=1e-9), "the first step samples from the base model itself"
        assert kl[1] > 1e-4
        rows = [row for row in run.attempts(phase="train") if row.outcome == "trained"]
        stored = {step: [run.attempt(row.id) for row in rows if row.step == step] for step in (1, 2)}
        spread = {
            step: max(float(np.ptp(own)) for one in attempts for own in one.advantages if own is not None)
            for step, attempts in stored.items()
        }
        assert spread[1] == pytest.approx(0, abs=1e-6)
        assert spread[2] > 1e-3


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_ends_when_its_tokens_are_sampled(tmp_path: Path) -> None:
    with run_train(tmp_path / "run", "train.steps=50", "train.max_sampled_tokens=150") as run:
        drawn = [value for _, value in run.metric("rollout/tokens_drawn")]
        assert sum(drawn) >= 150 > sum(drawn[:-1])
        assert [(row.label, row.step) for row in run.evaluations()][-1] == ("end", len(drawn))


@pytest.mark.usefixtures("tiny_dir")
def test_sft_imitates_the_successes_of_a_stored_run(tmp_path: Path) -> None:
    run_train(tmp_path / "played", "method=rft").close()
    with run_train(tmp_path / "run", "method=sft", f"data.dialogues={tmp_path / 'played'}") as run:
        assert len(run.metric("train/loss")) == 2


@pytest.mark.usefixtures("tiny_dir")
def test_rewards_are_shaped_before_they_are_credited_and_kept_beside_those_of_the_env(tmp_path: Path) -> None:
    shaping = ("reward.potential=true", "reward.weights.outcome=2", "method.credit=reward_to_go")
    with run_train(tmp_path / "run", *shaping) as run:
        row = run.attempts(phase="train")[0]
        stored = run.attempt(row.id)
        given = [dict(turn.reward_parts) for turn in stored.trajectory.turns]
        credited = [one for one in stored.credited_parts if one is not None]
        assert [set(one) for one in given] == [{"outcome"}] * 3
        assert [one["outcome"] for one in credited] == pytest.approx([2 * one["outcome"] for one in given])
        assert [one["shaping"] for one in credited] == pytest.approx([0.1, 0.1, -0.2])
        assert row.reward == pytest.approx(sum(one["outcome"] for one in given))


@pytest.mark.usefixtures("tiny_dir")
def test_several_optimizer_steps_can_be_anchored_at_the_weights_that_began_the_batch(tmp_path: Path) -> None:
    options = ("train.substeps=2", "method.loss_fn=ppo", "method.old_policy=true", "method.correction=token_tis")
    with run_train(tmp_path / "run", *options) as run:
        assert all(value == pytest.approx(1.0, abs=0.05) for _, value in run.metric("train/correction_factor"))
        for name in ("ratio", "ess_fraction", "rejected_fraction", "kl_sampler_trainer_k1", "kl_sampler_trainer_k2"):
            assert len(run.metric(f"train/{name}")) == 2, name
        assert len(run.metric("train/clip_fraction_high")) == 2
