"""Long attempts: what memory is worth, and what entropy does while agents learn.

    python -m turnwise.bench.long_study --seeds 5 --jobs 8 --out runs/long_study [--arms "no memory" summaries]

Every arm is a preset with options, trained once for each seed in a process of its own. A run that has come to its end
is not trained again, and one that was stopped is resumed, so the command can be repeated. The tables hold the runs that
have ended; they are written to `table.md` and `results.json` whenever one does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import EvaluationRow

FORM = (
    *("workflow", "env.options.level=3", "rollout.max_trajectory_tokens=420", "train.tasks_per_step=6"),
    *("train.steps=30", "train.learning_rate=1e-3", "eval.every=0", "warmup.steps=80"),
)
"""A form of 24 cells in a context that holds about 13 of them. The scripted dialogues of the warm-up fit into `tiny`
also without memory, so that all arms begin alike."""
NO_SUMMARY = ("memory.summary_tokens=0",)
HOUSE = ("memory.window=8", "memory.summary_tokens=24", "train.tasks_per_step=8", "train.steps=60")
PPO = ("method=ppo", "rollout.group_size=4", "train.tasks_per_step=16")
ARMS: Mapping[str, tuple[str, ...]] = {
    "no memory": (*FORM, "memory.window=0", *NO_SUMMARY),
    "window of 3": (*FORM, "memory.window=3", *NO_SUMMARY),
    "summaries": (*FORM, "memory.window=6"),
    "guess_number": ("guess_number_tiny",),
    "key_door": ("key_door", "model=tiny", "model.rank=32", "warmup.learning_rate=5e-3", "warmup.steps=100"),
    "household 2": ("household",),
    "household 4": ("household", "env.options.level=4", *HOUSE),
    "household 4, gigpo": ("household", "env.options.level=4", *HOUSE, "method=gigpo"),
    "household 4, ppo": ("household", "env.options.level=4", *HOUSE, *PPO),
    "household 4, ppo, no pre-training": (
        *("household", "env.options.level=4", *HOUSE, *PPO),
        "critic.pretrain_steps=0",
    ),
}
"""Preset and options of every arm. `household 4` has 58 actions, more than the model can see at once."""
ENTROPIES = ("rollout/entropy_estimate", "behaviour/entropy_first_token", "behaviour/action_entropy")
EDGE = 5
"""Steps at each end of a run over which a metric is averaged."""

Row = dict[str, Any]


def arguments_of(arm: str, seed: int, directory: Path) -> list[str]:
    """The arguments of `turnwise train` for one run. A method that has no `credit` does without the preset's."""
    preset, *options = ARMS[arm]
    return [preset, *options, f"train.seed={seed}", f"run.dir={directory}", "run.dialogues=0"]


def train_one(arm: str, seed: int, out: Path, deadline_s: float) -> Path:
    """Train one run to its end, or until the clock says so; its directory."""
    directory = out / f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"
    left_s = deadline_s - time.monotonic()
    if not _has_ended(directory) and left_s > 0:
        todo = ["--resume", str(directory)] if is_run(directory) else arguments_of(arm, seed, directory)
        with (out / f"{directory.name}.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "turnwise.cli", "train", *todo],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(timeout=left_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return directory


def _has_ended(directory: Path) -> bool:
    if not is_run(directory):
        return False
    with RunReader(directory) as run:
        return any(row.label == "end" for row in run.evaluations())


def read_one(arm: str, seed: int, directory: Path) -> Row:
    """What a run says: success before and after, how long prompts and attempts were, and its entropies."""
    with RunReader(directory) as run:
        rows = run.evaluations()
        before = [row for row in rows if row.step == 0][-1]
        found: Row = {"arm": arm, "seed": seed, "before": _rate(before), "after": _rate(rows[-1])}
        found["reward_before"], found["reward_after"] = before.reward, rows[-1].reward
        for name in (*ENTROPIES, "rollout/turns_mean", "rollout/splits"):
            values = [value for _, value in run.metric(name)]
            if values:
                found[name] = [fmean(values[:EDGE]), fmean(values[-EDGE:])]
        prompts = [value for _, value in run.metric("rollout/prompt_tokens_max")]
        found["longest_prompt"] = max(prompts, default=0.0)
    return found


def _rate(row: EvaluationRow) -> float:
    """The success rate; 0 where no attempt came to its verdict, because the context was full before."""
    return 0.0 if math.isnan(row.success) else row.success


def tables(results: Sequence[Row]) -> str:
    """Two Markdown tables: success, and entropy before and after."""
    lines = [
        "| arm | seeds | success before RL | after RL | each seed | turns | longest prompt |",
        "|---|---|" + "---|" * 5,
    ]
    entropy = [
        "",
        "| arm | entropy, nats/token | rises in | of the first token | of actions, nats |",
        "|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in results):
        own = [row for row in results if row["arm"] == arm]
        each = ", ".join(f"{row['before']:.0%} to {row['after']:.0%}" for row in own)
        turns = fmean(row["rollout/turns_mean"][1] for row in own)
        means = [f"{fmean(row[key] for row in own):.0%}" for key in ("before", "after")]
        longest = max(row["longest_prompt"] for row in own)
        lines.append(f"| {arm} | {len(own)} | {means[0]} | {means[1]} | {each} | {turns:.0f} | {longest:.0f} |")
        cells = [_change(own, name) for name in ENTROPIES]
        risen = sum(row[ENTROPIES[0]][1] > row[ENTROPIES[0]][0] for row in own if ENTROPIES[0] in row)
        entropy.append(f"| {arm} | {cells[0]} | {risen} of {len(own)} | {cells[1]} | {cells[2]} |")
    return "\n".join([*lines, *entropy, ""])


def _change(own: Sequence[Row], name: str) -> str:
    known = [row[name] for row in own if name in row]
    if not known:
        return "-"
    return f"{fmean(first for first, _ in known):.3f} to {fmean(last for _, last in known):.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/long_study"))
    parser.add_argument("--limit-s", type=float, default=24 * 3600, help="stop what still runs after so many seconds")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS), help="default: all")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [(arm, seed) for seed in range(options.seeds) for arm in options.arms]
    deadline_s = time.monotonic() + options.limit_s
    results: list[Row] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(train_one, arm, seed, options.out, deadline_s): (arm, seed) for arm, seed in wanted}
        for done in as_completed(runs):
            if _has_ended(done.result()):
                results.append(read_one(*runs[done], done.result()))
                results.sort(key=lambda row: (list(ARMS).index(row["arm"]), row["seed"]))
                (options.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
                (options.out / "table.md").write_text(tables(results), encoding="utf-8")
            print(f"{runs[done]}: {'done' if _has_ended(done.result()) else 'NOT ENDED, see its .log'}", flush=True)
    print(tables(results))
    return 0 if len(results) == len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
