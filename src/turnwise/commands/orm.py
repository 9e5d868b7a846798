"""`turnwise orm`: train outcome models, measure them, and let them pick the best of several attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from turnwise.client.local import ServiceClient
from turnwise.config.files import build_section
from turnwise.errors import ConfigError
from turnwise.outcomes.measure import Quality
from turnwise.outcomes.model import open_outcome_model
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.orm import OrmConfig, best_of_n, learned_tasks, measure_model, read_attempts, train_outcome_model
from turnwise.watch.terminal import open_view


def run_orm_train(words: Sequence[str], out: str) -> ExitCode:
    """Run `turnwise orm train`; a word with `=` is an option, any other a source."""
    sources = [word for word in words if "=" not in word]
    options = build_section(OrmConfig, {}, [word for word in words if "=" in word])
    if not sources:
        raise ConfigError("no attempts to learn from; expected turnwise orm train RUN... --out DIR")
    view = open_view(options.rl_steps) if options.kind == "generative" else None
    result = train_outcome_model(sources, out, options, observer=view)
    _show(result.quality, f"held-out tasks, {options.kind}")
    print(f"wrote {result.directory} (report.json, calibration.svg)")
    print(f"use it: turnwise train WORLD reward.model={result.directory}, or flywheel.verdict={result.directory}")
    return ExitCode.OK


def run_orm_eval(directory: str, sources: Sequence[str], *, as_json: bool) -> ExitCode:
    """Measure an outcome model on the attempts of other runs, without those at tasks that it has learned from."""
    model = open_outcome_model(directory)
    found, _ = read_attempts(sources, 1_000_000)
    if not found:
        raise ConfigError(
            f"no attempt of {', '.join(sources)} was judged by a verifier; there is nothing to compare with"
        )
    learned = learned_tasks(directory)
    attempts = [one for one in found if (one.world, one.task_id) not in learned]
    if not attempts:
        raise ConfigError(
            f"{directory} has learned from the tasks of all {len(found)} attempts; name a run with other tasks"
        )
    with ServiceClient() as service:
        quality = measure_model(model, attempts, service)
        num_cut = sum(model.cuts(one.messages) for one in attempts)
    if as_json:
        print(json.dumps(quality.to_json() | {"left_out": len(found) - len(attempts), "cut": num_cut}))
    else:
        _show(quality, "tasks that it has not learned from")
        print(f"too long to be read whole: {num_cut} attempts")
        print(f"left out: {len(found) - len(attempts)} attempts at tasks that it has learned from")
    return ExitCode.OK


def run_orm_best(directory: str, run: str, *, as_json: bool) -> ExitCode:
    """Success of the attempt that the outcome model picks at each task, beside chance and the best possible pick."""
    with ServiceClient() as service:
        model, learned = open_outcome_model(directory), learned_tasks(directory)
        found = best_of_n(model, Path(run).expanduser(), service, learned)
    if as_json:
        print(json.dumps(found.to_json()))
        return ExitCode.OK
    print(f"{found.num_groups} groups of {found.mean_size:.1f} attempts; left out: {found.num_left_out} learned tasks")
    print(
        f"one at random    {found.random:.1%}\nbest of n by it  {found.picked:.1%}\nany of n         {found.oracle:.1%}"
    )
    return ExitCode.OK


def _show(quality: Quality, title: str) -> None:
    print(f"{title}: {quality.count} attempts, {quality.success:.1%} of them successes")
    rows = {"all": quality, **quality.by_world}
    print(f"{'':<24}{'accuracy':>9}{'F1':>7}{'Brier':>8}{'ECE':>7}")
    for name, one in rows.items():
        print(f"{name:<24}{one.accuracy:>9.1%}{one.f1:>7.2f}{one.brier:>8.3f}{one.calibration_error:>7.3f}")
