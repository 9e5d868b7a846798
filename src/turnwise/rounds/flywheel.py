"""`turnwise.flywheel`: rounds that turn a model's own attempts into the next model.

    done = turnwise.flywheel("key_door_tiny", directory="runs/flywheel")
    [row["success"] for row in done.evaluations]           # on the same held-out tasks after every round

    round:  play -> judge -> route -> continued -> sft -> preference -> rl -> evaluate -> tasks

A stage is done when the file says so. The same call goes on with a flywheel that was stopped or killed: play goes on
with the groups that are missing, and a run that had begun is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from turnwise.config.config import Config
from turnwise.envs.difficulty import levels_of
from turnwise.envs.registry import load_target
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.opponents.seating import two_sided
from turnwise.rounds.config import SECTION, WORDS, FlywheelConfig, FlywheelFile, read_file
from turnwise.rounds.dial import LevelTasks, TaskDial
from turnwise.rounds.learn import StageRuns
from turnwise.rounds.play import RoundPlayer
from turnwise.rounds.refresh import STAGE, check_refresh, is_due, refresh, verdict_of
from turnwise.rounds.route import route
from turnwise.rounds.store import PoolStore, is_flywheel
from turnwise.rounds.tables import OVERALL, POOLS
from turnwise.rounds.verdicts import check_source, open_source
from turnwise.training.arguments import check_overrides_list
from turnwise.training.objects import NO_OBJECTS, PythonObjects
from turnwise.training.setup import find_model
from turnwise.training.start_from import resolve_start
from turnwise.training.stored import origin_of
from turnwise.watch.observer import Observer
from turnwise.watch.status import run_lock

Report = Callable[[str], None]
MAY_CHANGE = ("rounds", "dir")
"""Options that may differ from those of the call that began the flywheel."""


def flywheel(
    target: str | Path,
    *,
    directory: str | Path | None = None,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
    env: Any = None,
    observer: Observer | None = None,
) -> Flywheel:
    """Run a flywheel to its last round, and give it back; go on with one that is there.

    Args:
        target: A YAML file with the section `flywheel` beside those of a run, or a shipped one.
        directory: Where it is kept (`flywheel.dir`).
        rounds: Rounds in all (`flywheel.rounds`).
        overrides: Options as on the command line: `["flywheel.tasks=8", "train.seed=1"]`.
        env: The world as an object, in place of the file's `env`; the call that goes on passes it again.
        observer: Is told one line about every stage (`message`), and what happens in the runs; default: nobody.

    Raises:
        ConfigError: A setting cannot work, or is not the one that the flywheel began with; nothing was spent.

    >>> import turnwise as tw
    >>> small = ["warmup.steps=1", "flywheel.tasks=2", "flywheel.samples=2", "flywheel.rl_steps=1"]
    >>> wheel = tw.flywheel("key_door_tiny", rounds=1, overrides=[*small, "flywheel.eval_tasks=2"])
    >>> [row["round"] for row in wheel.evaluations]
    [0, 1]
    """
    given = [*check_overrides_list(overrides)]
    given += [f"{SECTION}.dir={json.dumps(str(directory))}"] if directory is not None else []
    given += [f"{SECTION}.rounds={rounds}"] if rounds is not None else []
    wheel = Flywheel(read_file(target, given), PythonObjects(env=env) if env is not None else NO_OBJECTS)
    wheel.run(observer or Observer())
    return wheel


class Flywheel:
    """One flywheel: its directory, what it did, and the way on."""

    def __init__(self, file: FlywheelFile, objects: PythonObjects = NO_OBJECTS) -> None:
        """Prepare a flywheel; nothing is written yet."""
        self.file = file
        self.directory = file.directory
        self._objects = objects

    @property
    def options(self) -> FlywheelConfig:
        return self.file.flywheel

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Success on all held-out tasks after each round; round 0 is before the first."""
        return self.query(f"SELECT * FROM evaluations WHERE difficulty = {OVERALL} ORDER BY round")

    @property
    def model(self) -> str:
        """The checkpoint that the last stage left."""
        with PoolStore.open(self.directory, read_only=True) as store:
            return _current(store)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of the flywheel's file, such as `SELECT * FROM samples WHERE in_sft`."""
        with PoolStore.open(self.directory, read_only=True) as store:
            return [dict(row) for row in store.query(sql)]

    def run(self, observer: Observer) -> None:
        """Do what is left to do."""
        check_source(self.options)
        check_refresh(self.options)
        check_read(self.file.run, self._objects)
        if not self.file.run.model.base_url:
            find_model(self.file.run)
        with run_lock(self.directory), self._open() as store:
            rounds = _Rounds(store, self._config(store), self.options, self._objects, observer)
            rounds.begin(observer.message)
            for number in range(1, self.options.rounds + 1):
                if not rounds.round(number, observer.message):
                    break

    def _open(self) -> PoolStore:
        """The file that is there, if it was begun with the same settings; else a new one."""
        if is_flywheel(self.directory):
            store = PoolStore.open(self.directory)
            _check_same(json.loads(store.meta("settings") or "{}"), self.file.to_tree(), str(self.directory))
            return store
        config = resolve_start(self.file.run)
        origin = origin_of(config)
        meta = {
            "settings": json.dumps(self.file.to_tree()),
            "world": origin.world,
            "base_model": origin.model,
            "start": config.model.start_from,
        }
        return PoolStore.create(self.directory, meta)

    def _config(self, store: PoolStore) -> Config:
        """What the runs have in common, with the start that was resolved when the flywheel began."""
        config = self.file.run
        model = config.model.model_copy(update={"start_from": store.meta("start") or ""})
        return config.model_copy(update={"model": model})


UNREAD = {
    "env": {
        "tasks": "proposes tasks itself",
        "difficulty": "has flywheel.start_level and flywheel.dial",
        "curriculum": "has flywheel.start_level and flywheel.dial",
        "mix": "plays one world",
    },
    "train": {"steps": "has flywheel.sft_steps, flywheel.rl_steps and the like"},
    "eval": {
        "tasks": "has flywheel.eval_tasks",
        "every": "evaluates after every round",
        "keep_best": "goes on with the last checkpoint of every stage",
    },
    "run": {"dir": "has flywheel.dir", "name": "has flywheel.dir"},
    "cluster": {"env_workers": "plays tasks of several levels, and a worker serves one"},
    "data": {"dialogues": "trains on its own pools", "pairs": "trains on its own pools"},
}
"""Options of a run that a flywheel sets itself, and why."""


def check_read(config: Config, objects: PythonObjects = NO_OBJECTS) -> None:
    """Refuse options of a run that a flywheel would not read."""
    for section, reasons in UNREAD.items():
        changed = getattr(config, section).changed_options()
        for name in (name for name in reasons if name in changed):
            raise ConfigError(f"{section}.{name} is not read: a flywheel {reasons[name]}; leave it out")
    for name in config.opponent.changed_options():
        raise ConfigError(f"opponent.{name} is not read: a flywheel plays against scripts of its world; leave it out")
    sided = two_sided(objects.make_world(config.env, max_turns=config.rollout.max_turns, memory=config.memory))
    if sided is not None and sided.opponent not in sided.scripted_opponents:
        raise ConfigError(
            f"env.options.opponent={sided.opponent} is a model, and a flywheel plays against scripts of its world; "
            f"expected {', '.join(sided.scripted_opponents)}"
        )
    target = objects.env if objects.env is not None else load_target(config.env.name)
    levels = levels_of(target, config.env.options)
    dialled = sorted({name for level in levels for name in level} & set(config.env.options))
    if dialled:
        raise ConfigError(
            f"env.options.{dialled[0]} is not read: the levels of {config.env.name} set it; leave it out, and set "
            "flywheel.start_level and flywheel.dial"
        )


def _check_same(began: dict[str, Any], now: dict[str, Any], directory: str) -> None:
    """Refuse to go on with other settings: half of the rounds would be another experiment."""
    for section, before, after in _pairs(began, now):
        for name in sorted({*before, *after}):
            is_free = section == SECTION and name in MAY_CHANGE
            if not is_free and before.get(name) != after.get(name):
                raise ConfigError(
                    f"{directory} began with {section}.{name}={before.get(name)}, and now it is {after.get(name)}; "
                    "choose another flywheel.dir, or leave it as it was"
                )


def _pairs(began: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    defaults = FlywheelConfig().model_dump(mode="json")  # an option may be newer than the flywheel
    pairs = [(SECTION, {**defaults, **began.get(SECTION, {})}, now[SECTION])]
    return pairs + [(name, began.get("run", {}).get(name, {}), after) for name, after in now["run"].items()]


def _current(store: PoolStore) -> str:
    """The weights that the last stage that trains left; empty: the base model."""
    order = ("warmup", *POOLS)
    rows = [row for row in store.query("SELECT * FROM stages") if row["stage"] in order]
    if not rows:
        return store.meta("start") or ""
    last = max(rows, key=lambda row: (row["round"], order.index(row["stage"])))
    return str(json.loads(last["detail"])["model"])


class _Rounds:
    """Does the stages of rounds, each once."""

    def __init__(
        self, store: PoolStore, config: Config, options: FlywheelConfig, objects: PythonObjects, observer: Observer
    ) -> None:
        self._store = store
        self._config = config
        self._options = options
        self._dial = TaskDial(store, LevelTasks(config=config, objects=objects), options)
        self._runs = StageRuns(store, config, options, objects, observer)
        self._player = RoundPlayer(store, config, objects)

    def begin(self, report: Report) -> None:
        """Draw the held-out tasks, then the first ones; warm up; evaluate what there is before the first round."""
        if self._store.stage(0, "tasks") is None:
            with self._store.transaction():
                self._dial.hold_out()
                num_tasks = self._dial.begin()
                self._store.finish(0, "tasks", proposed=num_tasks, held_out=len(self._store.held_out()))
        if self._store.stage(0, "warmup") is None and self._config.warmup.steps:
            self._store.finish(0, "warmup", model=self._runs.warm_up())
            report("round 0  warm-up done")
        self._evaluate(0, report)

    def round(self, number: int, report: Report) -> bool:
        """One round; stages that are done are left alone. False: there is no task left to play."""
        if self._store.stage(number, "play") is None and not self._store.active_tasks():
            report(f"round {number}  every task of the world is solved and retired; there is nothing left to play")
            return False
        if self._store.stage(number, "play") is None:
            place = self._runs.place(number, "play_tasks.jsonl")
            self._player.play(number, _current(self._store), self._store.active_tasks(), self._options.samples, place)
            (played,) = self._store.query(
                "SELECT count(*) AS attempts, sum(num_tokens) AS tokens FROM attempts WHERE round = ?", number
            )
            self._store.finish(number, "play", **played)
            report(f"round {number}  played {played['attempts']} attempts")
        if is_due(self._options, number) and self._store.stage(number, STAGE) is None:
            detail = refresh(self._store, self._options, self._config, number)
            self._store.finish(number, STAGE, **detail)
            report(f"round {number}  outcome model trained again on {detail['attempts']} verified attempts")
        if self._store.stage(number, "judge") is None:
            self._judge(number, report)
        if self._store.stage(number, "route") is None:
            self._route(number, report)
        for stage in POOLS:
            if self._store.stage(number, stage) is None:
                detail = self._runs.train(number, stage, _current(self._store))
                self._store.finish(number, stage, **detail)
                if "skipped" not in detail:
                    report(f"round {number}  {stage}: {detail['steps']} steps")
        self._evaluate(number, report)
        if self._store.stage(number, "tasks") is None:
            with self._store.transaction():
                detail = self._dial.turn(number, self._store.attempts("a.round = ?", number))
                self._store.finish(number, "tasks", **detail)
            words = f"retired {detail['retired']}, proposed {detail['proposed']}, level {detail['level']}"
            report(f"round {number}  tasks: {words}")
        return True

    def _judge(self, number: int, report: Report) -> None:
        verdict = verdict_of(self._store, self._options, number)
        source = open_source(self._options, self._config, self._store.directory, verdict)
        try:
            todo = self._store.attempts("a.round = ? AND v.attempt_id IS NULL", number)
            for _, group in groupby(todo, key=lambda one: one.task_id):
                self._store.add_verdicts(source.judge(list(group)))
        finally:
            source.close()
        rows = self._store.query(
            "SELECT avg(v.is_good) AS good, avg(v.is_good = a.is_success) AS agreement FROM verdicts v "
            "JOIN attempts a ON a.id = v.attempt_id WHERE a.round = ?",
            number,
        )
        good, agreement = rows[0]["good"], rows[0]["agreement"]
        bound = self._config.alarms.min_outcome_agreement
        has_parted = self._options.verdict not in WORDS and agreement is not None and agreement < bound
        self._store.finish(number, "judge", good_share=good, agreement=agreement, has_parted=has_parted)
        if has_parted:
            report(
                f"round {number}  alarm: outcome model and verifier agree on {agreement:.0%} of the attempts, less "
                f"than alarms.min_outcome_agreement={bound:g}; train it again (flywheel.refresh_verdict)"
            )

    def _route(self, number: int, report: Report) -> None:
        attempts = self._store.attempts("a.round = ?", number)
        if not attempts:
            raise TurnwiseError(f"round {number} has no attempts to route; look at the table `dropped`")
        routes = route(attempts, self._options)
        counts = {
            "sft": len(routes.sft),
            "rl": len(routes.rl),
            "preference": len(routes.preference),
            "continued": len(routes.continued),
            "duplicates": routes.num_duplicates,
        }
        with self._store.transaction():
            self._store.insert("sft", [(one, number) for one in routes.sft])
            self._store.insert("continued", [(one, number) for one in routes.continued])
            self._store.insert("rl", [(number, task, share) for task, share in routes.rl])
            self._store.insert("preference", [(*pair, number) for pair in routes.preference])
            self._store.finish(number, "route", **counts)
        good = self._store.stage(number, "judge") or {}
        words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        report(f"round {number}  {good.get('good_share') or 0:.0%} good; routed {words or 'nothing'}")

    def _evaluate(self, number: int, report: Report) -> None:
        if self._store.stage(number, "evaluate") is not None:
            return
        place = self._runs.place(number, "held_out.jsonl")
        rows = self._player.evaluate(number, _current(self._store), self._store.held_out(), place)
        with self._store.transaction():
            self._store.insert("evaluations", rows)
            self._store.finish(number, "evaluate")
        _, _, num_tasks, _, _, success, low, high, reward, _ = rows[0]
        measured = f"reward {reward:.3f}" if success is None else f"success {success:.1%} ({low:.1%} to {high:.1%})"
        report(f"round {number}  held-out: {measured} on {num_tasks} tasks")
