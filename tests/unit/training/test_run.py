"""`turnwise.train` and `Run`: a run started, watched, steered, stopped and resumed from Python."""

from __future__ import annotations

import _thread
import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError
from turnwise.methods.grpo import Grpo
from turnwise.methods.rloo import Rloo
from turnwise.runlog.reader import is_run
from turnwise.runlog.schema import AttemptRecord, CheckpointRow, EvaluationRow
from turnwise.watch.observer import ObserverError
from unit.training.conftest import SMALL

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("tiny_dir")]

SILENT = tw.Observer()


class Echo:
    """An env class: task n is the env with seed n."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def start(self) -> list[tw.Message]:
        return [tw.user(f"Say something about {self.seed % 7}.")]

    def step(self, reply: tw.Message) -> tw.EnvStep:
        return tw.EnvStep(reward=0.25, terminated=True, is_success=len(reply.content) > 3)

    def close(self) -> None: ...


def length_reward(_task: tw.Task, messages: Sequence[tw.Message]) -> float:
    return len(messages[-1].content) / 100


class Telling(tw.Observer):
    """Keeps what it is told; calls `act` after each step."""

    def __init__(self, act: Any = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self._act = act or (lambda _: None)

    def phase(self, name: str) -> None:
        self.told.append(("phase", name))

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        self.told.append(("step", (step, num_steps)))
        self._act(step)

    def attempt(self, step: int, phase: str, attempt: AttemptRecord) -> None:  # noqa: ARG002
        self.told.append(("attempt", (step, phase)))

    def evaluation(self, row: EvaluationRow) -> None:
        self.told.append(("evaluation", row.label))

    def checkpoint(self, row: CheckpointRow) -> None:
        self.told.append(("checkpoint", row.step))

    def close(self) -> None:
        self.told.append(("close", None))

    def all(self, kind: str) -> list[Any]:
        return [value for name, value in self.told if name == kind]


def step_metrics(run: tw.Run) -> list[tuple[float, ...]]:
    """What the steps came to, without times."""
    table = run.metrics
    names = [name for name in table if not re.search(r"^time/|_s(_|$)", name)]
    return [tuple(table[name][row] for name in sorted(names)) for row in range(len(table["step"]))]


def test_a_run_is_read_as_a_table_evaluations_attempts_and_samplers_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    observer = Telling()
    settings = {**SMALL, "eval": {"tasks": 2}}
    run = tw.train("guess_number", **settings, steps=2, directory=tmp_path / "run", observer=observer)
    assert run.state == "finished"
    assert run.directory == tmp_path / "run"
    assert run.config.train.steps == 2
    assert run.metrics["step"] == [0, 1, 2]
    assert list(run.metrics.to_pandas()["rollout/attempts"].dropna()) == [2, 2]
    assert "rollout/reward_mean" in repr(run.metrics)
    assert [row.label for row in run.evaluations] == ["start", "end"]
    assert observer.all("step") == [(1, 2), (2, 2)]
    assert observer.all("evaluation") == ["start", "end"]
    assert observer.all("checkpoint") == [row.step for row in run.checkpoints] == [2]
    assert observer.all("attempt") == [(row.step, row.phase) for row in run.attempts()]
    assert observer.told[-1] == ("close", None)
    attempt = run.attempts(phase="train")[0]
    assert run.attempt(attempt.id).trajectory.task_id == attempt.task_id
    assert "assistant" in run.dialogue(attempt.id)
    assert run.curve().startswith("<svg")
    assert "certificate" in run.report()
    with run:
        said = [run.best.sample("Guess.", max_tokens=6, seed=1) for _ in range(2)]
        said.append(run.last.sample([{"role": "user", "content": "Guess."}], max_tokens=6, seed=1))
        assert said[0] == said[1] == said[2]
    assert tw.eval(run, eval={"tasks": 3}).row.num_tasks == 3
    assert tw.eval(str(run.directory), overrides=["eval.tasks=1"]).row.num_attempts == 1
    assert step_metrics(tw.Run.open(run.directory)) == step_metrics(run)
    assert tuple(capfd.readouterr()) == ("", "")


def test_keywords_mean_what_the_command_line_means(tmp_path: Path) -> None:
    settings = {**SMALL, "train": {**SMALL["train"], "seed": 3}}
    by_name = tw.train(
        "guess_number", **settings, steps=1, directory=tmp_path / "a", observer=SILENT, overrides=["train.beta1=0.8"]
    )
    by_config = tw.train(by_name.config, directory=tmp_path / "b", observer=SILENT)
    file = tmp_path / "my.yaml"
    file.write_text(
        "env: guess_number\nmodel: tiny\ntrain: {seed: 3, beta1: 0.8, tasks_per_step: 1, steps: 1, save_every: 0}\n"
    )
    by_file = tw.train(file, rollout=SMALL["rollout"], eval={"tasks": 0}, directory=tmp_path / "c", observer=SILENT)
    assert by_name.config.train.seed == 3
    assert by_name.config.train.beta1 == 0.8
    assert step_metrics(by_name) == step_metrics(by_config) == step_metrics(by_file)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"trane": {"seed": 1}}, r"trane is no keyword of turnwise.train; did you mean 'train'\?"),
        ({"train": {"sed": 1}}, r"train.sed is not an option; did you mean train.seed\?"),
        ({"rollout": 4}, r"rollout=4: rollout is a section; expected a dict"),
        ({"method": "grpoo"}, r"grpo"),
        ({"reward": 4}, r"reward=4: reward is a section"),
        ({"loggers": [object()]}, r"loggers: object has no log\(step, values\)"),
    ],
)
def test_a_wrong_keyword_is_refused_with_the_right_one(keywords: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tw.train("guess_number", **{**SMALL, **keywords}, directory=tmp_path / "run", observer=SILENT)


def test_a_world_a_reward_a_method_a_loss_and_a_logger_are_passed_as_objects(tmp_path: Path) -> None:
    class Local(Echo):
        """No other process can import it."""

    class Logger:
        def __init__(self) -> None:
            self.rewards: list[tuple[int, float]] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.rewards.append((step, values["rollout/reward_mean"]))

    def doubled(logprobs: Any, columns: Any) -> Any:
        return -2 * (logprobs - columns.anchor_logprobs_T).exp() * columns.advantages_T

    logger, directory = Logger(), tmp_path / "run"
    objects: dict[str, Any] = {"reward": length_reward, "loss": doubled}
    run = tw.train(Local, **SMALL, **objects, loggers=[logger], steps=2, directory=directory, observer=SILENT)
    assert run.config.env.name == "python:Local"
    assert logger.rewards == run.metric("rollout/reward_mean")
    lengths = [len(run.attempt(row.id).trajectory.turns[-1].reply.content) for row in run.attempts()]
    assert [row.reward for row in run.attempts()] == pytest.approx([length / 100 for length in lengths])
    asked = re.escape("env=Local, reward=length_reward, loss=doubled")
    with pytest.raises(ConfigError, match=f"was started from Python with {asked}.*{asked}"):
        tw.Run.resume(directory, ["train.steps=3"], observer=SILENT)
    more = tw.Run.resume(directory, ["train.steps=3"], env=Local, **objects, observer=SILENT)
    assert more.metrics["step"] == [1, 2, 3]


def test_a_run_is_evaluated_with_the_reward_function_that_it_was_trained_with(tmp_path: Path) -> None:
    def doubled(logprobs: Any, columns: Any) -> Any:
        return -2 * (logprobs - columns.anchor_logprobs_T).exp() * columns.advantages_T

    small = {**SMALL, "eval": {"tasks": 2, "temperature": 0}}
    given: dict[str, Any] = {"reward": length_reward, "loss": doubled}
    with tw.train(Echo, **small, **given, steps=1, directory=tmp_path / "run", observer=SILENT) as run:
        end = run.evaluations[-1].reward
        assert end is not None
        assert end != 0.25, "the world's own reward is 0.25"
        assert run.last.evaluate().row.reward == pytest.approx(end)
        assert tw.eval(run, step="last").row.reward == pytest.approx(end)
        assert tw.eval(run.directory, step="last", reward=length_reward).row.reward == pytest.approx(end)
        asked = r"started from Python with reward=length_reward.*turnwise.eval\(.*, reward=length_reward\)"
        with pytest.raises(ConfigError, match=asked):
            tw.eval(run.directory)
        assert tw.eval(run.last, overrides=["eval.tasks=1"]).row.num_tasks == 1
        assert tw.eval(run, env="guess_number", eval={"tasks": 1}).row.num_tasks == 1


def test_a_model_is_evaluated_on_a_world_that_is_an_object() -> None:
    class Local(Echo):
        """No other process can import it."""

    assert tw.eval("tiny", env=Local, eval={"tasks": 2}).row.reward == 0.25


def test_two_worlds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both are worlds; expected one of them"):
        tw.train(Echo, **SMALL, env="guess_number", directory=tmp_path / "run", observer=SILENT)


def test_a_method_is_passed_as_options_or_built(tmp_path: Path) -> None:
    options = Rloo.Options(kl_coef=0.1)
    run = tw.train("guess_number", **SMALL, method=options, steps=1, directory=tmp_path / "run", observer=SILENT)
    assert run.config.method == options
    built = Grpo(loss_fn="importance_sampling", loss_config={})
    run = tw.train("guess_number", **SMALL, method=built, steps=1, directory=tmp_path / "built", observer=SILENT)
    asked = r"was started from Python with method=Grpo"
    with pytest.raises(ConfigError, match=asked):
        tw.Run.resume(run.directory, ["train.steps=2"], observer=SILENT)
    more = tw.Run.resume(run.directory, ["train.steps=2"], method=built, observer=SILENT)
    assert more.metrics["step"] == [1, 2]


def test_a_world_as_an_object_takes_the_place_of_a_presets_world_and_its_options(tmp_path: Path) -> None:
    world = get_world("search", kind="one_hop", max_turns=2)
    quick: dict[str, Any] = {**SMALL, "directory": tmp_path / "run", "observer": SILENT}
    config = tw.train("search", env=world, **quick, steps=0).config
    assert (config.env.name, config.env.options) == ("python:search", {})
    assert config.rollout.stop == ("</search>", "</answer>"), "the rest of the preset stays"


def test_an_importable_env_class_is_recorded_by_name_and_needed_no_more(tmp_path: Path) -> None:
    from turnwise.bench.slow_world import SlowWorld

    quick = {"options": {"median_s": 1e-6, "p99_s": 1e-5}}
    run = tw.train(SlowWorld, **SMALL, env=quick, steps=1, directory=tmp_path / "run", observer=SILENT)
    assert run.config.env.name == "turnwise.bench.slow_world:SlowWorld"
    world = SlowWorld(median_s=1e-6, p99_s=1e-5, max_turns=1)
    by_object = tw.train(world, **SMALL, steps=1, directory=tmp_path / "object", observer=SILENT)
    assert step_metrics(by_object) == step_metrics(run)
    again = tw.Run.resume(run.directory, ["train.steps=2"], observer=SILENT)
    assert again.metrics["step"] == [1, 2]


def test_an_observer_that_raises_ends_the_run_saved_and_it_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise ValueError("no room left")

    exact = ["rollout.deterministic=true"]  # else the last bits depend on who is decoded together
    whole = tw.train("guess_number", **SMALL, steps=4, directory=tmp_path / "whole", observer=SILENT, overrides=exact)
    broken = tmp_path / "broken"
    with pytest.raises(ObserverError, match=r"Telling.step raised ValueError: no room left.*resume") as caught:
        tw.train("guess_number", **SMALL, steps=4, directory=broken, observer=Telling(fail), overrides=exact)
    assert isinstance(caught.value.__cause__, ValueError)
    assert tw.Run.open(broken).state == "stopped"
    assert [row.step for row in tw.Run.open(broken).checkpoints] == [2]
    assert step_metrics(tw.Run.resume(broken, observer=SILENT)) == step_metrics(whole)


def test_a_run_in_the_background_is_steered_and_stopped_and_resumed(tmp_path: Path) -> None:
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run", observer=SILENT)
    assert run.state == "running"
    run.steer("train.learning_rate", 1e-5)
    with pytest.raises(ConfigError, match=r"train.seed=1: a run that is going on takes train.learning_rate, .* only"):
        run.steer("train.seed", 1)
    while not is_run(run.directory) or run.config.train.learning_rate != 1e-5:
        time.sleep(0.05)  # the run writes down what it obeyed
    run.stop()
    assert run.wait().state == "stopped"
    done = run.checkpoints[-1].step
    assert run.config.train.learning_rate == 1e-5
    more = tw.Run.resume(run.directory, [f"train.steps={done + 1}"], observer=SILENT)
    assert (more.state, more.metrics["step"][-1]) == ("finished", done + 1)


def test_a_stop_that_comes_before_the_first_step_is_obeyed(tmp_path: Path) -> None:
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run", observer=SILENT)
    run.stop()
    assert run.wait().state == "stopped"


def test_a_hard_stop_ends_a_run_in_a_thread(tmp_path: Path) -> None:
    run: tw.Run
    observer = Telling(lambda step: run.stop(now=True) if step == 2 else None)
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run", observer=observer)
    assert run.wait().state == "stopped"
    assert not run.checkpoints, "at once, so nothing was saved"


def test_ctrl_c_while_waiting_stops_the_run_saved_and_is_raised(tmp_path: Path) -> None:
    observer = Telling(lambda step: _thread.interrupt_main() if step == 1 else None)
    run = tw.start("guess_number", **SMALL, steps=10_000, directory=tmp_path / "run", observer=observer)
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert run.state == "stopped"
    assert run.checkpoints


async def test_train_works_where_an_event_loop_runs_as_in_a_notebook(tmp_path: Path) -> None:
    run = tw.train("guess_number", **SMALL, steps=1, directory=tmp_path / "run", observer=SILENT)
    assert run.state == "finished"
    assert tw.eval(run, eval={"tasks": 1}).row.num_tasks == 1
    again = await tw.Run.resume_async(run.directory, ["train.steps=2"], observer=SILENT)
    assert again.metrics["step"] == [1, 2]


async def test_cancelling_an_awaited_run_stops_it_saved(tmp_path: Path) -> None:
    config = tw.Config.model_validate(
        {**SMALL, "model": {"name": "tiny"}, "run": {"dir": str(tmp_path / "run")}}
        | {"train": {**SMALL["train"], "steps": 10_000}}
    )
    observer = Telling()
    task = asyncio.create_task(tw.Run.start_async(config, observer=observer))
    while not observer.all("step"):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = tw.Run.open(tmp_path / "run")
    assert (run.state, bool(run.checkpoints)) == ("stopped", True)


def test_a_service_that_is_given_makes_the_clients_and_stays_open(tmp_path: Path) -> None:
    """Wherever it keeps its own checkpoints, those of the run are found with the run."""
    directory = tmp_path / "run"
    settings: dict[str, Any] = {**SMALL, "eval": {"tasks": 1}, "observer": SILENT}
    with tw.ServiceClient(data_dir=tmp_path / "elsewhere") as service:
        with tw.train("guess_number", **settings, steps=1, directory=directory, service=service) as run:
            assert isinstance(run.best.sample("Guess.", max_tokens=4, seed=0), str)
        base = service.create_sampling_client(base_model="tiny")
        assert base.get_base_model() == "tiny"
        moved = directory.rename(tmp_path / "moved")
        with tw.Run.open(moved) as opened:
            files = opened.best.files
            assert files is not None
            assert files.is_relative_to(moved)
            assert service.create_sampling_client(model_path=str(files)).get_base_model() == "tiny"
        again = tw.Run.resume(moved, ["train.steps=2"], service=service, observer=SILENT)
        assert [step for step, _ in again.metric("time/step_s")] == [1, 2]
        assert again.checkpoints[-1].step == 2
        assert isinstance(again.last.sample("Guess.", max_tokens=4, seed=0), str)
        again.close()
    assert not list((tmp_path / "elsewhere").rglob("weights"))
