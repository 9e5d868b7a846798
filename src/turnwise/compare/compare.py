"""`turnwise compare`: methods x worlds x seeds, side by side on one device, at equal sampled tokens.

Steps of different methods cost different amounts, and methods differ in how many of the sampled tokens they train on,
so neither steps nor trained tokens compare them fairly. Every run of a world may sample the same number of tokens,
including those of a critic's pre-training. The trained tokens and the time of each run are reported beside the result.
A method that reads stored data samples nothing and runs for its `train.steps`.

Runs of one seed start from the same weights and play the same tasks. Their warm-up is the same too, so it is done once
per world and seed, and every method continues from there. Variants that change the warm-up or how it is measured, such
as a memory or other opponents of an evaluation, have one of their own.

Every run has its own run directory, made by the same code as `turnwise train`. A run that fails does not affect the
others, and the same command continues an interrupted comparison. The result of a finished run is in a small file beside
its directory. If that file exists, the run is done, also on another machine and without the directory.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.compare.figure import Curve, comparison_svg
from turnwise.compare.request import ComparedWorld, CompareRequest, Variant, bounded, parse_request, samples
from turnwise.compare.results import Result, read_result, stored_result, write_result
from turnwise.compare.runs import GridJob, RunOrder, run_jobs
from turnwise.compare.table import markdown, table_lines, to_json
from turnwise.compare.view import GridView
from turnwise.config.config import Config
from turnwise.config.critic import CriticConfig
from turnwise.config.files import config_from_yaml, config_to_tree, config_to_yaml, tree_to_config
from turnwise.credit.shaping import RewardConfig
from turnwise.errors import ConfigError
from turnwise.methods.base import DataConfig
from turnwise.methods.grpo import Grpo
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.server_options import SHARED_OPTIONS
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.writer import RunWriter
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.setup import find_model
from turnwise.watch.alarms import AlarmConfig
from turnwise.watch.status import LOCK_FILE, STATUS_FILE

AFTER_WARMUP = (
    *("steps", "max_sampled_tokens", "max_empty_steps", "learning_rate", "tasks_per_step", "substeps", "max_staleness"),
    *("min_batch", "max_wait", "save_every", "keep_checkpoints", "accumulate", "lr_schedule", "lr_warmup", "lr_floor"),
)
"""Options of `train` that a warm-up does not depend on."""
AFTER_WARMUP_OPPONENT = (
    *("train", "snapshot_every", "keep_last", "keep_files"),
    *("base_weight", "last_weight", "best_weight", "scripted_weight"),
)
"""Options of `opponent` that neither a warm-up nor its evaluation depends on: they say who plays in training."""


def run_compare(arguments: Sequence[str], *, out: str | None) -> int:
    """Run the command; returns the exit code."""
    request = parse_request(arguments, out)
    grid = Grid.plan(request)
    for model in {(one.config.model.name, one.config.model.alias): one.config for one in grid.runs}.values():
        if not model.model.base_url:
            find_model(model)  # the model is made or fetched once, not by every run
    request.directory.mkdir(parents=True, exist_ok=True)
    print(
        f"{len(grid.runs)} runs: {len(request.worlds)} worlds x {len(request.variants)} methods x {request.seeds} "
        f"seeds, {request.jobs} at once, in {request.directory}",
        flush=True,
    )
    for note in request.notes():
        print(f"note: {note}", flush=True)
    with GridView(grid.jobs, grid.places()) as view, _ended_like_ctrl_c():
        is_whole = run_jobs(grid.jobs, at_once=request.jobs, progress=view)
    results, failures = grid.results(), grid.failures(is_whole=is_whole)
    if results:
        _write(request, results, failures, "turnwise compare " + shlex.join(arguments))
        print("\n".join(["", *table_lines(results)]))
        print(f"table   {request.directory / 'compare.md'}\nfigure  {request.directory / 'compare.svg'}")
    for line in failures:
        print(f"failed: {line}")
    if not is_whole:
        print("stopped; run the same command to continue")
        return ExitCode.INTERRUPTED
    if not results:
        raise ConfigError("no run finished; there is nothing to compare")
    return ExitCode.FAILED if failures else ExitCode.OK


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM (from `timeout`, for example) like Ctrl-C: save the runs and print the results so far."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True, kw_only=True)
class GridRun:
    """One cell of the grid."""

    world: ComparedWorld
    variant: Variant
    seed: int
    config: Config
    """The run's config, before its limit on tokens is known."""
    place: Path
    warmup_key: str
    """Runs with the same key, world and seed share a warm-up."""
    job: GridJob | None = None

    @property
    def result_file(self) -> Path:
        """The file with the result; with it the run's directory is not needed any more."""
        return self.place.with_name(f"{self.place.name}.json")


@dataclass(slots=True, kw_only=True)
class Grid:
    """All runs, and the warm-ups that they share."""

    request: CompareRequest
    runs: list[GridRun]
    jobs: list[GridJob] = field(default_factory=list)
    pilots: dict[str, GridRun] = field(default_factory=dict)
    """For each world without a limit on tokens: the run that finds the limit."""
    warmups: dict[str, Path] = field(default_factory=dict)
    """Run directories of the warm-ups, by job name."""

    @classmethod
    def plan(cls, request: CompareRequest) -> Grid:
        """Plan all runs. Every mistake is reported before the first token is sampled."""
        runs: list[GridRun] = []
        for seed in range(request.seeds):  # so that a grid that was broken off has whole seeds
            for world in request.worlds:
                for variant in request.variants:
                    config = request.config(world, variant, seed)
                    place = request.directory / world.slug / f"{variant.slug}-seed{seed}"
                    key = _warmup_key(config)
                    runs.append(
                        GridRun(world=world, variant=variant, seed=seed, config=config, place=place, warmup_key=key)
                    )
        for run in runs:
            if not run.config.eval.tasks:
                raise ConfigError(f"eval.tasks is 0 for {run.world.label}; a comparison is by held-out success")
        _check_bounds(runs)
        grid = cls(request=request, runs=runs)
        for world in request.worlds:
            own = [run for run in runs if run.world == world and samples(run.config)]
            if own and not world.tokens and not own[0].config.train.max_sampled_tokens:
                grid.pilots[world.slug] = own[0]
        for run in sorted(runs, key=lambda run: (run.seed, run is not grid.pilots.get(run.world.slug))):
            grid._add(run)
        return grid

    def places(self) -> dict[str, Path]:
        return {**self.warmups, **{run.job.name: run.place for run in self.runs if run.job is not None}}

    def results(self) -> list[Result]:
        """The results of the finished runs, in the order of worlds, methods and seeds."""
        found: dict[tuple[str, str, int], Result] = {}
        for run in self.runs:
            self._store(run)
            stored = stored_result(run.result_file)
            if stored is not None:
                found[run.world.label, run.variant.label, run.seed] = stored[0]
        return [
            found[key]
            for world in self.request.worlds
            for variant in self.request.variants
            for seed in range(self.request.seeds)
            if (key := (world.label, variant.label, seed)) in found
        ]

    def failures(self, *, is_whole: bool) -> list[str]:
        """Runs that failed; runs that were stopped with an interrupted grid do not count."""
        bad = ("failed", "stopped") if is_whole else ("failed",)
        return [f"{job.name}: {job.why or job.state} (log: {job.log})" for job in self.jobs if job.state in bad]

    def _add(self, run: GridRun) -> None:
        """Add the run's job, after the job of its warm-up."""
        name = f"{run.world.slug}/{run.place.name}"
        pilot = self.pilots.get(run.world.slug)
        shared = self._warmup(run)
        waits = None if pilot is None or pilot is run or not samples(run.config) else pilot.job
        run.job = GridJob(
            name=name,
            log=run.place.with_name(f"{run.place.name}.log"),
            prepare=lambda: self._prepare(run, None if shared is None else self.warmups[shared.name]),
            finish=lambda: self._store(run),
            needs=tuple(job for job in (shared, waits) if job is not None),
        )
        self.jobs.append(run.job)

    def _warmup(self, run: GridRun) -> GridJob | None:
        """The job of the warm-up that this run shares with others of its world and seed."""
        alike = [
            one for one in self.runs if (one.world, one.seed, one.warmup_key) == (run.world, run.seed, run.warmup_key)
        ]
        if not run.config.warmup.steps or run.config.model.base_url or len(alike) < 2:
            return None
        place = run.place.with_name(f"warmup-{alike[0].variant.slug}-seed{run.seed}")
        name = f"{run.world.slug}/{place.name}"
        known = next((job for job in self.jobs if job.name == name), None)
        if known is not None:
            return known
        config = _only_warmup(alike[0].config)

        def prepare() -> RunOrder | None:
            return None if all(one.result_file.is_file() for one in alike) else _prepare_warmup(config, place)

        job = GridJob(name=name, log=place.with_name(f"{place.name}.log"), prepare=prepare)
        self.warmups[name] = place
        self.jobs.append(job)
        return job

    def _bound(self, run: GridRun) -> int:
        """Tokens that the run may sample; 0 means no limit: it reads stored data, or finds the limit for others."""
        pilot = self.pilots.get(run.world.slug)
        if not samples(run.config) or pilot is run:
            return 0
        if pilot is None:
            return run.world.tokens or run.config.train.max_sampled_tokens
        stored = stored_result(pilot.result_file)
        return 0 if stored is None else stored[0].sampled_tokens

    def _store(self, run: GridRun) -> None:
        """Store the result of a run that finished."""
        if run.result_file.is_file() or not is_run(run.place) or not _is_finished(run.place):
            return
        with RunReader(run.place) as reader:
            config = config_to_tree(config_from_yaml(reader.config_yaml, str(run.place)))
        names = (run.world.label, run.variant.label, run.seed)
        write_result(run.result_file, read_result(*names, run.place, bound=self._bound(run)), config)

    def _prepare(self, run: GridRun, warmed: Path | None) -> RunOrder | None:
        config = _at(bounded(run.config, self._bound(run)), run.place)
        self._store(run)
        stored = stored_result(run.result_file)
        if stored is not None:
            _check_same(run.result_file, json.dumps(stored[1]), config)
            return None
        if is_run(run.place):
            _check_same_run(run.place, config)
            return RunOrder(resume=run.place)
        if warmed is None:
            return RunOrder(config=_config_file(config, run.place))
        _copy_run(warmed, run.place, config)
        return RunOrder(resume=run.place)


def _check_bounds(runs: Sequence[GridRun]) -> None:
    """Refuse runs of one world that may sample different numbers of tokens."""
    bounds: dict[str, int] = {}
    for run in runs:
        own = run.config.train.max_sampled_tokens
        if samples(run.config) and bounds.setdefault(run.world.label, own) != own:
            raise ConfigError(
                f"train.max_sampled_tokens is {bounds[run.world.label]} and {own} in {run.world.label}; a comparison "
                "gives all methods of a world the same tokens: set tokens=N, or WORLD[tokens=N]"
            )


def _only_warmup(config: Config) -> Config:
    """The same run with only its warm-up, which needs no method and no critic."""
    reward = RewardConfig(model=config.reward.model)  # its score is in the rewards of an evaluation
    plain = {"method": Grpo.Options(), "critic": CriticConfig(), "reward": reward, "data": DataConfig()}
    train = {"steps": 0, "max_sampled_tokens": 0, "max_staleness": 0, "min_batch": 0, "max_wait": 0}
    rollout = {
        "kv_across_updates": "recompute",
        "group_size": max(2, config.rollout.group_size),  # nothing is played in groups
    }
    stripped = config.model_copy(
        update={
            **plain,
            "alarms": AlarmConfig(),
            "train": config.train.model_copy(update=train),
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )
    return tree_to_config(config_to_tree(stripped))  # refuse here what would be refused later


def _warmup_key(config: Config) -> str:
    """A key that is equal for runs with the same weights after warm-up and the same evaluation of them."""
    tree = config_to_tree(config)
    kept = {name: tree[name] for name in ("model", "env", "memory", "engine", "rollout", "warmup", "eval")}
    kept["train"] = {key: value for key, value in tree["train"].items() if key not in AFTER_WARMUP}
    kept["opponent"] = {key: value for key, value in tree["opponent"].items() if key not in AFTER_WARMUP_OPPONENT}
    return json.dumps({**kept, "reward.model": tree["reward"]["model"]}, sort_keys=True)


def _prepare_warmup(config: Config, place: Path) -> RunOrder | None:
    config = _at(config, place)
    if not is_run(place):
        return RunOrder(config=_config_file(config, place))
    _check_same_run(place, config)
    with RunReader(place) as run:
        is_done = any(row.label == "warm-up" for row in run.evaluations()) and any(
            row.warmup_steps == config.warmup.steps for row in run.checkpoints()
        )
    return None if is_done else RunOrder(resume=place)


def _copy_run(warmed: Path, place: Path, config: Config) -> None:
    """Copy a warmed-up run, complete or not at all, so that another method can continue it."""
    unfinished = place.with_name(f".{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(warmed, unfinished, ignore=shutil.ignore_patterns(LOCK_FILE, STATUS_FILE))
    writer = RunWriter.reopen(unfinished, max_size_mb=config.run.max_size_mb)
    writer.set_meta("config", config_to_yaml(config))
    writer.close()
    unfinished.replace(place)


def _at(config: Config, place: Path) -> Config:
    named = config.run.model_copy(update={"dir": str(place), "name": place.name})
    return config.model_copy(update={"run": named})


def _config_file(config: Config, place: Path) -> Path:
    """Write the config to a file beside the run's directory: `turnwise train FILE` makes the same run."""
    place.parent.mkdir(parents=True, exist_ok=True)
    file = place.with_name(f"{place.name}.yaml")
    file.write_text(config_to_yaml(config), encoding="utf-8")
    return file


def _check_same_run(place: Path, wanted: Config) -> None:
    with RunReader(place) as run:
        _check_same(place, run.config_yaml, wanted)


def _check_same(place: Path, stored: str, wanted: Config) -> None:
    """Refuse a run of another comparison in the same place.

    Args:
        stored: The config that was written down, as YAML; an older turnwise spelled some options otherwise.
    """
    tree, held = _as_it_runs(wanted), _as_it_runs(config_from_yaml(stored, str(place)))
    for section in held.keys() - {"run"}:
        for key, value in held[section].items():
            own = tree[section].get(key)
            if own != value:
                raise ConfigError(
                    f"{place} holds a run with {section}.{key}={value}, and this comparison has {own}; "
                    "choose another --out, or remove it"
                )


def _as_it_runs(config: Config) -> dict[str, Any]:
    """The options, each where older runs wrote it down: where this program samples, `method.correction=auto` is none,
    and what `rollout` says about the engine stands in `engine`."""
    tree = config_to_tree(config)
    for name in SHARED_OPTIONS if config.rollout.backend == "local" else ():
        tree["engine"][name] = getattr(config.engine_in_use, name)
        tree["rollout"][name] = RolloutConfig.model_fields[name].default
    if not config.is_sampled_elsewhere and tree["method"].get("correction") == "auto":
        tree["method"]["correction"] = "none"
    return tree


def _is_finished(place: Path) -> bool:
    with RunReader(place) as run:
        return any(row.label == "end" for row in run.evaluations())


def _write(request: CompareRequest, results: Sequence[Result], failures: Sequence[str], command: str) -> None:
    directory = request.directory
    curves = [Curve(world=result.world, label=result.label, points=result.curve) for result in results]
    files = {
        "compare.json": to_json(request, results, failures),
        "compare.md": markdown(results, request, command),
        "compare.txt": "\n".join([*table_lines(results), ""]),
        "compare.svg": comparison_svg("Held-out success at equal sampled tokens", curves),
    }
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
