"""Metrics of a step in several worlds: `world/` for each member of a mix, `curriculum/` for each level."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from turnwise.envs.base import World
from turnwise.envs.joint import LEVEL_LABEL, SEPARATOR, JointWorld, labels_of, leaf_of
from turnwise.training.pool import PoolEntry, judged_outcomes
from turnwise.training.supply import Batch
from turnwise.training.task_order import TaskOrder
from turnwise.trajectory import WORLD_LABEL


def part_metrics(world: World, tasks: TaskOrder, batch: Batch) -> dict[str, float]:
    """What was played of each world and each level; nothing where there is one world without a curriculum."""
    if not isinstance(world, JointWorld) or batch.taken is None:
        return {}
    entries = batch.taken.entries
    labels = [labels_of(world, entry.plan.task.id) for entry in entries]
    values: dict[str, float] = {}
    for name in world.parts if world.kind == "world" else ():
        own = [entry for entry, label in zip(entries, labels, strict=True) if label[WORLD_LABEL] == name]
        values |= {f"world/{key}_{name}": value for key, value in _played(own).items()}
    by_leaf: dict[str, list[PoolEntry]] = {}
    for entry, label in zip(entries, labels, strict=True):
        if LEVEL_LABEL in label:
            leaf = leaf_of(world, entry.plan.task.id).replace(SEPARATOR, "_")
            by_leaf.setdefault(leaf, []).append(entry)
    dealt = [int(label[LEVEL_LABEL]) for label in labels if LEVEL_LABEL in label]
    if dealt:
        values["curriculum/level_mean"] = fmean(dealt)
    for leaf, (rate, chance) in tasks.chances().items():
        played = _played(by_leaf.get(leaf, []))
        values |= {f"curriculum/{key}_{leaf}": played[key] for key in ("groups", "success") if key in played}
        values |= {f"curriculum/rate_{leaf}": rate, f"curriculum/chance_{leaf}": chance}
    return values


def _played(entries: Sequence[PoolEntry]) -> dict[str, float]:
    """Groups, and means over their attempts; rewards are those that the env gave."""
    attempts = [one for entry in entries if entry.outcome is not None for one in entry.outcome.trajectories]
    outcomes = [outcome for entry in entries for outcome in judged_outcomes(entry)]
    is_judged = any(one.is_success is not None for one in attempts)
    values = {
        "groups": float(len(entries)),
        "failed": float(sum(len(entry.outcome.failed) for entry in entries if entry.outcome is not None)),
    }
    if attempts:
        values["reward"] = fmean(one.total_reward for one in attempts)
        values["turns"] = fmean(len(one.turns) for one in attempts)
        values["tokens"] = float(sum(one.num_sampled_tokens for one in attempts))
    if outcomes and is_judged:
        values["success"] = fmean(outcomes)
    return values
