"""What each part of the flywheel is worth: the whole, and the whole without routing, verdict or difficulty dial.

    python -m turnwise.bench.flywheel_ablation --seeds 5 --jobs 8 --out runs/ablation

Every arm may take the same number of optimizer steps per round, plays as many tasks and attempts, starts from the same
warm-up of its seed, and is measured on the same held-out tasks. A stage whose pool is empty is skipped, so the table
has the steps that were taken. RL plays attempts of its own; their tokens are in the table too, because an arm without
RL samples fewer. The same command goes on with what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from turnwise.rounds.wheel import flywheel
from turnwise.runlog.reader import RunReader

ARMS: dict[str, list[str]] = {
    "whole": [],
    "no routing": ["flywheel.routing=false"],
    "no verdict": ["flywheel.verdict=none", "flywheel.routing=false"],  # without a verdict nothing can be routed
    "no dial": ["flywheel.dial=fixed"],
    "all levels at once": ["flywheel.dial=uniform"],
}
T_95 = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Half-widths of Student's 95 % interval in standard errors, by degrees of freedom."""


def run_one(job: tuple[str, str, int, Path, tuple[str, ...]]) -> dict[str, Any]:
    """One arm with one seed, in a process of its own."""
    preset, arm, seed, out, overrides = job
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    place = out / f"{arm.replace(' ', '_')}-{seed}"
    wheel = flywheel(preset, directory=place, overrides=[*ARMS[arm], f"train.seed={seed}", *overrides])
    curve = [row["success"] for row in wheel.evaluations]
    played = wheel.query("SELECT sum(num_tokens) AS n FROM attempts")[0]["n"]
    stages = wheel.query("SELECT detail FROM stages")
    steps = sum(json.loads(row["detail"]).get("steps", 0) for row in stages)
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "success": curve,
        "played_tokens": played,
        "rl_tokens": _rl_tokens(place),
    }


def _rl_tokens(place: Path) -> int:
    """Tokens that the RL stages sampled."""
    total = 0
    for run_directory in sorted(place.glob("rounds/*/rl")):
        with RunReader(run_directory) as run:
            total += sum(row.num_sampled_tokens for row in run.attempts(phase="train"))
    return total


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each arm; differences are paired by seed, with 95 % intervals of Student's t."""
    lines = ["| arm | seeds | before | after | minus whole | steps | sampled tokens |", "|---|---|---|---|---|---|---|"]
    whole = {one["seed"]: one["success"][-1] for one in results if one["arm"] == "whole"}
    for arm in ARMS:
        own = [one for one in results if one["arm"] == arm]
        if not own:
            continue
        gaps = [one["success"][-1] - whole[one["seed"]] for one in own if arm != "whole" and one["seed"] in whole]
        tokens = fmean(one["played_tokens"] + one["rl_tokens"] for one in own)
        steps = fmean(one["steps"] for one in own)
        before, after = (fmean(one["success"][index] for one in own) for index in (0, -1))
        lines.append(
            f"| {arm} | {len(own)} | {before:.1%} | {after:.1%} | {_interval(gaps)} | {steps:.0f} | {tokens:,.0f} |"
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
    parser.add_argument("--jobs", type=int, default=1, help="flywheels at once, each with one thread")
    parser.add_argument("--out", type=Path, default=Path("runs/flywheel-ablation"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(argv)
    jobs = [
        (options.preset, arm, seed, options.out, tuple(options.overrides))
        for seed in range(options.seeds)
        for arm in ARMS
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results: list[dict[str, Any]] = []
        for done in as_completed([pool.submit(run_one, job) for job in jobs]):
            results.append(done.result())
            _write(options.out, results)
            last = results[-1]
            curve = ", ".join(f"{success:.1%}" for success in last["success"])
            print(f"{len(results)}/{len(jobs)}  {last['arm']}, seed {last['seed']}: {curve}", flush=True)
    print("\n".join(table(results)))
    return 0


def _write(out: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write what is known so far, after every flywheel: a study that is cut short has said something."""
    (out / "results.json").write_text(json.dumps(list(results), indent=2), encoding="utf-8")
    (out / "table.md").write_text("\n".join(table(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
