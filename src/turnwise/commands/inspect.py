"""`turnwise certify`, `replay` and `curve`: inspect what a run did, without loading the model."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from turnwise.commands.train import say
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.envs.base import Task
from turnwise.errors import DataError
from turnwise.judges import attach_judge, needs_service
from turnwise.models.tokenizer import load_tokenizer
from turnwise.opponents.seating import seat_record
from turnwise.outcomes import attach_outcome_model, has_outcome_model
from turnwise.rollout.certify import Certificate
from turnwise.rollout.replay import replay
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import EvaluationRow
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.assemble import make_eval_rollout, make_renderer, with_outcome_model
from turnwise.training.objects import NO_OBJECTS, check_played_objects
from turnwise.training.setup import find_facts, find_model, make_service
from turnwise.training.stored import altered
from turnwise.watch.curve import Points, metric_svg, runs_svg
from turnwise.watch.report import dialogue_lines

NUM_LISTED = 20


def run_certify(target: str, *, with_turns: bool) -> ExitCode:
    """Print a run's certificates; exit code 1 when one of them is not exact."""
    with RunReader(target) as run:
        rows = run.certificates()
    if not rows:
        raise DataError(f"{target} has no certificate: no step has trained on anything yet")
    for row in rows:
        certificate = Certificate.from_json(row.content)
        print(f"step {row.step}: " + "\n".join(certificate.lines()))
        if with_turns:
            print("\n".join(certificate.turn_lines()))
    return ExitCode.OK if all(row.is_exact for row in rows) else ExitCode.FAILED


def run_curve(targets: Sequence[str], out: str, title: str, metric: str = "") -> ExitCode:
    """Draw the held-out success of runs, or a metric, into one picture, and print where each began and ended."""
    configs, drawn = list[Config](), list[Points]()
    rows: list[list[EvaluationRow]] = []
    for target in targets:
        with RunReader(target) as run:
            configs.append(config_from_yaml(run.config_yaml, str(run.directory)))
            rows.append(run.evaluations())
            drawn.append(_metric_points(run, metric) if metric else [])
        if not rows[-1] and not metric:
            raise DataError(f"{target} has no evaluation yet, so there is no curve: set eval.tasks and eval.every")
    worlds = {f"{config.env.name}, {config.model.name}" for config in configs}
    are_seeds = len(worlds) == 1 and len({config.train.seed for config in configs}) == len(configs)
    names = [f"seed {config.train.seed}" for config in configs] if are_seeds else list(targets)
    head = title or "; ".join(sorted(worlds))
    if metric:
        for name, points in zip(names, drawn, strict=True):
            print(f"{name}: {points[0][1]:.4g} -> {points[-1][1]:.4g} at step {points[-1][0]:g}")
        picture = metric_svg(head, metric, dict(zip(names, drawn, strict=True)))
    else:
        for name, own in zip(names, rows, strict=True):
            first = next(row for row in reversed(own) if row.step == own[0].step)
            print(f"{name}: {first.success:.1%} -> {own[-1].success:.1%} at step {own[-1].step}")
        picture = runs_svg(head, dict(zip(names, rows, strict=True)))
    Path(out).write_text(picture, encoding="utf-8")
    print(f"curve  {out}")
    return ExitCode.OK


def _metric_points(run: RunReader, metric: str) -> Points:
    points = [(float(step), value) for step, value in run.metric(metric) if math.isfinite(value)]
    if not points:
        raise DataError(f"{run.directory} has no numbers of the metric {metric!r}; docs/metrics.md has all names")
    return points


def run_replay(target: str, attempt_id: int | None) -> ExitCode:
    """Play one stored attempt again; exit code 1 if something differs. Without an id, list the latest attempts."""
    with RunReader(target) as run:
        if attempt_id is None:
            _list_attempts(run)
            return ExitCode.OK
        check_played_objects(run, NO_OBJECTS)
        stored = run.attempt(attempt_id)
        config = config_from_yaml(run.config_yaml, str(run.directory))
        task = Task(id=stored.trajectory.task_id, data=run.task(stored.trajectory.task_id))
        print("\n".join(dialogue_lines(run, stored.row)))
    directory = find_model(config, say)
    world = NO_OBJECTS.make_world(config.env, max_turns=config.rollout.max_turns, memory=config.memory)
    world = with_outcome_model(world, config)
    rollout = config.rollout.for_task(world, task.id, find_facts(config).context_length)
    if stored.row.phase == "eval":
        rollout = make_eval_rollout(config, rollout)
    renderer = make_renderer(load_tokenizer(directory), config.rollout, config.memory)
    with contextlib.ExitStack() as stack:
        if needs_service(world) or has_outcome_model(world):
            service = stack.enter_context(make_service(config, Path(target)))
            attach_judge(world, service)
            attach_outcome_model(world, service)
        unknown = altered(stored.row, config)
        world = seat_record(world, stored.trajectory)
        replayed = asyncio.run(replay(world, task, stored.trajectory, renderer, rollout, altered=unknown))
    print("\n".join(replayed.lines()))
    if unknown:
        print(f"  not compared: {', '.join(sorted(unknown))}; an older turnwise stored what the method made of them")
    return ExitCode.OK if replayed.is_exact else ExitCode.FAILED


def _list_attempts(run: RunReader) -> None:
    rows = run.attempts()
    print(f"{len(rows)} attempts; the last {min(NUM_LISTED, len(rows))}, for --attempt ID:")
    for row in rows[-NUM_LISTED:]:
        print(
            f"{row.id:>7}  step {row.step:<5} {row.phase:<5} {row.outcome:<10} {row.end_reason:<11} "
            f"reward {row.reward:<6g} {row.num_turns} turns  {row.task_id}"
        )
