"""A method and a loss from outside the package, one file each, train `tiny` from the command line and are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import ECHO_RUN
from turnwise.cli import main
from turnwise.runlog.reader import RunReader

METHOD = """
import dataclasses

from pydantic import Field

from turnwise.methods.grpo import Grpo


class ScaledGrpo:
    class Options(Grpo.Options):
        factor: float = Field(default=1.0, gt=0, description="What advantages are multiplied by.")

        def build(self, setup):
            plain = super().build(setup)
            return dataclasses.replace(plain, compare=lambda rewards: self.factor * plain.compare(rewards))
"""
LOSS = """
def importance_sampling_again(logprobs, columns, *, scale: float = 1.0):
    return -scale * (logprobs - columns.anchor_logprobs_T).exp() * columns.advantages_T
"""
WORLD = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    *ECHO_RUN,
    "train.grad_clip_norm=0",
    "train.learning_rate=1e-6",
    "rollout.deterministic=true",
    "eval.tasks=0",
)


def grad_norms(directory: Path) -> list[float]:
    with RunReader(directory) as run:
        return [value for _, value in run.metric("train/grad_norm")]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("tiny_dir")
def test_a_method_and_a_loss_from_files_have_the_gradients_that_their_formulas_say(tmp_path: Path) -> None:
    (tmp_path / "own_method.py").write_text(METHOD, encoding="utf-8")
    (tmp_path / "own_loss.py").write_text(LOSS, encoding="utf-8")
    method, loss = f"{tmp_path}/own_method.py:ScaledGrpo", f"{tmp_path}/own_loss.py:importance_sampling_again"

    def train(name: str, *overrides: str) -> list[float]:
        assert main(["train", WORLD, *SMALL, *overrides, f"run.dir={tmp_path / name}"]) == 0
        return grad_norms(tmp_path / name)

    plain = train("plain")
    assert all(norm > 0 for norm in plain)
    assert train("own_loss", f"loss={loss}") == pytest.approx(plain, rel=1e-4)
    assert train("scaled_loss", f"loss={loss}", "method.loss_options.scale=3")[0] == pytest.approx(
        3 * plain[0], rel=1e-4
    )
    both = train("both", f"method={method}", "method.factor=2", f"loss={loss}")
    assert both[0] == pytest.approx(2 * plain[0], rel=1e-4)
    assert main(["train", "--resume", str(tmp_path / "both"), "train.steps=3"]) == 0
    assert len(grad_norms(tmp_path / "both")) == 3
