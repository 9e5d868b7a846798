"""A run that never learned says so: all attempts failed, no group taught anything, or every gradient was 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from turnwise.cli import main
from turnwise.errors import AttemptFailed, ConfigError
from turnwise.rollout.group import Rollout
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.checkpoint import best_evaluation
from turnwise.training.evaluate import EvaluationFailedError, evaluate
from turnwise.training.progress import NothingToLearnError
from turnwise.watch.observer import Observer
from turnwise.watch.report import dialogue_lines, report_lines
from unit.training.conftest import MakeRig, Rig

ENV_LINE = "tests/unit/training/conftest.py:"


def _report(rig: Rig) -> str:
    with rig.run() as run:
        return "\n".join(report_lines(run, best_evaluation(run), title="coin", num_dialogues=0))


async def test_a_run_whose_attempts_all_fail_ends_with_an_error_that_names_the_first_failure(
    make_rig: MakeRig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = make_rig({"train": {"steps": 1}, "eval": {"tasks": 0}}, is_broken=True)
    with pytest.raises(
        NothingToLearnError, match=r"all 24 attempts of the first step failed.*by env: step: ValueError"
    ) as told:
        await rig.loop().run()
    assert ENV_LINE in str(told.value)
    cause = told.value.__cause__
    assert isinstance(cause, AttemptFailed)
    assert isinstance(cause.__cause__, ValueError), "the user's own traceback hangs on it"
    shown = capsys.readouterr().out
    assert shown.index("first failure by env: step: ValueError('no such coin')") < shown.index("step 1/1")
    with rig.run() as run:
        assert [event.detail["party"] for event in run.events("first_failure")] == ["env"]
        row = run.attempts()[0]
        lines = dialogue_lines(run, row)
        assert any(f"failed  by env: step: ValueError('no such coin') at {ENV_LINE}" in line for line in lines)
        assert lines[-1].strip() == "ValueError: no such coin", "the traceback follows"


async def test_an_evaluation_whose_attempts_all_fail_has_no_result(make_rig: MakeRig) -> None:
    rig = make_rig({}, is_broken=True)
    parts, sampler = rig.parts(), await rig.trainer.save_weights_and_get_sampling_client_async()
    rollout = Rollout(parts.world, sampler, rig.renderer, parts.eval_rollout)
    with pytest.raises(EvaluationFailedError, match=r"all 3 attempts of the evaluation failed.*by env: step"):
        await evaluate({"": rollout}, parts.held_out, seed=0, label="eval", step=0)


async def test_a_run_in_which_no_group_teaches_anything_says_so(
    make_rig: MakeRig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = make_rig({"eval": {"tasks": 0}}, is_constant=True)
    await rig.loop().run()
    said = "no step moved the weights: 4 groups constant"
    assert said in capsys.readouterr().out
    report = _report(rig)
    assert said in report
    assert "no token was trained" in report
    assert "every trained token" not in report
    with rig.run() as run:
        assert [event.detail["why"] for event in run.events("not_moved")] == ["4 groups constant"]


async def test_a_run_that_moved_the_weights_says_nothing_of_the_kind(make_rig: MakeRig) -> None:
    rig = make_rig({"eval": {"tasks": 0}})
    await rig.loop().run()
    with rig.run() as run:
        assert not run.events("not_moved")
    assert "no token was trained" not in _report(rig)


def _quick(tmp_path: Path, **more: Any) -> dict[str, Any]:
    small = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "rollout": {"max_retries": 0}, "observer": Observer()}
    return {"model": "tiny", "steps": 1, "directory": tmp_path / "run", **small, **more}


def _of_none(task: Any, messages: Any) -> Any:  # noqa: ARG001
    return None


def _raising(task: Any, messages: Any) -> float:  # noqa: ARG001
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (_of_none, "by reward: _of_none returned None"),
        (_raising, r"by reward: _raising: KeyError\('answer'\) at .*py:"),
    ],
)
def test_a_broken_reward_function_is_blamed_itself(tmp_path: Path, reward: Any, said: str) -> None:
    with pytest.raises(NothingToLearnError, match=said):
        tw.train("guess_number", **_quick(tmp_path, reward=reward))
    assert tw.Run.open(tmp_path / "run").state == "failed"


def test_a_reward_function_with_other_parameters_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward <lambda>\(reply\) cannot be called with \(task, messages\)"):
        tw.train("guess_number", **_quick(tmp_path, reward=lambda reply: float(len(reply))))
    assert not (tmp_path / "run").exists()


BROKEN = """
import turnwise as tw

class Raises:
    def __init__(self, seed): ...
    def start(self): return [tw.user("hi")]
    def step(self, reply): return {}["nothing"]
    def close(self): ...
"""


def test_the_commands_tell_by_exit_code_that_every_attempt_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    env, said = f"{tmp_path / 'broken.py'}:Raises", f"KeyError('nothing') at {tmp_path / 'broken.py'}:7"
    assert main(["eval", "tiny", "--env", env, "eval.tasks=1"]) == ExitCode.USER_ERROR
    assert said in capsys.readouterr().err
    quick = ["model=tiny", "train.steps=1", "eval.tasks=0", f"run.dir={tmp_path / 'run'}", "rollout.group_size=2"]
    assert main(["train", env, *quick]) == ExitCode.USER_ERROR
    out = capsys.readouterr()
    assert said in out.err
    assert "done in" not in out.out
