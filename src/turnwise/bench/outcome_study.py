"""RL on an outcome model alone: does it go on agreeing with the verifier while the policy changes?

    python -m turnwise.bench.outcome_study --seeds 1 2 3 --jobs 3 --out runs/outcome_study

For every seed: a run with the verifier's reward (`verified`), an outcome model from the attempts of this run, and a run
from the same warm-up whose reward is the outcome model's score and nothing else (`on the model`). Then the outcome
model is trained again, on the attempts of both, and a third run goes on from the second with it (`refreshed`).
Evaluations use the verifier in all of them. `table.md` and `results.json` say what came of it. The same command goes on
with what was not finished.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from turnwise.bench.study_jobs import run_jobs
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.orm import OrmConfig, train_outcome_model
from turnwise.training.run import Run, train
from turnwise.watch.observer import Observer

WORLD = (
    *("key_door", "model=tiny", "model.rank=32", "env.options.num_rooms=4", "rollout.group_size=8"),
    "env.options.demonstration_skill=0.5",
    *("warmup.steps=100", "warmup.learning_rate=5e-3", "warmup.batch_size=16", "warmup.demonstrations=512"),
    *("train.tasks_per_step=8", "train.learning_rate=1e-3", "eval.every=10", "eval.tasks=64"),
)
AGREEMENT, SCORE = "rollout/env_outcome_agreement_mean", "rollout/env_outcome_score_mean"
ORM_STEPS = 120
EDGE = 3
"""Steps at each end of a run over which a metric is averaged; the alarm looks at as many."""


def study_seed(seed: int, out: Path, steps: int, options: Sequence[str]) -> None:
    """All runs and outcome models of one seed."""
    place = out / f"seed-{seed}"
    world = [*WORLD, *options, f"train.seed={seed}", f"train.steps={steps}"]
    verified, learned = place / "verified", place / "on_the_model"
    _run(world, verified)
    first = train_outcome_model([verified], place / "orm", OrmConfig(seed=seed, steps=ORM_STEPS))
    _run([*world, *_reward(place / "orm")], learned)
    second = train_outcome_model([verified, learned], place / "orm_refreshed", OrmConfig(seed=seed, steps=ORM_STEPS))
    again = [*_reward(place / "orm_refreshed"), f"model.from={learned}", "warmup.steps=0"]
    _run([*world, *again], place / "refreshed")
    found = {"seed": seed, "accuracy": first.quality.accuracy, "refreshed_accuracy": second.quality.accuracy}
    (place / "models.json").write_text(json.dumps(found), encoding="utf-8")


def _reward(model: Path) -> list[str]:
    return [f"reward.model={model}", "reward.weights.outcome=0"]


def _run(arguments: Sequence[str], directory: Path) -> None:
    """Train, or go on with a run that was stopped."""
    if is_run(directory):
        Run.resume(directory, observer=Observer())
    else:
        train(arguments[0], directory=directory, overrides=[*arguments[1:], "run.dialogues=0"], observer=Observer())


def read_run(name: str, seed: int, directory: Path) -> dict[str, Any] | None:
    """What a run says so far; None before its first evaluation after a step."""
    if not is_run(directory):
        return None
    with RunReader(directory) as run:
        before = [row.success for row in run.evaluations() if row.label in ("start", "warm-up")]
        after = [row.success for row in run.evaluations() if row.label in ("step", "end")]
        if not before or not after:
            return None
        found: dict[str, Any] = {"run": name, "seed": seed, "success": [before[-1], after[-1]]}
        for key, metric in (("agreement", AGREEMENT), ("score", SCORE)):
            values = [value for _, value in run.metric(metric)]
            if values:
                found[key] = [fmean(values[:EDGE]), min(_means(values)), fmean(values[-EDGE:])]
        found["alarms"] = sum(event.detail.get("name") == "outcome_model" for event in run.events("alarm"))
    return found


def _means(values: Sequence[float]) -> list[float]:
    """Means of `EDGE` steps in a row, as the alarm sees them."""
    return [fmean(values[at : at + EDGE]) for at in range(max(1, len(values) - EDGE + 1))]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each run: from its first to its last steps."""
    lines = [
        "| run | seed | accuracy of its model | score | agreement: first, lowest, last | success | alarms |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        score, agreement = row.get("score"), row.get("agreement")
        lines.append(
            f"| {row['run']} | {row['seed']} | {row['accuracy']:.1%} | "
            f"{f'{score[0]:.2f} to {score[2]:.2f}' if score else ''} | "
            f"{', '.join(f'{one:.2f}' for one in agreement) if agreement else ''} | "
            f"{row['success'][0]:.1%} to {row['success'][1]:.1%} | {row['alarms']} |"
        )
    return "\n".join(lines) + "\n"


def read_all(out: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Every run that has an evaluation, with the accuracy of the outcome model that it learned from."""
    found: list[dict[str, Any]] = []
    for name, model in (("verified", ""), ("on_the_model", "orm"), ("refreshed", "orm_refreshed")):
        for seed in seeds:
            place = out / f"seed-{seed}"
            row = read_run(name, seed, place / name)
            if row is None:
                continue
            report = place / model / "report.json"
            accuracy = json.loads(report.read_text(encoding="utf-8"))["accuracy"] if model else 1.0
            found.append({**row, "accuracy": accuracy})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="seeds at the same time, one thread each")
    parser.add_argument("--steps", type=int, default=30, help="steps of every run")
    parser.add_argument("--out", type=Path, default=Path("runs/outcome_study"))
    parser.add_argument("--limit-s", type=float, default=24 * 3600, help="seconds after which to end")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION", help="more options of every run")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = [partial(study_seed, seed, options.out, options.steps, options.set) for seed in options.seeds]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:  # its end kills what still runs
        run_jobs(pool, jobs, time.monotonic() + options.limit_s, lambda _: None)
    rows = read_all(options.out, options.seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(rows), encoding="utf-8")
    (options.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
