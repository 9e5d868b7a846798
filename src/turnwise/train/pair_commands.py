"""`turnwise pairs`: dialogues to preference pairs in a Parquet file, played for it or taken from stored runs.

    dpo       of N attempts at a task with the same env seed, the best against the worst
    refuel    of N continuations of one dialogue from a drawn turn on, the best against the worst

Nothing is paired across env seeds, unless it is asked for: a difference in luck would pass for one in skill.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.client.base import SamplingClient
from turnwise.credit.branching import TurnDistribution
from turnwise.credit.preferences import Pair, best_and_worst
from turnwise.envs.base import Task
from turnwise.errors import ConfigError, DataError
from turnwise.judges import attach_judge
from turnwise.rollout.branch import check_can_branch, play_branches
from turnwise.rollout.group import RolloutResult, play_groups
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import AttemptRow
from turnwise.sources import PlayBranches
from turnwise.train.assemble import Parts, assemble, distinct_tasks, make_renderer
from turnwise.train.commands import find_facts, make_service
from turnwise.train.config import check_backend
from turnwise.train.config_files import config_from_yaml
from turnwise.train.pairs import PairKind, StoredPair, check_can_write, write_pairs
from turnwise.train.play_commands import Policy, find_policy
from turnwise.trajectory import StopReason, Trajectory, TrajectoryGroup

DEFAULT_SAMPLES = {"dpo": 8, "refuel": 2}
ADVICE = {
    "constant": "every attempt at a task got the same reward: try another policy, or more --samples",
    "alone": "the attempts at a task met different env seeds, as in a grpo run. Where a world draws everything with "
    "its task, they may be compared all the same: --across-seeds",
    "not branched": "the run's attempts share no dialogue; refuel pairs come from a run of la_grpo or refuel, or are "
    "played: leave out --stored",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What the command line says."""

    kind: PairKind
    out: Path
    env: str | None = None
    num_tasks: int = 64
    samples: int | None = None
    turn: TurnDistribution = "uniform"
    is_stored: bool = False
    across_seeds: bool = False
    step: int | None = None


@dataclass(slots=True)
class _Found:
    """Pairs, and what came to nothing."""

    pairs: list[StoredPair] = field(default_factory=list[StoredPair])
    dropped: Counter[str] = field(default_factory=Counter[str])
    num_attempts: int = 0

    def add(self, group: TrajectoryGroup, store: Callable[[Pair], StoredPair]) -> None:
        """The pair that a group gives, if any."""
        try:
            pair = best_and_worst(group)
        except DataError:  # dialogues that do not begin alike, found by --across-seeds
            self.dropped["different starts"] += 1
            return
        if pair is None:
            self.dropped["alone" if len(group.trajectories) < 2 else "constant"] += 1
        elif pair.is_identical:
            self.dropped["identical"] += 1
        else:
            self.pairs.append(store(pair))


def run_pairs(targets: Sequence[str], overrides: Sequence[str], options: PairOptions) -> int:
    """Build pairs and write them; returns the exit code."""
    check_can_write(options.out)
    if options.is_stored:
        found = _read_runs(targets, options)
    elif len(targets) == 1:
        found = _play(targets[0], overrides, options)
    else:
        raise ConfigError(f"{len(targets)} policies to play; name one, or take the attempts of runs with --stored")
    lost = ", ".join(f"{count} {why}" for why, count in found.dropped.most_common())
    if not found.pairs:
        advice = "".join(f"; {ADVICE[why]}" for why, _ in found.dropped.most_common(1) if why in ADVICE)
        raise ConfigError(f"no pairs from {found.num_attempts} attempts (groups: {lost or 'none'}){advice}")
    write_pairs(options.out, found.pairs)
    gap = sum(stored.pair.reward_difference for stored in found.pairs) / len(found.pairs)
    print(f"{len(found.pairs)} {options.kind} pairs from {found.num_attempts} attempts, mean difference {gap:.3g}")
    if lost:
        print(f"groups without a pair: {lost}")
    print(f"wrote {options.out} ({options.out.stat().st_size / 1000:,.0f} kB)")
    print(f"learn from it: turnwise train {found.pairs[0].world} method={options.kind} data.pairs={options.out}")
    return 0


def _play(target: str, overrides: Sequence[str], options: PairOptions) -> _Found:
    policy = find_policy(target, options.env, options.step, overrides)
    if options.env is None and not is_run(Path(target)):
        raise ConfigError(f"{target} does not say which world it is for; add --env NAME")
    check_backend(policy.config.generator)
    parts = assemble(policy.config, find_facts(policy.config))
    tasks = distinct_tasks(parts.world, "train", options.num_tasks, derive_seed(policy.config.train.seed, "tasks"))
    with make_service(policy.config, policy.data_dir) as service:
        attach_judge(parts.world, service)
        played = asyncio.run(_play_tasks(policy, policy.sampler(service), parts, tasks, options))
    model = policy.config.model
    found = _Found(num_attempts=len(played.stats.kept) + played.stats.dropped.total())
    found.dropped.update(group.why.replace("_", " ") for group in played.dropped)
    data = {task.id: task.data for task in tasks}
    for group in played.groups:
        store = partial(
            _store, options.kind, parts.world.name, model.alias or model.name, _where(target, policy), policy.step
        )
        found.add(group, partial(store, data[group.task_id]))
    return found


def _where(target: str, policy: Policy) -> str:
    return target if is_run(Path(target)) else policy.checkpoint or ""


async def _play_tasks(
    policy: Policy, sampler: SamplingClient, parts: Parts, tasks: Sequence[Task], options: PairOptions
) -> RolloutResult:
    renderer = make_renderer(sampler.get_tokenizer(), policy.config.generator)
    samples = options.samples or DEFAULT_SAMPLES[options.kind]
    seed = derive_seed(policy.config.train.seed, "pairs")
    if options.kind == "dpo":
        rollout = dataclasses.replace(parts.rollout, group_size=samples, min_group_size=2, same_env_seed=True)
        return await play_groups(parts.world, tasks, sampler, renderer, rollout, seed=seed)
    await check_can_branch(parts.world, parts.rollout.limits)
    rollout = dataclasses.replace(parts.rollout, group_size=samples, min_group_size=2)
    plan = PlayBranches(continuations=samples, turn=options.turn)
    return await play_branches(parts.world, tasks, sampler, renderer, rollout, plan=plan, seed=seed)


def _store(
    kind: PairKind, world: str, model: str, run: str, step: int, task: Mapping[str, Any], pair: Pair
) -> StoredPair:
    return StoredPair(pair=pair, kind=kind, world=world, model=model, run=run, step=step, task=task)


def _read_runs(targets: Sequence[str], options: PairOptions) -> _Found:
    found = _Found()
    for target in targets:
        with RunReader(target) as run:
            config = config_from_yaml(run.config_yaml, str(run.directory))
            model = config.model.alias or config.model.name
            for step, trajectories in _stored_groups(run, options):
                found.num_attempts += len(trajectories)
                group, why = _to_group(trajectories, options.kind)
                if why is not None:
                    found.dropped[why] += 1
                    continue
                store = partial(_store, options.kind, config.env.name, model, str(run.directory), step)
                found.add(group, partial(store, run.task(group.task_id)))
    return found


def _stored_groups(run: RunReader, options: PairOptions) -> Iterator[tuple[int, list[Trajectory]]]:
    """The attempts of a run that may be compared: those at one task, in one step, with one env seed."""
    rows: dict[tuple[int, str], list[AttemptRow]] = defaultdict(list)
    for row in run.attempts(phase="train"):
        if row.has_tokens and row.stop_reason != StopReason.FAILED:
            rows[row.step, row.task_id].append(row)
    for (step, _), own in rows.items():
        by_start: dict[object, list[Trajectory]] = defaultdict(list)
        for row in own:
            trajectory = run.attempt(row.id).trajectory
            turn = 0 if trajectory.branch is None else trajectory.branch.turn
            by_start[turn if options.across_seeds else (turn, trajectory.seed)].append(trajectory)
        yield from ((step, trajectories) for trajectories in by_start.values())


def _to_group(trajectories: Sequence[Trajectory], kind: PairKind) -> tuple[TrajectoryGroup, str | None]:
    """The group that stored attempts were, and why it is of no use, if it is not."""
    branch = trajectories[0].branch
    turn = 0 if branch is None else branch.turn
    group = TrajectoryGroup(
        task_id=trajectories[0].task_id, trajectories=tuple(trajectories), branch_turn=None if branch is None else turn
    )
    if kind == "refuel" and branch is None:
        return group, "not branched"
    return group, None
