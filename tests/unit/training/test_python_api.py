"""The Python API keeps its word: what it is given is used or refused, and what it says is true."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from turnwise.errors import ConfigError, DataError, TurnwiseError
from turnwise.runlog.reader import is_run
from turnwise.training.objects import PythonObjects
from turnwise.training.run import ELSEWHERE_POLL_S
from turnwise.training.setup import claim_directory, set_up_new, set_up_resume
from turnwise.watch.observer import ObserverError
from unit.training.conftest import SMALL as QUICK

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("tiny_dir")]

SILENT = tw.Observer()
SMALL: dict[str, Any] = {**QUICK, "observer": SILENT}


class Quiz:
    """An env class whose own reward is 0.25."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def start(self) -> list[tw.Message]:
        return [tw.user(f"Say something about {self.seed % 7}.")]

    def step(self, reply: tw.Message) -> tw.EnvStep:  # noqa: ARG002
        return tw.EnvStep(reward=0.25, terminated=True, is_success=True)

    def close(self) -> None: ...


def reward_of_seven(_task: tw.Task, _messages: Sequence[tw.Message]) -> float:
    return 7.0


def test_an_evaluation_of_a_run_uses_its_own_reward_and_asks_for_it_when_it_is_gone(tmp_path: Path) -> None:
    settings = {**SMALL, "eval": {"tasks": 1, "every": 0}}
    with tw.train(Quiz, **settings, reward=reward_of_seven, steps=1, directory=tmp_path / "run") as run:
        assert tw.eval(run).row.reward == 7.0
        assert run.best.evaluate().row.reward == 7.0
        assert tw.eval(run, env="guess_number").row.reward != 7.0, "another world has its own rewards"
        assert tw.eval(run, reward=lambda *_: 3.0).row.reward == 3.0
    asked = r"was started from Python with reward=reward_of_seven.*turnwise.eval\(.*, reward=reward_of_seven\)"
    with pytest.raises(ConfigError, match=asked):
        tw.eval(run.directory)
    with tw.Run.open(run.directory) as opened:
        with pytest.raises(ConfigError, match=asked):
            opened.best.evaluate()
        assert isinstance(opened.best.sample("Hello.", max_tokens=2, seed=0), str), "talking needs no reward"
    assert tw.eval(run.directory, reward=reward_of_seven).row.reward == 7.0


def test_an_evaluation_of_a_policy_uses_its_arguments_or_refuses_them(tmp_path: Path) -> None:
    with tw.train("guess_number", **SMALL, steps=1, directory=tmp_path / "run") as run:
        assert tw.eval(run.last, env=Quiz, eval={"tasks": 3}).row.num_tasks == 3
        assert tw.eval(run.last, env=Quiz, overrides=["eval.tasks=1"]).row.reward == 0.25
        with pytest.raises(ConfigError, match=r"step='last'.*is one step already; .*run.policy\('last'\)"):
            tw.eval(run.last, step="last")
        with pytest.raises(ConfigError, match="keeps its model"):
            tw.eval(run.last, model={"name": "smollm2"}, eval={"tasks": 1})


def test_an_evaluation_takes_a_world_as_a_class_by_name_and_as_options() -> None:
    assert tw.eval("tiny", env=Quiz, eval={"tasks": 1}).row.reward == 0.25
    assert tw.eval("tiny", env={"name": "guess_number"}, eval={"tasks": 1}).row.num_tasks == 1


def test_runs_that_begin_at_once_get_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    config = tw.Config.model_validate({"model": {"name": "tiny"}, "warmup": {"steps": 0}})
    setups = [set_up_new(config), set_up_new(config)]
    assert setups[0].directory == setups[1].directory, "neither has begun"
    claims = [claim_directory(setup) for setup in setups]
    first, second = (setup for setup, _ in claims)
    assert (first.directory.name, second.directory.name) == ("guess_number-tiny-now", "guess_number-tiny-now-2")
    assert second.config.run.dir == second.parts.config.run.dir == str(second.directory)
    assert str(second.directory) in second.notes[-1]
    for _, lock in claims:
        lock.close()
    runs = [tw.start("guess_number", **SMALL, steps=1) for _ in range(2)]
    assert len({run.directory for run in runs}) == 2
    assert [run.wait().metrics["step"] for run in runs] == [[1.0], [1.0]]


def test_a_run_can_be_read_as_soon_as_it_is_started(tmp_path: Path) -> None:
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run")
    try:
        assert is_run(run.directory)
        assert run.config.train.steps == 10_000
        assert run.evaluations == run.checkpoints == []
        assert isinstance(run.metrics["step"], list)
        assert isinstance(run.metric("rollout/reward_mean"), list)
        assert isinstance(run.report(), str)
        with pytest.raises(TurnwiseError, match="no checkpoint"):
            _ = run.best
        with pytest.raises(ConfigError, match="holds a run already"):
            tw.start("guess_number", **SMALL, directory=run.directory)
    finally:
        run.stop()
        run.wait()


def test_what_was_steered_just_before_the_end_is_kept_and_nothing_is_steered_after_it(tmp_path: Path) -> None:
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run")
    run.steer("train.learning_rate", 3e-6)
    run.stop()
    run.wait()
    assert run.config.train.learning_rate == 3e-6
    with pytest.raises(ConfigError, match="is over; there is nothing to steer"):
        run.steer("train.learning_rate", 1e-6)


def test_two_worlds_at_once_are_refused_and_a_file_lends_its_settings_to_another_world(tmp_path: Path) -> None:
    for target, env in (("envs:quiz", Quiz), (Quiz, Quiz), (Quiz, "guess_number"), (Quiz, {"name": "key_door"})):
        with pytest.raises(ConfigError, match="both are worlds; expected one"):
            tw.train(target, **SMALL, env=env, directory=tmp_path / "two")
    file = tmp_path / "my.yaml"
    file.write_text("env: {name: guess_number, options: {demonstration_skill: 0.5}}\ntrain: {steps: 1}\n")
    run = tw.train(file, **SMALL, env=Quiz, directory=tmp_path / "run")
    assert run.config.env.options == {}
    assert run.attempts()[0].reward == 0.25


INTERRUPTED = """
import sys
import turnwise as tw

class Ready(tw.Observer):
    def step(self, step, num_steps, metrics):
        print("step", flush=True)

small = {"train": {"tasks_per_step": 1, "max_empty_steps": 10_000}, "rollout": {"group_size": 2, "max_turns": 1}}
quick = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": Ready()}
tw.train("guess_number", model="tiny", steps=10_000, directory=sys.argv[1], **small, **quick)
"""


def test_ctrl_c_ends_a_script_as_python_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT), told
    assert f"KeyboardInterrupt: stopped; {tmp_path / 'run'} was saved" in told
    assert tw.Run.open(tmp_path / "run").checkpoints


class Closing(tw.Observer):
    """Raises at the end."""

    def close(self) -> None:
        raise OSError("disk gone")


class ClosingLogger:
    """Takes everything, and raises at the end or at a step."""

    def __init__(self, bad_step: int = 0) -> None:
        self.bad_step = bad_step

    def log(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        if step == self.bad_step:
            raise OSError("no route")

    def close(self) -> None:
        raise OSError("disk gone")


class Messages(tw.Observer):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_an_error_at_the_end_is_told_and_agrees_with_the_state_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ObserverError, match=r"observer Closing.close raised OSError: disk gone. The run had finished"):
        tw.train("guess_number", **{**SMALL, "observer": Closing()}, steps=1, directory=tmp_path / "a")
    assert tw.Run.open(tmp_path / "a").state == "finished"
    view = Messages()
    settings = {**SMALL, "observer": view, "directory": tmp_path / "b"}
    run = tw.start("guess_number", **settings, loggers=[ClosingLogger()], steps=1)
    with pytest.raises(ObserverError, match=r"logger ClosingLogger.close raised OSError"):
        run.wait()
    assert (run.state, tw.Run.open(run.directory).state) == ("finished", "finished")
    assert any("ClosingLogger.close raised OSError: disk gone" in text for text in view.texts)
    run = tw.start("guess_number", **{**SMALL, "directory": tmp_path / "c"}, loggers=[ClosingLogger(1)], steps=2)
    with pytest.raises(ObserverError, match=r"logger ClosingLogger.log raised OSError: no route. The run was stopped"):
        run.wait()
    assert (run.state, tw.Run.open(run.directory).state) == ("stopped", "stopped")


def test_a_run_that_goes_on_without_its_loggers_says_so(tmp_path: Path) -> None:
    class Printer:
        def log(self, step: int, values: Mapping[str, float]) -> None: ...

    directory = tmp_path / "run"
    tw.train("guess_number", **SMALL, loggers=[Printer()], steps=1, directory=directory)
    (note,) = set_up_resume(directory).notes
    assert f"turnwise.Run.resume({str(directory)!r}, loggers=[Printer])" in note
    assert set_up_resume(directory, objects=PythonObjects(loggers=[Printer()])).notes == ()
    view = Messages()
    tw.Run.resume(directory, ["train.steps=2"], observer=view)
    assert any("loggers=[Printer]" in text for text in view.texts)


def test_a_reader_refuses_names_that_there_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tw.train("guess_number", **SMALL, steps=1, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"phase='test'; expected train or eval"):
        run.attempts(phase="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"phase='trian'; did you mean 'train'\?"):
        run.attempts(phase="trian")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"'train/los' is no metric; did you mean 'train/loss'\?"):
        run.metric("train/los")
    with pytest.raises(KeyError, match=r"'rollout/reward' is no metric; did you mean 'rollout/reward_mean'\?"):
        _ = run.metrics["rollout/reward"]
    assert run.metric("eval/success") == [], "it is a metric, and was not measured"
    for prompt in (3, [{"role": "user", "text": "Hi."}]):
        with pytest.raises(DataError, match=r"expected a text, or messages such as \[\{'role': 'user'"):
            run.last.sample(prompt)  # pyright: ignore[reportArgumentType]
    run.close()
    assert "nope" not in run.metrics
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        run.metrics.to_pandas()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"learning_rate": 1e-3}, r"did you mean train=\{'learning_rate': ...\}\?"),
        ({"steps": 1, "train": {"steps": 2}}, r"steps=1 and train=\{'steps': 2\} disagree; expected one"),
        ({"overrides": "train.seed=1"}, r"expected a list, such as overrides=\['train.seed=1'\]"),
        ({"loggers": print}, r"expected a list of objects with log\(step, values\)"),
        ({"observer": tw.Observer}, r"Observer is a class; expected an object, such as observer=Observer\(\)"),
        ({"observer": print}, "has no message; expected an object whose class inherits from turnwise.Observer"),
        ({"loggers": ["wandb"]}, r"'wandb' is a name; .* run=\{'loggers': \['wandb'\]\}"),
        ({"directory": Path(__file__)}, r"cannot hold a run: it is a file; choose another run.dir"),
    ],
)
def test_a_mistake_in_an_argument_is_told_with_the_right_form(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tw.train("guess_number", **{**SMALL, "steps": 1, **keywords})


def test_no_world_and_no_keyword_of_an_evaluation_are_told_as_what_they_are() -> None:
    with pytest.raises(ConfigError, match=r"turnwise.train\(None\): expected a preset, a YAML file, a world's name"):
        tw.train(None, **SMALL)
    with pytest.raises(
        ConfigError, match=r"^evl is no keyword of turnwise.eval; did you mean 'eval'\? The sections are"
    ):
        tw.eval("tiny", env="guess_number", evl={"tasks": 2})


def test_an_evaluation_of_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="/no/run is not there; expected a run"):
        tw.eval("/no/run")
    with pytest.raises(ConfigError, match=r"Quiz is no policy; .*turnwise.eval\(run, env=Quiz\)"):
        tw.eval(Quiz)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"guess_number is a world; expected a run.* the world as env=guess_number"):
        tw.eval("guess_number")
    with pytest.raises(ConfigError, match="tiny does not say which world it is for; add env=NAME"):
        tw.eval("tiny")
    with pytest.raises(ConfigError, match=r"^step 3 names a checkpoint of a run, and tiny is no run's directory"):
        tw.eval("tiny", env="guess_number", step=3)


async def test_a_started_run_is_awaited(tmp_path: Path) -> None:
    run = await tw.start("guess_number", **SMALL, steps=1, directory=tmp_path / "run").wait_async()
    assert run.state == "finished"


async def test_waiting_for_a_finished_run_that_was_opened_ends_at_once(tmp_path: Path) -> None:
    await tw.start("guess_number", **SMALL, steps=1, directory=tmp_path / "run").wait_async()
    opened = tw.Run.open(tmp_path / "run")
    assert (await asyncio.wait_for(opened.wait_async(), 30)) is opened
    assert opened.wait().state == "finished"


async def test_waiting_for_an_opened_run_lasts_as_long_as_it_trains(tmp_path: Path) -> None:
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run")
    while not run.metrics["step"]:
        await asyncio.sleep(0.02)
    opened = tw.Run.open(run.directory)
    awaited, waited = asyncio.create_task(opened.wait_async()), asyncio.create_task(asyncio.to_thread(opened.wait))
    done, _ = await asyncio.wait([awaited, waited], timeout=3 * ELSEWHERE_POLL_S)
    assert (run.state, done) == ("running", set())
    run.stop()
    assert [one.state for one in await asyncio.gather(awaited, waited)] == ["stopped", "stopped"]
    run.wait()


async def test_giving_up_the_wait_for_an_opened_run_leaves_it_alone(tmp_path: Path) -> None:
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run")
    while not run.metrics["step"]:
        await asyncio.sleep(0.02)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tw.Run.open(run.directory).wait_async(), ELSEWHERE_POLL_S)
    before = len(run.metrics["step"])
    while len(run.metrics["step"]) < before + 2:
        await asyncio.sleep(0.02)
    run.stop()
    assert run.wait().state == "stopped"


def test_help_shows_the_forms_that_work() -> None:
    shown = {name: inspect.getdoc(getattr(tw, name)) or "" for name in ("train", "start", "Env", "Method")}
    assert 'rollout={"max_turns": 4}' in shown["train"]
    assert "notebook" in shown["train"]
    awaited = "await tw.start(...).wait_async()"
    assert awaited in shown["start"]
    assert awaited in (inspect.getdoc(tw.Run.start_async) or "")
    assert all(word in shown["Env"] for word in ("constructor", "`seed`", "`task`"))
    assert all(
        word in shown["Method"] for word in ("`source`", "`loss_fn`", "`loss_config`", "Options", "build(setup)")
    )
