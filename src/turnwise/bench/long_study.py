"""Studies of long attempts: which method learns, what memory is worth, and what entropy does meanwhile.

    python -m turnwise.bench.long_study methods --seeds 1 2 3 4 5 --jobs 12 --out runs/long_methods
    python -m turnwise.bench.long_study memory --seeds 1 2 3 4 5 --jobs 12 --out runs/long_memory
    python -m turnwise.bench.long_study entropy --seeds 1 2 3 4 5 --jobs 12 --out runs/long_entropy
    python -m turnwise.bench.long_study smollm2 --seeds 1 2 3 --jobs 3 --out runs/long_smollm2
    python -m turnwise.bench.long_study critic --seeds 1 2 3 4 5 --jobs 12 --out runs/long_critic

A study has arms: options of a run, trained once for each seed. In `methods` all arms of a seed start from one warm-up
on short attempts. It goes on in rounds, for all seeds alike, until the mean held-out success on long ones is at least
`WARM_SUCCESS`. Then runs have equal bounds on sampled tokens, and are compared seed by seed at the largest number of
tokens that all of them have reached. At the end the policies play attempts of other lengths (`horizons`).

With `--limit-s` the study ends in time: what runs is stopped, and the tables hold what is there. They are written to
`table.md` and `results.json`. The same command goes on with what was not finished.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from turnwise.bench.study_jobs import run_jobs
from turnwise.compare.results import Result, area_under, summarize
from turnwise.models.tiny import write_tiny
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.progress import num_drawn_tokens
from turnwise.training.run import Run, evaluate, train
from turnwise.watch.observer import Observer

WARM_SUCCESS = 0.12
MAX_ROUNDS = 6
EDGE = 5
"""Steps at each end of a run over which a metric is averaged."""
ENTROPIES = ("rollout/entropy_estimate", "behaviour/entropy_first_token", "behaviour/action_entropy")
OTHERS = ("rollout/turns_mean", "rollout/splits", "rollout/prompt_tokens_max", "behaviour/repeat_share")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is trained, and what the trained policies play."""

    world: tuple[str, ...]
    """The preset and options of every run; empty: every arm begins with a preset of its own."""
    arms: Mapping[str, tuple[str, ...]]
    tokens: int
    """Sampled tokens of every run."""
    positions: int = 0
    """Most tokens of a prompt and its reply, for a copy of `tiny` that takes more than `tiny`; 0: the world's model."""
    warm: tuple[str, ...] = ()
    """Options of a round of the common warm-up; empty: every run warms up by itself."""
    horizons: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Options of attempts of other lengths, which the policies play before and after."""
    horizon_arms: tuple[str, ...] = ()
    """The arms whose policies play them; empty: all."""
    horizon_tasks: int = 48


PPO = ("method=ppo",)
PRETRAINED = ("critic.pretrain_steps=3", "critic.pretrain_updates=8")
CALIBRATED = "method.calibrate=true"
NO_PRETRAINING = (*PPO, "critic.pretrain_steps=0")
LEARNS = ("critic.learning_rate=3e-3", "critic.updates=4", "method.alpha=0.3", CALIBRATED)
"""A critic that learns enough to know its states, and advantages that trust it."""
LEARNS_AHEAD = (
    *("critic.pretrain_from=demonstrations", "critic.pretrain_steps=16", "critic.pretrain_updates=8"),
    *("critic.pretrain_patience=16", "critic.pretrain_learning_rate=3e-3", "warmup.demonstrations=512"),
)
CELLS = {"16 cells": 2, "24 cells": 3, "60 cells": 5, "100 cells": 7, "200 cells": 10}
FORM = (
    *("workflow", "env.options.level=3", "rollout.max_trajectory_tokens=420", "train.tasks_per_step=6"),
    *("train.learning_rate=7e-4", "eval.every=7", "eval.tasks=48", "warmup.steps=120"),
)
"""A form of 24 cells in a context that holds about 13 of them."""
STUDIES: Mapping[str, Study] = {
    "methods": Study(
        world=(
            *("workflow", "env.options.level=5", "env.options.demonstration_skill=0.9", "memory.window=6"),
            *("train.tasks_per_step=4", "rollout.group_size=8", "eval.tasks=48", "eval.every=5"),
            "train.learning_rate=1e-3",
        ),
        warm=("env.options.level=3", "warmup.steps=120"),
        arms={
            "grpo": (),
            "grpo, whole attempts": ("method.credit=trajectory",),
            "gigpo": ("method=gigpo",),
            "ppo": (*PPO, "critic.pretrain_steps=0"),
            "ppo, pre-trained": (*PPO, *PRETRAINED),
            "ppo, calibrated": (*PPO, "critic.pretrain_steps=0", CALIBRATED),
            "ppo, calibrated, plain returns": (
                *(*PPO, "critic.pretrain_steps=0", CALIBRATED),
                "method.policy_lambda=1.0",
            ),
            "vapo": (*PPO, *PRETRAINED, CALIBRATED, "method.positive_nll=0.1"),
        },
        tokens=120_000,
        horizons={cells: (f"env.options.level={level}",) for cells, level in CELLS.items()},
    ),
    "memory": Study(
        world=FORM,
        arms={
            "no memory": ("memory.window=0", "memory.summary_tokens=0"),
            "window": ("memory.window=6", "memory.summary_tokens=0"),
            "window and summaries": ("memory.window=6",),
        },
        tokens=150_000,
    ),
    "entropy": Study(
        world=(),
        arms={
            "guess_number": ("guess_number_tiny",),
            "key_door": ("key_door", "model=tiny", "model.rank=32", "warmup.learning_rate=5e-3", "warmup.steps=100"),
            "workflow, 24 cells": ("workflow", "env.options.level=3"),
            "workflow, 60 cells": ("workflow",),
        },
        tokens=200_000,
    ),
    "smollm2": Study(
        world=(
            *(
                "workflow",
                "model=smollm2",
                "model.rank=16",
                "env.options.level=5",
                "env.options.demonstration_skill=0.9",
            ),
            *("memory.window=6", "memory.summary_tokens=16", "train.tasks_per_step=4", "rollout.group_size=8"),
            *("warmup.demonstrations=160", "warmup.batch_size=4", "warmup.learning_rate=1e-3"),
            *("train.learning_rate=3e-4", "train.lr_warmup=3", "eval.every=5", "eval.tasks=32"),
        ),
        warm=("env.options.level=3", "warmup.steps=40"),
        arms={"grpo": ()},
        tokens=150_000,
        horizons={cells: (f"env.options.level={CELLS[cells]}",) for cells in ("24 cells", "60 cells", "100 cells")},
    ),
    "critic": Study(
        world=(
            *("study_value", "env.options.num_rooms=16", "env.options.num_keys=2", "env.options.spare_turns=32"),
            *("env.options.demonstration_skill=0.0", "eval.tasks=32", "eval.every=5", "train.learning_rate=3e-4"),
            *("train.tasks_per_step=2", "rollout.group_size=8"),
        ),
        warm=("warmup.steps=240", "warmup.demonstrations=512"),
        arms={
            "grpo": (),
            "grpo, fast": ("train.learning_rate=1e-3",),
            "ppo": NO_PRETRAINING,
            "ppo, critic learns": (*NO_PRETRAINING, *LEARNS),
            "ppo, critic learns ahead": (*PPO, *LEARNS, *LEARNS_AHEAD),
            "vapo": (*PPO, *LEARNS, *LEARNS_AHEAD, "method.positive_nll=0.1"),
        },
        tokens=100_000,
        positions=4096,
    ),
}


def write_longer_tiny(target: Path, positions: int) -> Path:
    """`tiny` for prompts of up to `positions` tokens; its rotary positions have no end of their own."""
    if not (target / "config.json").is_file():
        target.mkdir(parents=True, exist_ok=True)
        write_tiny(target)
        file = target / "config.json"
        content = json.loads(file.read_text(encoding="utf-8")) | {"max_position_embeddings": positions}
        file.write_text(json.dumps(content), encoding="utf-8")
    return target


def _silently(arguments: Sequence[str], directory: Path) -> None:
    """Train, or go on with a run that was stopped."""
    if is_run(directory):
        Run.resume(directory, observer=Observer())
        return
    train(arguments[0], directory=directory, overrides=[*arguments[1:], "run.dialogues=0"], observer=Observer())


def _has_ended(directory: Path) -> bool:
    if not is_run(directory):
        return False
    with RunReader(directory) as run:
        return any(row.label == "end" for row in run.evaluations())


def warm_up(study: Study, out: Path, seed: int, number: int) -> float:
    """One round of the common warm-up of a seed; the held-out success after it."""
    place, before = out / f"warm-{seed}-{number}", out / f"warm-{seed}-{number - 1}"
    done = place.with_suffix(".json")
    if not done.is_file():
        begin = [f"model.from={before}"] if number else []
        rounds = ["train.steps=0", "eval.tasks=0", f"train.seed={1000 * number + seed}"]
        world = [text for text in study.world if not text.startswith("eval.")]
        _silently([*world, *study.warm, *begin, *rounds], place)
        own = [text for text in study.world if text.startswith(("env.", "eval.tasks"))]
        played = evaluate(place, overrides=own)
        done.write_text(json.dumps(played.row.success), encoding="utf-8")
    return float(json.loads(done.read_text(encoding="utf-8")))


def train_one(study: Study, out: Path, arm: str, seed: int, start: str) -> None:
    """One run of an arm, to its end."""
    place = out / _name(arm, seed)
    if _has_ended(place):
        return
    begin = [f"model.from={start}", "warmup.steps=0"] if start else []
    bound = [f"train.max_sampled_tokens={study.tokens}", "train.steps=100000", f"train.seed={seed}"]
    _silently([*study.world, *study.arms[arm], *begin, *bound], place)


def play_horizon(study: Study, out: Path, place: str, horizon: str) -> Row:
    """Held-out attempts of another length with one policy, as it is at its end."""
    done = out / f"{place}-{horizon.replace(' ', '-')}.json"
    if not done.is_file():
        played = evaluate(
            out / place, step="last", overrides=[*study.horizons[horizon], f"eval.tasks={study.horizon_tasks}"]
        )
        attempts = [one for group in played.played.groups for one in group.trajectories]
        row: Row = {"place": place, "horizon": horizon, "success": played.row.success, "reward": played.row.reward}
        row["turns"] = fmean(len(one.turns) for one in attempts)
        row["longest_prompt"] = max(len(turn.prompt_ids) for one in attempts for turn in one.turns)
        row["tokens"] = fmean(sum(len(turn.sampled_ids) for turn in one.turns) for one in attempts)
        done.write_text(json.dumps(row), encoding="utf-8")
    return json.loads(done.read_text(encoding="utf-8"))


def _name(arm: str, seed: int) -> str:
    return f"{arm.replace(', ', '-').replace(' ', '_')}-{seed}"


def read_one(arm: str, seed: int, directory: Path) -> Row | None:
    """What a run says, also one that was stopped: its curve, and how it behaved at both ends. None: nothing yet."""
    if not is_run(directory):
        return None
    with RunReader(directory) as run:
        rows = run.evaluations()
        before = [row for row in rows if row.label in ("start", "warm-up")]
        if not before or not [row for row in rows if row.label in ("step", "end")]:
            return None
        curve = [(0, _rate(before[-1].success), before[-1].reward)]
        if drawn := num_drawn_tokens(run, 0):  # a critic's pre-training; the policy has not changed since
            curve.append((drawn, *curve[0][1:]))
        known = {row.step: row for row in rows if row.label in ("step", "end")}
        curve += [(num_drawn_tokens(run, at), _rate(row.success), row.reward) for at, row in sorted(known.items())]
        found: Row = {"arm": arm, "seed": seed, "steps": max(known), "curve": curve}
        for name in (*ENTROPIES, *OTHERS):
            values = [value for _, value in run.metric(name) if math.isfinite(value)]
            if values:
                found[name] = [fmean(values[:EDGE]), fmean(values[-EDGE:]), max(values)]
        found["seconds"] = sum(value for _, value in run.metric("time/step_s"))
        explained = [value for _, value in run.metric("train/critic_explained_variance") if math.isfinite(value)]
        if explained:
            found["explained"] = [fmean(explained[:EDGE]), fmean(explained[-EDGE:])]
    return found


def _rate(success: float) -> float:
    """The success rate; 0 where no attempt came to its verdict, because the context was full before."""
    return 0.0 if math.isnan(success) else success


def results_at(rows: Sequence[Row], study: str, tokens: int) -> list[Result]:
    """Every run as `turnwise compare` sees it, as if all had ended at `tokens`, on the line between two evaluations."""
    found: list[Result] = []
    for row in rows:
        xs, ys, rewards = (np.array(values, dtype=float) for values in zip(*row["curve"], strict=True))
        curve = [(int(x), 0, float(y)) for x, y in zip(xs, ys, strict=True)]
        found.append(
            Result(
                world=study,
                label=row["arm"],
                seed=row["seed"],
                success=float(np.interp(tokens, xs, ys)),
                success_low=math.nan,
                success_high=math.nan,
                best_success=float(ys.max()),
                start_success=float(ys[0]),
                area=area_under(curve, tokens),
                reward=float(np.interp(tokens, xs, rewards)),
                steps=row["steps"],
                sampled_tokens=tokens,
                trained_tokens=0,
                duration_s=row["seconds"],
                curve=tuple(curve),
            )
        )
    return found


def tables(rows: Sequence[Row], played: Sequence[Row], study: str) -> str:
    """Markdown tables: success, behaviour, and success by length of the attempt."""
    if not rows:
        return "no run has an evaluation yet\n"
    tokens = min(row["curve"][-1][0] for row in rows)
    lines = [
        *(f"{len(rows)} runs, compared at {tokens:,} sampled tokens.", ""),
        "| arm | seeds | before | after [95 %] | points more | mean over tokens | points more | reward |",
        "|---" * 8 + "|",
    ]
    for one in summarize(results_at(rows, study, tokens)):
        more = [
            ""
            if gap is None
            else f"{100 * gap.interval.value:+.1f} [{100 * gap.interval.low:+.1f}, "
            f"{100 * gap.interval.high:+.1f}]{'**' if gap.is_told_by_holm else '*' if gap.is_told else ''}"
            for gap in (one.more_success, one.more_area)
        ]
        lines.append(
            f"| {one.label} | {one.num_seeds} | {one.start_success:.1%} | {one.success.percent()} | {more[0]} | "
            f"{one.area.percent()} | {more[1]} | {one.reward:.3f} |"
        )
    return "\n".join([*lines, "", *_behaviour(rows), "", *_horizons(played), ""])


def _behaviour(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| arm | entropy, nats/token | rises in | of the first token | of actions | turns | longest prompt |",
        "|---" * 7 + "|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        risen = sum(row[ENTROPIES[0]][1] > row[ENTROPIES[0]][0] for row in own if ENTROPIES[0] in row)
        cells = [_change(own, name) for name in (*ENTROPIES, "rollout/turns_mean")]
        longest = max(row["rollout/prompt_tokens_max"][2] for row in own)
        lines.append(f"| {arm} | {cells[0]} | {risen} of {len(own)} | {' | '.join(cells[1:])} | {longest:.0f} |")
    return lines


def _change(own: Sequence[Row], name: str) -> str:
    known = [row[name] for row in own if name in row]
    return f"{fmean(one[0] for one in known):.3f} to {fmean(one[1] for one in known):.3f}" if known else "-"


def _horizons(played: Sequence[Row]) -> list[str]:
    lines = ["| policy | attempts | success | turns | longest prompt | sampled tokens |", "|---" * 6 + "|"]
    keys = dict.fromkeys((row["place"].rpartition("-")[0], row["horizon"]) for row in played)
    for policy, horizon in keys:
        own = [row for row in played if row["place"].rpartition("-")[0] == policy and row["horizon"] == horizon]
        means = [fmean(row[name] for row in own) for name in ("success", "turns", "tokens")]
        longest = max(row["longest_prompt"] for row in own)
        lines.append(f"| {policy} | {horizon} | {means[0]:.1%} | {means[1]:.0f} | {longest} | {means[2]:.0f} |")
    return lines if played else []


class StudyRun:
    """One study on its way: what it has, and when it must end."""

    def __init__(self, name: str, study: Study, options: argparse.Namespace) -> None:
        self.name = name
        self.out: Path = options.out
        if study.positions:
            model = write_longer_tiny(self.out.absolute() / "model", study.positions)
            study = replace(study, world=(*study.world, f"model.name={model}"))
        self.study = study
        self.seeds: list[int] = options.seeds
        self.deadline_s = time.monotonic() + options.limit_s
        self.out.mkdir(parents=True, exist_ok=True)
        self.played: list[Row] = []

    def run(self, pool: Pool, horizon_s: float) -> None:
        starts = self._warm_up(pool)
        if starts is not None:
            jobs = [
                partial(train_one, self.study, self.out, arm, seed, starts.get(seed, ""))
                for seed in self.seeds
                for arm in self.study.arms
            ]
            run_jobs(pool, jobs, self.deadline_s - horizon_s, self.write)
        self.write(None)

    def play(self, pool: Pool) -> None:
        """The attempts of other lengths, with every policy that is there."""
        places = sorted(place.name for place in self.out.iterdir() if place.is_dir() and is_run(place))
        trained = [_name(arm, seed) for seed in self.seeds for arm in self.study.horizon_arms or self.study.arms]
        for seed in self.seeds:
            rounds = [place for place in places if place.startswith(f"warm-{seed}-")]
            if rounds and not (self.out / f"warm_up-{seed}").exists():
                (self.out / f"warm_up-{seed}").symlink_to(max(rounds))
        jobs = [
            partial(play_horizon, self.study, self.out, place, horizon)
            for horizon in self.study.horizons
            for place in [*(f"warm_up-{seed}" for seed in self.seeds), *trained]
            if is_run(self.out / place)
        ]
        run_jobs(pool, jobs, self.deadline_s, self.played.append)
        self.write(None)

    def write(self, _: object) -> None:
        rows = [
            row
            for arm in self.study.arms
            for seed in self.seeds
            if (row := read_one(arm, seed, self.out / _name(arm, seed))) is not None
        ]
        content = {"study": self.name, "runs": rows, "horizons": self.played}
        (self.out / "results.json").write_text(json.dumps(content), encoding="utf-8")
        (self.out / "table.md").write_text(tables(rows, self.played, self.name), encoding="utf-8")

    def _warm_up(self, pool: Pool) -> dict[int, str] | None:
        """The run that each seed starts from; None if the time was up before."""
        if not self.study.warm:
            return {}
        for number in range(MAX_ROUNDS):
            found: list[float] = []
            jobs = [partial(warm_up, self.study, self.out, seed, number) for seed in self.seeds]
            run_jobs(pool, jobs, self.deadline_s, found.append)
            if len(found) < len(self.seeds):
                return None
            print(f"warm-up, round {number}: {', '.join(f'{one:.0%}' for one in sorted(found))}", flush=True)
            if fmean(found) >= WARM_SUCCESS or number + 1 == MAX_ROUNDS:
                return {seed: str(self.out / f"warm-{seed}-{number}") for seed in self.seeds}
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/long_study"))
    parser.add_argument("--limit-s", type=float, default=24 * 3600, help="seconds after which to end")
    parser.add_argument("--horizon-s", type=float, default=0, help="of these, seconds for attempts of other lengths")
    parser.add_argument("--horizon-arms", nargs="*", default=[], help="arms that play them; default: all")
    parser.add_argument("--horizon-tasks", type=int, default=48, help="held-out tasks of each length")
    parser.add_argument("--arms", nargs="*", help="default: all")
    parser.add_argument("--tokens", type=int, help="sampled tokens of every run")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION", help="more options of every run")
    parser.add_argument("--warm", nargs="*", default=[], metavar="OPTION", help="more options of the common warm-up")
    options = parser.parse_args(argv)
    study = STUDIES[options.study]
    world, more = (*study.world, *options.set) if study.world else (), () if study.world else options.set
    arms = {arm: (*study.arms[arm], *more) for arm in options.arms or study.arms}
    horizons = {"horizon_arms": tuple(options.horizon_arms), "horizon_tasks": options.horizon_tasks}
    warm = (*study.warm, *options.warm) if study.warm else ()
    study = replace(study, world=world, warm=warm, arms=arms, tokens=options.tokens or study.tokens, **horizons)
    run = StudyRun(options.study, study, options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs) as pool:  # its end kills what still runs
        run.run(pool, options.horizon_s)
    if study.horizons:
        with context.Pool(options.jobs) as pool:
            run.play(pool)
    print((options.out / "table.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
