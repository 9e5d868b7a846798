"""`turnwise pairs`: write preference pairs to a Parquet file, from new dialogues or from stored runs.

    dpo       of N attempts at a task with the same env seed, the best and the worst
    refuel    of N continuations of one dialogue from a random turn on, random pairs

The difference between the best and the worst grows with the number of attempts, and a regression would learn that, so
`refuel` pairs at random. Attempts with different env seeds are paired only if you ask for it, because they also differ
in luck. Pairs that teach nothing are counted and left out: equal rewards, the same words, a side that no loss reads.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.backends import find_publisher
from turnwise.client.base import SamplingClient
from turnwise.commands.play import open_policy
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml, config_to_yaml, load_config
from turnwise.credit.advantages import is_constant_group
from turnwise.credit.branching import TurnDistribution
from turnwise.credit.preferences import PreferencePair, best_and_worst, disjoint_pairs
from turnwise.envs.base import Task
from turnwise.envs.joint import leaves
from turnwise.envs.registry import load_target, world_options
from turnwise.errors import ConfigError, DataError
from turnwise.judges import attach_judge
from turnwise.models.config import ModelConfig
from turnwise.opponents.seating import scripted_twin
from turnwise.outcomes import attach_outcome_model
from turnwise.rollout.branch import BranchRollout, check_can_branch
from turnwise.rollout.group import Rollout, RolloutResult
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.sources import PlayBranches
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import AttemptRow
from turnwise.training.assemble import Parts, assemble, distinct_tasks, make_renderer
from turnwise.training.pairs import PairKind, Provenance, StoredPair, check_can_write, push_pairs, write_pairs
from turnwise.training.policy import PolicySampler
from turnwise.training.setup import find_facts
from turnwise.training.start_from import SHAPE
from turnwise.training.stored import Origin, check_origin, check_pairable, origin_of, train_rows
from turnwise.trajectory import Trajectory, TrajectoryGroup

TASKS_AT_ONCE = 16
"""With a limit on tokens: how many tasks are played before they are counted."""
DEFAULT_SAMPLES = {"dpo": 8, "refuel": 2}
ADVICE = {
    "constant": "every attempt at a task got the same reward: try another policy, or more --samples",
    "masked": "the better or the worse side of every pair is left out of the loss (rollout.on_unparsable=mask)",
    "alone": "the attempts at a task met different env seeds, as in a run with rollout.same_start=false. Where a "
    "world draws everything with its task, they may be compared all the same: --across-seeds",
    "not branched": "the run's attempts share no dialogue; refuel pairs come from a run of la_grpo or refuel, or are "
    "played: leave out --stored",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """The options of the command line."""

    kind: PairKind
    out: Path
    env: str | None = None
    num_tasks: int = 64
    num_tokens: int = 0
    """Number of sampled tokens after which to stop; 0: play all tasks."""
    samples: int | None = None
    turn: TurnDistribution = "uniform"
    is_stored: bool = False
    across_seeds: bool = False
    world: str = ""
    """With `is_stored`: the member of a mix whose attempts are paired; empty: all."""
    step: str | None = None
    hf_repo: str | None = None
    """A data set repository of the hub that the file is pushed to."""


@dataclass(slots=True)
class _Found:
    """The pairs found, and the reasons for those left out."""

    pairs: list[StoredPair] = field(default_factory=list[StoredPair])
    dropped: Counter[str] = field(default_factory=Counter[str])
    num_attempts: int = 0
    num_tokens: int = 0
    """Sampled tokens; 0 where nothing was played."""
    config: Config = field(default_factory=Config)
    """What was played with; of stored attempts, the config of the first run."""
    start: Sequence[str] = ()
    """The options with which training begins with the policy that played, the reference of the pairs."""

    def add(self, group: TrajectoryGroup, kind: PairKind, store: Callable[[PreferencePair], StoredPair]) -> None:
        """The pairs that a group gives, if any."""
        if len(group.trajectories) < 2:
            self.dropped["alone"] += 1
            return
        try:
            pairs = _candidates(group, kind)
        except DataError:  # dialogues with different beginnings, from --across-seeds
            self.dropped["different starts"] += 1
            return
        self.dropped["constant"] += not pairs
        for pair in pairs:
            why = _why_useless(pair, kind)
            if why is None:
                rest = [one for one in group.trajectories if one not in (pair.chosen, pair.rejected)]
                self.pairs.append(replace(store(pair), rest=tuple(rest) if kind == "dpo" else ()))
            else:
                self.dropped[why] += 1
        if kind == "refuel" and len(group.trajectories) % 2:
            self.dropped["left over"] += 1


def _candidates(group: TrajectoryGroup, kind: PairKind) -> list[PreferencePair]:
    """The pairs of a group, by the rule of their kind; of kind dpo none where no attempt was better than another."""
    if kind == "dpo":
        pair = best_and_worst(group)
        return [] if pair is None else [pair]
    return disjoint_pairs(group)


def _why_useless(pair: PreferencePair, kind: PairKind) -> str | None:
    """Why nothing can be learned from a pair, or None."""
    if is_constant_group([pair.chosen.total_reward, pair.rejected.total_reward]):
        return "constant"
    is_refuel = kind == "refuel"
    if pair.is_masked(only_branch_turn=is_refuel):
        return "masked"
    return "identical" if (pair.is_identical_at_branch if is_refuel else pair.is_identical) else None


def run_pairs(targets: Sequence[str], overrides: Sequence[str], options: PairOptions) -> int:
    """Build pairs and write them; returns the exit code."""
    check_can_write(options.out)
    if options.world and not options.is_stored:
        raise ConfigError(
            f"--world {options.world} chooses among stored attempts; add --stored, or set env=NAME to play"
        )
    if options.is_stored:
        found = _read_runs(targets, options)
    elif len(targets) == 1:
        found = _play(targets[0], overrides, options)
    else:
        raise ConfigError(f"{len(targets)} policies to play; name one, or take the attempts of runs with --stored")
    lost = ", ".join(f"{count} {why}" for why, count in found.dropped.most_common() if count)
    if not found.pairs:
        advice = "".join(f"; {ADVICE[why]}" for why, _ in found.dropped.most_common(1) if why in ADVICE)
        raise ConfigError(f"no pairs from {found.num_attempts} attempts (left out: {lost or 'none'}){advice}")
    write_pairs(options.out, found.pairs, _provenance(targets, options, found))
    gap = sum(stored.pair.reward_difference for stored in found.pairs) / len(found.pairs)
    tokens = f" and {found.num_tokens:,} sampled tokens" if found.num_tokens else ""
    attempts = f"{found.num_attempts} attempts{tokens}"
    print(f"{len(found.pairs)} {options.kind} pairs from {attempts}, mean difference {gap:.3g}")
    if lost:
        print(f"left out: {lost}")
    print(f"wrote {options.out} ({options.out.stat().st_size / 1000:,.0f} kB)")
    if options.hf_repo is not None:
        push_pairs(options.out, options.hf_repo)
        print(f"pushed to {options.hf_repo}")
    first = found.pairs[0]
    world = first.world if " " not in first.world else "FILE"
    start = "".join(f" {option}" for option in (*found.start, *_game_options(found.config, world)))
    learn = f"turnwise train {world} model={first.model}{start} method={options.kind} data.pairs={options.out}"
    print(f"learn from it: {learn}")
    return 0


def _game_options(config: Config, world: str) -> list[str]:
    """The options with which a run of `world` evaluates on the games that the pairs are of, and not on its preset's."""
    if config.env.mix or world == "FILE":
        return []
    try:
        usual, target = load_config(world, []).env, load_target(config.env.name)
        defaults = {option.name: option.default for option in world_options(config.env.name)}
    except ConfigError:  # pairs of stored attempts need no world; one that is not here has no options that we know
        return []
    found = [] if config.env.difficulty == usual.difficulty else [f"env.difficulty={config.env.difficulty}"]
    for name in {**usual.options, **config.env.options}:
        value, default = config.env.options.get(name, defaults.get(name)), usual.options.get(name, defaults.get(name))
        is_model = name == "opponent" and value not in getattr(target, "scripted_opponents", (value,))
        if value != default and not is_model:  # a model would have to be loaded, and learning from a file needs none
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            found.append(f"env.options.{name}={text}")
    return found


def _provenance(targets: Sequence[str], options: PairOptions, found: _Found) -> Provenance:
    is_branched = options.kind == "refuel" and not options.is_stored
    return Provenance(
        policies=tuple(targets),
        config=config_to_yaml(found.config),
        is_stored=options.is_stored,
        across_seeds=options.across_seeds,
        samples=0 if options.is_stored else options.samples or DEFAULT_SAMPLES[options.kind],
        turn=options.turn if is_branched else "",
        num_attempts=found.num_attempts,
        num_sampled_tokens=found.num_tokens,
    )


def _check_read(overrides: Sequence[str]) -> None:
    """Refuse weights and shaping of rewards: pairs are chosen by rewards as they were played."""
    for name in (text.partition("=")[0].strip() for text in overrides):
        if name.startswith("reward.") and name != "reward.model":
            raise ConfigError(
                f"{name} is not read by turnwise pairs, which compares attempts by their rewards as they were played; "
                "leave it out"
            )


def _play(target: str, overrides: Sequence[str], options: PairOptions) -> _Found:
    _check_read(overrides)
    policy = open_policy(target, options.env, options.step, overrides)
    if options.env is None and not is_run(Path(target)):
        raise ConfigError(f"{target} does not say which world it is for; add --env NAME")
    policy.check_world()
    find_publisher(policy.config.rollout.backend)
    parts = assemble(policy.config, find_facts(policy.config))
    tasks = distinct_tasks(parts.world, "train", options.num_tasks, derive_seed(policy.config.train.seed, "tasks"))
    with policy:
        attach_judge(parts.world, policy.service)
        attach_outcome_model(parts.world, policy.service)
        with policy.opposed(parts.world, parts.rollout) as world:
            seated = replace(parts, world=world)
            played = asyncio.run(_play_tasks(policy, policy.sampler, seated, tasks, options))
    origin = origin_of(policy.config)
    found = _Found(config=policy.config, start=_start(target, policy, options.step))
    data = {task.id: task.data for task in tasks}
    stats = played[-1].stats  # one player counts over all parts
    found.num_attempts = len(stats.kept) + stats.dropped.total()
    found.num_tokens = stats.num_drawn
    for part in played:
        found.dropped.update(group.why.replace("_", " ") for group in part.dropped)
        for group in part.groups:
            store = partial(_store, options.kind, origin, _where(target, policy), policy.step)
            found.add(group, options.kind, partial(store, data[group.task_id]))
    if found.num_tokens < options.num_tokens:
        raise ConfigError(
            f"{options.num_tasks} tasks gave {found.num_tokens:,} sampled tokens, less than --tokens "
            f"{options.num_tokens:,}; add --tasks"
        )
    return found


def _start(target: str, policy: PolicySampler, step: str | None) -> list[str]:
    """The options with which a run begins with this policy. A warm-up would move it away from what the pairs saw."""
    if policy.checkpoint is None:
        return ["warmup.steps=0"]
    model, usual = policy.config.model, ModelConfig()
    shape = [f"model.{name}={getattr(model, name)}" for name in SHAPE if getattr(model, name) != getattr(usual, name)]
    is_best = is_run(Path(target)) and step is None
    return [*shape, f"model.from={target if is_best else policy.files or policy.checkpoint}", "warmup.steps=0"]


def _where(target: str, policy: PolicySampler) -> str:
    return target if is_run(Path(target)) else policy.checkpoint or ""


async def _play_tasks(
    policy: PolicySampler, sampler: SamplingClient, parts: Parts, tasks: Sequence[Task], options: PairOptions
) -> list[RolloutResult]:
    """Play all tasks at once; with a limit on tokens, some at a time."""
    renderer = make_renderer(sampler.get_tokenizer(), policy.config.rollout, policy.config.memory)
    samples = options.samples or DEFAULT_SAMPLES[options.kind]
    seed = derive_seed(policy.config.train.seed, "pairs")
    if options.kind == "dpo":
        changes = {"group_size": samples, "min_group_size": 2, "same_start": True}
        rollout = parts.rollout.model_copy(update=changes)
        player = Rollout(parts.world, sampler, renderer, rollout)
        player.rules = lambda task: parts.rules(task).model_copy(update=changes)
        return await _play_parts(player, tasks, seed, options)
    for world in leaves(parts.world).values():
        await check_can_branch(scripted_twin(world), parts.rollout)
    rollout = parts.rollout.model_copy(update={"group_size": samples, "min_group_size": 2})
    plan = PlayBranches(continuations=samples, turn=options.turn)
    player = BranchRollout(parts.world, sampler, renderer, rollout, plan=plan)
    player.rules = parts.rules
    return await _play_parts(player, tasks, seed, options)


async def _play_parts(
    player: Rollout | BranchRollout, tasks: Sequence[Task], seed: int, options: PairOptions
) -> list[RolloutResult]:
    if not options.num_tokens:
        return [await player.play(tasks, seed=seed)]
    played: list[RolloutResult] = []
    for begin in range(0, len(tasks), TASKS_AT_ONCE):
        played.append(await player.play(tasks[begin : begin + TASKS_AT_ONCE], seed=derive_seed(seed, begin)))
        if player.stats.num_drawn >= options.num_tokens:
            break
    return played


def _store(
    kind: PairKind, origin: Origin, run: str, step: int, task: Mapping[str, Any], pair: PreferencePair
) -> StoredPair:
    return StoredPair(
        pair=pair,
        kind=kind,
        world=origin.world,
        model=origin.model,
        run=run,
        step=step,
        opponent=pair.chosen.labels.get("opponent", ""),
        task=task,
    )


def _read_runs(targets: Sequence[str], options: PairOptions) -> _Found:
    found = _Found()
    wanted: Origin | None = None
    for target in targets:
        with RunReader(target) as run:
            config = config_from_yaml(run.config_yaml, str(run.directory))
            origin = origin_of(config, options.world)
            if wanted is None:
                wanted, found.config = origin, config
            check_origin(
                origin, wanted, target, other=f"one file holds pairs of one world and model, and {targets[0]} has"
            )
            rows = train_rows(run, options.world)
            check_pairable(rows, config, target, only_branch_turn=options.kind == "refuel")
            for step, trajectories in _stored_groups(run, rows, options):
                found.num_attempts += len(trajectories)
                group, why = _to_group(trajectories, options.kind)
                if why is not None:
                    found.dropped[why] += 1
                    continue
                store = partial(_store, options.kind, origin, str(run.directory), step)
                found.add(group, options.kind, partial(store, run.task(group.task_id)))
    return found


def _stored_groups(
    run: RunReader, rows: Sequence[AttemptRow], options: PairOptions
) -> Iterator[tuple[int, list[Trajectory]]]:
    """The attempts of a run that may be compared: those at one task, in one step, with one env seed; where the world
    has two sides, also with one seat and one opponent."""
    by_task: dict[tuple[int, str], list[AttemptRow]] = defaultdict(list)
    for row in rows:
        by_task[row.step, row.task_id].append(row)
    for (step, _), own in by_task.items():
        by_start: dict[object, list[Trajectory]] = defaultdict(list)
        for row in own:
            trajectory = run.attempt(row.id).trajectory
            turn = 0 if trajectory.branch is None else trajectory.branch.turn
            sides = tuple(trajectory.labels.get(name, "") for name in ("seat", "opponent"))
            by_start[turn, None if options.across_seeds else trajectory.seed, *sides].append(trajectory)
        yield from ((step, trajectories) for trajectories in by_start.values())


def _to_group(trajectories: Sequence[Trajectory], kind: PairKind) -> tuple[TrajectoryGroup, str | None]:
    """The group of stored attempts, and why it is useless, or None."""
    branch = trajectories[0].branch
    turn = 0 if branch is None else branch.turn
    group = TrajectoryGroup(
        task_id=trajectories[0].task_id, trajectories=tuple(trajectories), branch_turn=None if branch is None else turn
    )
    if kind == "refuel" and (branch is None or not branch.reseeds_env):  # a common start alone is no shared dialogue
        return group, "not branched"
    return group, None
