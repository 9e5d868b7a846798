"""The front door: `turnwise.train(...)` starts a run and gives it back as a `Run`.

    run = turnwise.train("text_to_sql", model="smollm2", method="grpo", steps=32)
    run.metrics["rollout/reward_mean"]
    run.best.sample("Which customers ordered twice?")

The command line, comparisons and recipes call this too. Nothing here prints: what a person sees comes from an
`Observer`, by default one that suits the terminal or the notebook.

Where the loop runs: in the calling thread when that is the main thread and has no event loop, so that Ctrl-C reaches
it; else in a thread of its own, as in a notebook or after `turnwise.start`. In both cases the first Ctrl-C ends the run
at the next safe place, saves it and raises KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.doctor import Finding, diagnose, finding_lines
from turnwise.envs.config import EnvConfig
from turnwise.envs.rewarded import RewardFunction
from turnwise.errors import ConfigError
from turnwise.losses.outside import LossFunction
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import AttemptRow, CheckpointRow, EvaluationRow, Phase, StoredAttempt
from turnwise.runtime.blocking import has_event_loop
from turnwise.runtime.closing import ClosedOnExit
from turnwise.runtime.suggest import did_you_mean
from turnwise.runtime.torchrun import refuse_torchrun
from turnwise.training.arguments import Target, check_overrides_list, read_arguments, to_overrides
from turnwise.training.checkpoint import best_evaluation
from turnwise.training.evaluate import Evaluation
from turnwise.training.objects import NO_OBJECTS, PythonObjects
from turnwise.training.policy import EXPECTED_POLICY, PolicySampler, WorldChoice, check_is_there, find_policy
from turnwise.training.session import TrainingSession
from turnwise.training.setup import AnyService, Setup, check_service, set_up_new, set_up_resume
from turnwise.training.steer import give_order, read_settings
from turnwise.training.table import MetricTable, UnknownMetricError
from turnwise.watch.catalogue import find_metric
from turnwise.watch.curve import SvgPicture, run_svg
from turnwise.watch.loggers import MetricLogger, check_metric_loggers
from turnwise.watch.observer import Observer, ObserverError, check_observer
from turnwise.watch.report import dialogue_lines, report_lines
from turnwise.watch.status import is_training, read_status
from turnwise.watch.terminal import open_view
from turnwise.watch.watchdog import StalledError

State = Literal["running", "finished", "stopped", "failed"]
POLL_S = 0.05
"""How often `wait` and `wait_async` look whether the run is over."""
ELSEWHERE_POLL_S = 0.25
"""How often they look at a run that trains elsewhere; each look holds the run's lock for a moment."""


def train(
    target: Target,
    *,
    model: Any = None,
    method: Any = None,
    steps: int | None = None,
    directory: str | Path | None = None,
    reward: RewardFunction | Mapping[str, Any] | None = None,
    loss: LossFunction | str | None = None,
    loggers: Sequence[MetricLogger] = (),
    overrides: Sequence[str] = (),
    service: AnyService | None = None,
    observer: Observer | None = None,
    wait: bool = True,
    **sections: Any,
) -> Run:
    """Train a model on a world, and give back the finished run. It works in a script and in a notebook.

    Args:
        target: A preset, a YAML file, a world's name, a `Config`, an env class, or a world as an object.
        model: A model's name, or the options of the section `model` as a dict.
        method: A method's name, the options of the section `method`, a class with `Options`, or a built method.
        steps: Optimizer steps (`train.steps`).
        directory: Where the run is kept (`run.dir`); default: a new directory below `runs`.
        reward: A function of (task, messages) that takes the place of the world's rewards, or the options of the
            section `reward`.
        loss: A function of (logprobs, columns) that gives the loss of each token, or a loss's name
            (`method.loss_fn`); `turnwise.losses.outside` says more.
        loggers: Objects with `log(step, values)`, told every step's metrics.
        overrides: Options as on the command line: `["train.seed=1"]`.
        service: Makes the training and sampling clients; default: one in this process, or at `model.base_url`.
        observer: Is told what happens; default: a view for the terminal or the notebook. `Observer()` is silent.
        wait: False gives the run back at once, while it goes on in a thread of its own (`turnwise.start`).
        sections: Any section of the config as a dict: `train={"seed": 1}, rollout={"max_turns": 4}`.

    Raises:
        ConfigError: A setting cannot work; nothing was spent.
        KeyboardInterrupt: Ctrl-C stopped the run, which was saved before; go on with `Run.resume(directory)`.

    >>> import turnwise as tw
    >>> quick = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    >>> run = tw.train("guess_number", model="tiny", steps=2, **quick)
    >>> run.metrics["step"]
    [1.0, 2.0]
    """
    given = {"model": model, "method": method, "steps": steps, "directory": directory, "reward": reward, "loss": loss}
    objects = PythonObjects(loggers=check_metric_loggers(loggers))
    config, objects, notes = read_arguments(target, {**given, **sections}, overrides, objects)
    return Run.start(set_up_new(config, objects, notes=notes), service=service, observer=observer, wait=wait)


def start(target: Target, **arguments: Any) -> Run:
    """Start a run, with the arguments of `train`, and give it back at once; it goes on in a thread of its own.

    `run.wait()` waits for the end. In an event loop, write `run = await tw.start(...).wait_async()`.

    >>> import turnwise as tw
    >>> quick = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    >>> run = tw.start("guess_number", model="tiny", steps=500, **quick)
    >>> run.stop()
    >>> run.wait().state
    'stopped'
    """
    return train(target, wait=False, **arguments)


def evaluate(
    target: str | Path | Run | PolicySampler,
    *,
    env: Any = None,
    reward: RewardFunction | Mapping[str, Any] | None = None,
    step: str | int | None = None,
    overrides: Sequence[str] = (),
    **sections: Any,
) -> Evaluation:
    """Play held-out tasks with a policy. Its public name is `turnwise.eval`.

    Args:
        target: A run or its directory (its best checkpoint), a checkpoint, a model's name, or a policy.
        env: The world to play, by name or as an object, or options of the section `env`; default: the run's own.
        reward: A function of (task, messages) that takes the place of the world's rewards, or the options of the
            section `reward`. Default: the function that the run was trained with; another world has its own rewards. A
            directory cannot hold a function: pass the same one again.
        step: best, last or a number, for runs.
        overrides: Options as on the command line: `["eval.tasks=8"]`.
        sections: Any section of the config as a dict: `eval={"tasks": 8}`.

    >>> import turnwise as tw
    >>> tw.eval("tiny", env="guess_number", eval={"tasks": 2}).row.num_tasks
    2
    """
    if isinstance(env, Mapping | EnvConfig):
        is_config = isinstance(env, EnvConfig)
        options = env.model_dump(mode="json", exclude_unset=True) if is_config else dict(cast(Mapping[str, Any], env))
        env, sections["env"] = options.pop("name", None), options
    if reward is not None and not callable(reward):
        reward, sections["reward"] = None, reward
    world = WorldChoice.of(env, reward)
    chosen = [*to_overrides(sections, "turnwise.eval"), *check_overrides_list(overrides)]
    if isinstance(target, PolicySampler):
        if step is not None:
            raise ConfigError(f"step={step!r}: {target} is one step already; take another with run.policy({step!r})")
        return target.evaluate_with(world, chosen)
    own = target.objects if isinstance(target, Run) else NO_OBJECTS
    place = _check_policy(target.directory if isinstance(target, Run) else target)
    with find_policy(place, world, step, chosen, own=own) as policy:
        if world.name is None and not is_run(Path(place).expanduser()):
            raise ConfigError(f"{place} does not say which world it is for; add env=NAME")
        return policy.evaluate()


def _check_policy(target: object) -> str:
    """Refuse what is no policy, and a path at which there is nothing."""
    if not isinstance(target, str | Path):
        name = getattr(target, "__name__", type(target).__name__)
        raise ConfigError(
            f"{name} is no policy; {EXPECTED_POLICY}. A world goes to env: turnwise.eval(run, env={name})"
        )
    check_is_there(target)
    return str(target)


class Run(ClosedOnExit):
    """One training run: under way, finished, or read from its directory.

    >>> import turnwise as tw
    >>> quick = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    >>> run = tw.train("guess_number", model="tiny", steps=1, **quick)
    >>> again = tw.Run.open(run.directory)
    >>> again.state, len(again.attempts(phase="train")) > 0
    ('finished', True)
    """

    def __init__(self, directory: Path, session: TrainingSession | None = None) -> None:
        """`start`, `resume` and `open` make these."""
        self.directory = directory
        self._session = session
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._outcome: State = "running"
        self._error: BaseException | None = None
        self._policies: dict[str, PolicySampler] = {}

    # --- ways to get one

    @classmethod
    def start(
        cls,
        config: Config | Setup,
        *,
        service: AnyService | None = None,
        observer: Observer | None = None,
        on_stuck: Callable[[StalledError], None] | None = None,
        wait: bool = True,
    ) -> Run:
        """Begin a run.

        Args:
            service: Makes the training and sampling clients; it stays open. Checkpoints are kept in the run's
                directory, or by a service elsewhere, which `model.base_url` must name too.
            observer: Is told what happens; default: a view for the terminal or the notebook.
            on_stuck: Called in another thread when the run's event loop is blocked for good; default: the run is
                given up and `wait` raises.
            wait: False returns at once, and the run goes on in a thread of its own.
        """
        refuse_torchrun("a run that a Python program starts")
        setup = config if isinstance(config, Setup) else set_up_new(config)
        check_service(setup.config, service)
        view = open_view(setup.config.train.steps) if observer is None else check_observer(observer)
        run = cls(setup.directory)
        run._session = TrainingSession(setup, [view], service, on_stuck or run._give_up)
        run._session.claim()
        run.directory = run._session.setup.directory
        if wait and threading.current_thread() is threading.main_thread() and not has_event_loop():
            run._train()
            return run.wait()
        run._thread = threading.Thread(target=run._train, name="turnwise-train", daemon=True)
        run._thread.start()
        return run.wait() if wait else run

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        overrides: Sequence[str] = (),
        **options: Any,
    ) -> Run:
        """Go on with a run from its latest checkpoint, as if it had not stopped.

        Args:
            overrides: Settings to change, as `train.steps=100`; model, world and method stay.
            options: `env`, `reward`, `method`, `loss`, `loggers`: the objects that the run was started with, if it was;
                and `service`, `observer`, `on_stuck` and `wait`, as for `start`.
        """
        check_overrides_list(overrides)
        given = {name: options.pop(name) for name in ("env", "reward", "method", "loss", "loggers") if name in options}
        given["loggers"] = check_metric_loggers(given.get("loggers", ()))
        setup = set_up_resume(Path(directory).expanduser(), overrides, PythonObjects(**given))
        return cls.start(setup, **options)

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """A run that is there, to read it; also one that trains in another process, to stop or to steer it."""
        with RunReader(directory) as run:
            return cls(run.directory)

    @classmethod
    async def start_async(cls, config: Config | Setup, **options: Any) -> Run:
        """`start` for code in an event loop: wait for the end without blocking the loop. Cancelling stops the run.

        It takes a `Config`. With the arguments of `turnwise.train`: `run = await tw.start(...).wait_async()`.
        """
        options["wait"] = False
        run = await asyncio.to_thread(cls.start, config, **options)
        return await run.wait_async()

    @classmethod
    async def resume_async(cls, directory: str | Path, overrides: Sequence[str] = (), **options: Any) -> Run:
        """`resume` for code in an event loop."""
        options["wait"] = False
        run = await asyncio.to_thread(cls.resume, directory, overrides, **options)
        return await run.wait_async()

    # --- while it goes on

    @property
    def state(self) -> State:
        """running, finished, stopped (it can be resumed) or failed."""
        if self._session is not None:
            return self._outcome
        if is_training(self.directory):
            return "running"
        status = read_status(self.directory)
        return status.phase if status is not None and status.phase in ("finished", "failed") else "stopped"

    def wait(self) -> Run:
        """Wait until the run is over, and raise what ended it if that was an error.

        The first Ctrl-C stops the run at the next safe place and saves it, a second one stops it at once; both then
        raise KeyboardInterrupt. A run that was opened trains elsewhere: Ctrl-C leaves it alone, `wait` raises nothing
        of it, and `state` says how it ended.
        """
        while self._session is None and self.state == "running":
            time.sleep(ELSEWHERE_POLL_S)
        is_interrupted = False
        while self._session is not None:
            try:
                if self._over.wait(POLL_S):  # with a timeout, because a wait without one may sleep through a signal
                    break
            except KeyboardInterrupt:
                self.stop(now=is_interrupted)
                is_interrupted = True
        if self._error is not None:
            raise self._error
        if is_interrupted:
            raise self._interrupted()
        return self

    async def wait_async(self) -> Run:
        """`wait` for code in an event loop. Cancelling stops the run, but not one that trains elsewhere."""
        while self._session is None and self.state == "running":
            await asyncio.sleep(ELSEWHERE_POLL_S)
        if self._session is None:
            return self
        try:
            while not self._over.is_set():
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.to_thread(self._over.wait)
            raise
        return self.wait()

    def stop(self, *, now: bool = False) -> None:
        """Ask the run to end: after the step that it learns, saved; or `now`, at its last checkpoint."""
        if self._session is None:
            self._check_trained_elsewhere("stop")
            give_order(self.directory, stop="hard" if now else "graceful")
        elif now:
            self._session.interrupt.stop_now()
        else:
            self._session.interrupt.ask()

    def steer(self, setting: str, value: float) -> None:
        """Change a setting from the next step on, such as `train.learning_rate` (`training.steer.SETTINGS`)."""
        config = self._session.setup.config if self._session is not None else self.config
        settings = read_settings([f"{setting}={value!r}"], config)
        if self._session is None:
            self._check_trained_elsewhere("steer")
            give_order(self.directory, settings=settings)
        elif self._over.is_set() or not self._session.steering.put(settings):
            raise ConfigError(f"the run in {self.directory} is over; there is nothing to steer")

    # --- what it did

    @property
    def config(self) -> Config:
        """The run's config, with what was steered since."""
        with RunReader(self.directory) as run:
            return config_from_yaml(run.config_yaml, str(run.directory))

    @property
    def objects(self) -> PythonObjects:
        """What the run was given as Python objects; none for a run that was opened."""
        return self._session.setup.objects if self._session is not None else NO_OBJECTS

    @property
    def metrics(self) -> MetricTable:
        """A column for every metric, a row for every step; `run.metrics.to_pandas()` is a DataFrame."""
        with RunReader(self.directory) as run:
            return MetricTable.read(run)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric; of `warmup/` and `critic/`, the step counts batches of that phase."""
        with RunReader(self.directory) as run:
            if name not in (names := run.metric_names()) and find_metric(name) is None:
                raise UnknownMetricError(name, names)
            return run.metric(name)

    @property
    def evaluations(self) -> list[EvaluationRow]:
        """Every evaluation on held-out tasks, oldest first."""
        with RunReader(self.directory) as run:
            return run.evaluations()

    @property
    def checkpoints(self) -> list[CheckpointRow]:
        """The checkpoints that are kept, oldest first."""
        with RunReader(self.directory) as run:
            return run.checkpoints()

    def attempts(self, *, phase: Phase | None = None, step: int | None = None) -> list[AttemptRow]:
        """A line about each stored attempt, oldest first; `phase` is train or eval."""
        phases: tuple[str, ...] = get_args(Phase)
        if phase is not None and phase not in phases:
            raise ConfigError(f"phase={phase!r}{did_you_mean(phase, phases)}; expected {' or '.join(phases)}")
        with RunReader(self.directory) as run:
            return run.attempts(phase=phase, step=step)

    def attempt(self, attempt_id: int) -> StoredAttempt:
        """One attempt with its tokens, logprobs, rewards and advantages."""
        with RunReader(self.directory) as run:
            return run.attempt(attempt_id)

    def dialogue(self, attempt_id: int) -> str:
        """One attempt as a conversation, each reply with its reward."""
        with RunReader(self.directory) as run:
            row = next((row for row in run.attempts() if row.id == attempt_id), None)
            return "\n".join(dialogue_lines(run, row or run.attempt(attempt_id).row))

    @property
    def best(self) -> PolicySampler:
        """The checkpoint with the best evaluation; the last one where nothing was evaluated."""
        return self.policy("best")

    @property
    def last(self) -> PolicySampler:
        """The last checkpoint."""
        return self.policy("last")

    def policy(self, step: int | str) -> PolicySampler:
        """The checkpoint of a step, as something to talk to and to measure."""
        key = str(step)
        if key not in self._policies:
            self._policies[key] = find_policy(str(self.directory), step=key, own=self.objects)
        return self._policies[key]

    def report(self) -> str:
        """What a finished run prints: before and after, where the curve is, the certificate and some dialogues."""
        config = self.config
        title = f"{config.env.name}, {config.model.alias or config.model.name}, {config.method.name}"
        with RunReader(self.directory) as run:
            told = finding_lines(diagnose(run))
            lines = report_lines(
                run, best_evaluation(run), title=title, num_dialogues=config.run.dialogues, diagnosis=told
            )
            return "\n".join(lines)

    def diagnose(self) -> list[Finding]:
        """Why the run does not learn, the deepest reason first; empty if nothing is found."""
        return diagnose(self.directory)

    def curve(self) -> SvgPicture:
        """Held-out success and reward over steps, as an SVG picture; a notebook shows it."""
        with RunReader(self.directory) as run:
            return SvgPicture(run_svg(run, self.directory.name, best_evaluation(run)))

    def close(self) -> None:
        """Free the models of `best` and `last`; a run that goes on is not touched."""
        for policy in self._policies.values():
            policy.close()
        self._policies.clear()

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, {self.state})"

    # --- inside

    def _train(self) -> None:
        """Run the whole session; this is the loop's thread."""
        assert self._session is not None
        outcome: State = "failed"
        try:
            outcome = self._session.run()
            if self._session.interrupt.is_by_signal:
                self._error = self._interrupted()
        except ObserverError as error:
            self._error, outcome = error, error.outcome
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the thread of the caller
            self._error = self._error or error
        finally:
            self._outcome = outcome
            self._over.set()

    def _interrupted(self) -> KeyboardInterrupt:
        """Ctrl-C or SIGTERM stopped the run. No subclass: Python ends a script with 130 for KeyboardInterrupt alone."""
        return KeyboardInterrupt(f"stopped; {self.directory} was saved")

    def _give_up(self, error: StalledError) -> None:
        """The loop is blocked for good: let `wait` raise, or, where it is blocked itself, interrupt it."""
        self._error, self._outcome = error, "failed"
        self._over.set()
        if self._thread is None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _check_trained_elsewhere(self, verb: str) -> None:
        if not is_training(self.directory):
            raise ConfigError(f"nobody trains in {self.directory} at the moment; there is nothing to {verb}")
