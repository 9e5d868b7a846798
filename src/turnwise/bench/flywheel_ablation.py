"""What each part of the flywheel is worth: the whole, and the whole without routing, verdict or difficulty dial.

    python -m turnwise.bench.flywheel_ablation --seeds 5 --jobs 8 --out runs/ablation
    python -m turnwise.bench.flywheel_ablation --seeds 5 --jobs 8 --out runs/ablation --tokens 60000

Every arm may take the same number of optimizer steps per round, plays as many tasks and attempts, starts from the
same warm-up of its seed, and is measured on the same held-out tasks. A stage whose pool is empty is skipped, so the
table has the steps that were taken. RL plays attempts of its own; their tokens are in the table too, because an arm
without RL samples fewer. Without a verdict nobody knows what is solved, so the level stays too: the arm to compare it
with is `no routing, no dial`. With `--tokens` an arm goes on, round after round, until it has sampled them, and the
table has its success at that number, on the line between two evaluations. The same command goes on with what was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from turnwise.bench.study_jobs import run_jobs
from turnwise.rounds.flywheel import Flywheel, flywheel
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.progress import num_drawn_tokens

ARMS: dict[str, list[str]] = {
    "whole": [],
    "no routing": ["flywheel.routing=false"],
    "no verdict": ["flywheel.verdict=none", "flywheel.routing=false"],  # without a verdict nothing can be routed
    "no dial": ["flywheel.dial=fixed"],
    "no routing, no dial": ["flywheel.routing=false", "flywheel.dial=fixed"],
    "all levels at once": ["flywheel.dial=uniform"],
}
T_95 = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Half-widths of Student's 95 % interval in standard errors, by degrees of freedom."""


MAX_ROUNDS = 40
"""Rounds of an arm that goes on until it has sampled enough, at most."""


def run_one(job: tuple[str, str, int, Path, tuple[str, ...]], tokens: int = 0) -> dict[str, Any]:
    """One arm with one seed, in a process of its own; with `tokens`, until that number is sampled."""
    preset, arm, seed, out, overrides = job
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    place = out / f"{arm.replace(' ', '_')}-{seed}"
    settings = [*ARMS[arm], f"train.seed={seed}", *overrides]
    wheel = flywheel(preset, directory=place, overrides=settings, rounds=1 if tokens else None)
    sampled = sampled_tokens(wheel, place)
    while tokens and sampled[-1] < tokens and len(sampled) <= MAX_ROUNDS:
        wheel = flywheel(preset, directory=place, overrides=settings, rounds=len(sampled))
        sampled = sampled_tokens(wheel, place)
    stages = wheel.query("SELECT detail FROM stages")
    steps = sum(json.loads(row["detail"]).get("steps", 0) for row in stages)
    curve = [row["success"] for row in wheel.evaluations]
    return {"arm": arm, "seed": seed, "steps": steps, "success": curve, "sampled": sampled}


def sampled_tokens(wheel: Flywheel, place: Path) -> list[int]:
    """Tokens that were sampled up to each evaluation, for the pools and by the RL stages."""
    played = {
        row["round"]: row["n"] for row in wheel.query("SELECT round, sum(num_tokens) AS n FROM attempts GROUP BY 1")
    }
    found: list[int] = []
    for row in wheel.evaluations:
        before = found[-1] if found else 0
        found.append(before + played.get(row["round"], 0) + rl_tokens(place / "rounds" / f"{row['round']:02d}" / "rl"))
    return found


def rl_tokens(directory: Path) -> int:
    """Tokens that an RL stage sampled, those of failed tries and of a critic's pre-training included."""
    if not is_run(directory):
        return 0
    with RunReader(directory) as run:
        return num_drawn_tokens(run, max((step for step, _ in run.metric("rollout/tokens_drawn")), default=0))


def success_at(result: dict[str, Any], tokens: int) -> float:
    """Number of sampled tokens at which to evaluate; 0: at the end."""
    return float(np.interp(tokens, result["sampled"], result["success"])) if tokens else result["success"][-1]


def table(results: Sequence[dict[str, Any]], tokens: int = 0) -> list[str]:
    """A line for each arm; differences are paired by seed, with 95 % intervals of Student's t."""
    lines = ["| arm | seeds | before | after | minus whole | steps | sampled tokens |", "|---|---|---|---|---|---|---|"]
    whole = {one["seed"]: success_at(one, tokens) for one in results if one["arm"] == "whole"}
    for arm in ARMS:
        own = [one for one in results if one["arm"] == arm]
        if not own:
            continue
        gaps = [success_at(one, tokens) - whole[one["seed"]] for one in own if arm != "whole" and one["seed"] in whole]
        sampled, steps = fmean(one["sampled"][-1] for one in own), fmean(one["steps"] for one in own)
        before, after = fmean(one["success"][0] for one in own), fmean(success_at(one, tokens) for one in own)
        lines.append(
            f"| {arm} | {len(own)} | {before:.1%} | {after:.1%} | {_interval(gaps)} | {steps:.0f} | {sampled:,.0f} |"
        )
    return lines


def _interval(gaps: Sequence[float]) -> str:
    if len(gaps) < 2:
        return f"{gaps[0]:+.1%}" if gaps else ""
    width = T_95[min(len(gaps), len(T_95)) - 1] * stdev(gaps) / math.sqrt(len(gaps))
    return f"{fmean(gaps):+.1%} ± {width:.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="key_door_tiny", help="a flywheel's file or name (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), metavar="ARM", help="default: all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="flywheels at once, each with one thread")
    parser.add_argument("--out", type=Path, default=Path("runs/flywheel-ablation"))
    parser.add_argument("--tokens", type=int, default=0, help="sampled tokens of every arm; 0: rounds of the preset")
    parser.add_argument("--limit-s", type=float, default=24 * 3600, help="seconds after which to end")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(argv)
    jobs = [
        partial(run_one, (options.preset, arm, seed, options.out, tuple(options.overrides)), options.tokens)
        for seed in range(options.seeds)
        for arm in options.arms
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    results: list[dict[str, Any]] = []

    def note(result: dict[str, Any]) -> None:
        results.append(result)
        _write(options.out, results, options.tokens)
        curve = ", ".join(f"{success:.1%}" for success in result["success"])
        print(f"{len(results)}/{len(jobs)}  {result['arm']}, seed {result['seed']}: {curve}", flush=True)

    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:  # its end kills what still runs
        is_whole = run_jobs(pool, jobs, time.monotonic() + options.limit_s, note)
    print("\n".join(table(results, options.tokens)))
    return 0 if is_whole else 1


def _write(out: Path, results: Sequence[dict[str, Any]], tokens: int) -> None:
    """Write what is known so far, after every flywheel: a study that is cut short has said something."""
    (out / "results.json").write_text(json.dumps(list(results), indent=2), encoding="utf-8")
    (out / "table.md").write_text("\n".join(table(results, tokens)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
