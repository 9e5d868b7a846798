"""Specialists for three worlds, merged, against one run in all three.

    python -m turnwise.bench.specialists --seeds 1 2 3 --jobs 12 --out runs/specialists
    python -m turnwise.bench.specialists --worlds smollm2 --model smollm2 --seeds 1 2 3 --out runs/specialists

For each seed one warm-up on the scripted dialogues of all worlds. From there one run in each world (`STEPS` steps), and
one in all of them (`env.mix`) with as many steps as the specialists together, so that it sees as many groups of each
world. The specialists are merged in two ways: their mean, and the warm-up with the sum of their changes. Every policy,
as it is at its end, plays the same held-out tasks of every world. The same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from statistics import fmean
from typing import Any

from turnwise.bench.study_jobs import run_jobs
from turnwise.compare.results import Result, paired_difference
from turnwise.config.files import load_config
from turnwise.runlog.reader import is_run
from turnwise.training.merge import MergeOptions, find_parts, merge
from turnwise.training.policy import PolicySampler
from turnwise.training.run import Run, train
from turnwise.watch.intervals import mean_interval
from turnwise.watch.observer import Observer

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worlds:
    """Three worlds that one model can learn, and how."""

    members: Mapping[str, tuple[str, ...]]
    """Options below `env.mix.MEMBER`, by member; `name` is the world."""
    common: tuple[str, ...]
    """Options of every run."""
    warm: tuple[str, ...]
    """Options of the warm-up."""
    steps: int
    """Steps of a specialist."""


SETS: Mapping[str, Worlds] = {
    "tiny": Worlds(
        members={
            "doors": ("name=key_door", "difficulty=1", "options.demonstration_skill=0.5"),
            "guess": ("name=guess_number", "options.high=8", "options.max_turns=4", "options.demonstration_skill=0.7"),
            "form": ("name=workflow", "options.level=1", "options.demonstration_skill=0.7"),
        },
        common=("model.rank=32", "rollout.group_size=8", "train.tasks_per_step=8", "train.learning_rate=1e-3"),
        warm=("warmup.steps=240", "warmup.demonstrations=512", "warmup.batch_size=16", "warmup.learning_rate=5e-3"),
        steps=25,
    ),
    "smollm2": Worlds(
        members={
            "sql": ("name=text_to_sql", "options.difficulty=easy", "options.demonstration_skill=0.6"),
            "search": ("name=search", "options.max_turns=3"),
            "guess": ("name=guess_number", "options.demonstration_skill=0.5"),
        },
        common=(
            *('rollout.stop=["</search>", "</answer>"]', "rollout.group_size=8", "train.tasks_per_step=8"),
            *("train.learning_rate=3e-4", "train.lr_schedule=linear", "train.lr_warmup=4"),
        ),
        warm=("warmup.steps=48", "warmup.demonstrations=192", "warmup.batch_size=8"),
        steps=16,
    ),
}
"""`smollm2` has SQL, search and a game; `tiny` has what a toy model can learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialistsPlan:
    """One study: its worlds, model and place."""

    worlds: Worlds
    model: str
    out: Path
    more: tuple[str, ...]
    """Options of every run, from the command line."""

    def options(self, member: str | None) -> list[str]:
        """Preset and options of a run in one world, or in all of them."""
        if member is None:
            own = [f"env.mix.{name}.{text}" for name, texts in self.worlds.members.items() for text in texts]
            return ["mix", *own, f"model={self.model}", *self.worlds.common, *self.more]
        world, *texts = self.worlds.members[member]
        own = [f"env.{text}" for text in texts]
        return [world.removeprefix("name="), *own, f"model={self.model}", *self.worlds.common, *self.more]

    def train(self, name: str, seed: int, member: str | None, options: Sequence[str]) -> None:
        place = self.out / f"{name}-{seed}"
        if is_run(place):
            if Run.open(place).state != "finished":
                Run.resume(place, observer=Observer())
            return
        preset, *rest = [*self.options(member), *options, f"train.seed={seed}", "run.dialogues=0", "eval.tasks=0"]
        train(preset, directory=place, overrides=rest, observer=Observer())

    def warm_up(self, seed: int) -> None:
        self.train("warm_up", seed, None, ["train.steps=0", *self.worlds.warm])

    def learn(self, member: str | None, seed: int) -> None:
        """A specialist, or the run in all worlds."""
        steps = self.worlds.steps * (len(self.worlds.members) if member is None else 1)
        start = [f"model.from={self.out / f'warm_up-{seed}'}", "warmup.steps=0", f"train.steps={steps}"]
        self.train(member or "joint", seed, member, start)

    def merge(self, seed: int) -> None:
        """The mean of the specialists, and the warm-up with the sum of what they changed."""
        members = [str(self.out / f"{name}-{seed}") for name in self.worlds.members]
        count = len(members)
        mixes = {
            "mean": (members, [1 / count] * count),
            "sum_of_changes": ([*members, str(self.out / f"warm_up-{seed}")], [1.0] * count + [1.0 - count]),
        }
        for name, (targets, weights) in mixes.items():
            place = self.out / f"{name}-{seed}"
            shutil.rmtree(place, ignore_errors=True)
            merge(find_parts(targets, "last"), weights, place, MergeOptions())

    def play(self, policy: str, seed: int, member: str, tasks: int) -> Row:
        """Held-out tasks of one world with one policy."""
        done = self.out / f"{policy}-{seed}-in-{member}.json"
        if not done.is_file():
            place = self.out / f"{policy}-{seed}"
            (part, _) = find_parts([str(place)] * 2, "last" if is_run(place) else None)
            preset, *rest = self.options(member)
            config = load_config(preset, [*rest, f"eval.tasks={tasks}"])
            with PolicySampler(config, checkpoint=str(part.directory)) as sampler:
                row = sampler.evaluate().row
            done.write_text(json.dumps({"policy": policy, "seed": seed, "world": member, "success": row.success}))
        return json.loads(done.read_text(encoding="utf-8"))


def table(rows: Sequence[Row]) -> str:
    """Mean success over seeds by policy and world, and the mean over worlds against the run in all worlds."""
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    means: list[Result] = []
    lines = [
        f"| policy | {' | '.join(worlds)} | mean [95 %] | points more than joint |",
        "|---" * (len(worlds) + 3) + "|",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        for seed in seeds:
            own = [row["success"] for row in rows if (row["policy"], row["seed"]) == (policy, seed)]
            if len(own) == len(worlds):
                means.append(_as_result(policy, seed, fmean(own)))
    for policy in dict.fromkeys(one.label for one in means):
        cells = [
            f"{fmean(row['success'] for row in rows if (row['policy'], row['world']) == (policy, world)):.1%}"
            for world in worlds
        ]
        overall = mean_interval([[one.success] for one in means if one.label == policy])
        gap = paired_difference(means, policy, "joint").interval
        more = "" if policy == "joint" else f"{100 * gap.value:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
        lines.append(f"| {policy} | {' | '.join(cells)} | {overall.percent()} | {more} |")
    return "\n".join([*lines, ""])


def _as_result(label: str, seed: int, success: float) -> Result:
    """A result in the form that `turnwise compare` pairs."""
    return Result(
        world="all",
        label=label,
        seed=seed,
        success=success,
        success_low=success,
        success_high=success,
        best_success=success,
        area=success,
        reward=success,
        start_success=success,
        steps=0,
        sampled_tokens=0,
        trained_tokens=0,
        duration_s=0.0,
        curve=(),
    )


def run_study(plan: SpecialistsPlan, pool: Pool, seeds: Sequence[int], tasks: int, until_s: float) -> list[Row]:
    """All stages; every stage needs the one before."""
    members = list(plan.worlds.members)
    rows: list[Row] = []
    stages = [
        [partial(plan.warm_up, seed) for seed in seeds],
        [partial(plan.learn, member, seed) for member in (None, *members) for seed in seeds],
        [partial(plan.merge, seed) for seed in seeds],
    ]
    for stage in stages:
        if not run_jobs(pool, stage, until_s, lambda _: None):
            return rows
    policies = ("warm_up", *members, "mean", "sum_of_changes", "joint")
    plays = [partial(plan.play, one, seed, world, tasks) for one in policies for seed in seeds for world in members]
    run_jobs(pool, plays, until_s, rows.append)
    return sorted(rows, key=lambda row: (policies.index(row["policy"]), row["seed"], members.index(row["world"])))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worlds", choices=list(SETS), default="tiny")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--tasks", type=int, default=96, help="held-out tasks of each world")
    parser.add_argument("--out", type=Path, default=Path("runs/specialists"))
    parser.add_argument("--limit-s", type=float, default=24 * 3600, help="seconds after which to end")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION", help="more options of every run")
    parser.add_argument("--member", nargs="*", default=[], metavar="NAME.OPTION", help="more options of one world")
    options = parser.parse_args(argv)
    worlds = SETS[options.worlds]
    for name, _, text in (one.partition(".") for one in options.member):
        worlds = replace(worlds, members={**worlds.members, name: (*worlds.members[name], text)})
    options.out.mkdir(parents=True, exist_ok=True)
    plan = SpecialistsPlan(worlds=worlds, model=options.model, out=options.out, more=tuple(options.set))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    until_s = time.monotonic() + options.limit_s
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:  # its end stops what still runs
        rows = run_study(plan, pool, options.seeds, options.tasks, until_s)
    (options.out / "results.json").write_text(json.dumps(rows), encoding="utf-8")
    (options.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
