"""The metrics of one step: `rollout/` what was played, `method/` what the method kept, `train/` what the optimizer saw,
`time/` where the time went; in several worlds also `world/` for each member of a mix and `curriculum/` for each level.
`watch/catalogue.py` lists every name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.branching import branch_variances
from turnwise.credit.datums import is_trained
from turnwise.envs.base import World
from turnwise.envs.joint import LEVEL_LABEL, SEPARATOR, JointWorld, labels_of, leaf_of
from turnwise.methods.base import Kept, Lesson
from turnwise.rollout.drift import DriftReport, measure_drift
from turnwise.rollout.group import RolloutResult
from turnwise.training.pool import PoolEntry, judged_outcomes
from turnwise.trajectory import WORLD_LABEL, Trajectory
from turnwise.types import ForwardBackwardOutput, TensorData
from turnwise.watch.behaviour import behaviour_metrics, entropy_metrics

if TYPE_CHECKING:
    from turnwise.training.supply import Batch, Stream, Taken
    from turnwise.training.task_order import TaskOrder

GEO_BAND = (0.99, 1.01)
"""Ratios, as geometric means over a sequence, that `method.correction=sequence_geo_mask` keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One forward and backward pass: the lessons, and what the trainer returned."""

    lessons: Sequence[Lesson]
    output: ForwardBackwardOutput
    optim_metrics: Mapping[str, float] | None = None
    """Metrics of the optimizer step; None if the gradient waits for that of the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one step, by what the loop was waiting for."""

    rollout_s: float
    train_s: float
    publish_s: float
    is_ahead: bool = False
    """Whether attempts are also played while the loop trains and publishes."""

    @property
    def total_s(self) -> float:
        return self.rollout_s + self.train_s + self.publish_s

    @property
    def played_s(self) -> float:
        """The time in which attempts were played."""
        return self.total_s if self.is_ahead else self.rollout_s


def logprobs_by_turn(
    lesson: Lesson, outputs: Sequence[Mapping[str, TensorData]]
) -> tuple[NDArray[np.float32] | None, ...]:
    """[S] per trained turn what the trainer gave its tokens: a lesson's datums hold them in the order of turns."""
    known: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    for datum, output in zip(lesson.datums, outputs, strict=True):
        known.append(output["logprobs"].to_numpy().astype(np.float32)[is_trained(datum)])
    rest = np.concatenate(known)
    assert lesson.trajectory is not None
    found: list[NDArray[np.float32] | None] = []
    for turn in lesson.trajectory.turns:
        length = len(turn.sampled_ids) if turn.is_trained else 0
        found.append(rest[:length] if turn.is_trained else None)
        rest = rest[length:]
    assert not len(rest), "datums train tokens that no turn sampled"
    return tuple(found)


def step_drift(learned: Sequence[Learned], version: int) -> DriftReport | None:
    """How far the sampler was from the trainer's weights of `version`; None where nothing was trained that was played.

    Only passes before the first optimizer step of the batch count: later ones compare with weights that moved.
    """
    played: list[tuple[Trajectory, tuple[NDArray[np.float32] | None, ...]]] = []
    for step in learned:
        outputs = iter(step.output.loss_fn_outputs)
        for lesson in step.lessons:
            own = [next(outputs) for _ in lesson.datums]
            if lesson.trajectory is not None:
                played.append((lesson.trajectory, logprobs_by_turn(lesson, own)))
        if step.optim_metrics is not None:
            break
    return measure_drift(played, version) if played else None


def strip_reductions(metrics: Mapping[str, float]) -> dict[str, float]:
    """`ratio:mean` as `ratio`, `ratio:max` as `ratio_max`; a sum of losses becomes their plain name."""
    named: dict[str, float] = {}
    for key, value in metrics.items():
        name, _, reduction = key.partition(":")
        named[f"{name}_max" if reduction == "max" else name] = float(value)
    return named


def merge_outputs(outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """The metrics of several optimizer steps as one: sums add, maxima are compared, means weigh by trained tokens."""
    tokens = [output.metrics.get("num_trained_tokens:sum", 0.0) for output in outputs]
    merged: dict[str, float] = {}
    for key in {key for output in outputs for key in output.metrics}:
        values = [(output.metrics[key], n) for output, n in zip(outputs, tokens, strict=True) if key in output.metrics]
        if key.endswith(":sum"):
            merged[key] = sum(value for value, _ in values)
        elif key.endswith(":max"):
            merged[key] = max(value for value, _ in values)
        else:
            total = sum(n for _, n in values)
            merged[key] = sum(value * n for value, n in values) / total if total else math.nan
    return merged


def step_metrics(played: RolloutResult, kept: Kept, learned: Sequence[Learned], times: Times) -> dict[str, float]:
    """All metrics of one step."""
    values = dict(played.stats.metrics())
    values["method/groups_trained"] = float(len(kept.groups))
    values |= {f"method/groups_dropped_{why}": float(count) for why, count in kept.dropped.items()}
    values |= entropy_metrics(played.groups)
    values |= behaviour_metrics(played.groups)
    variances = branch_variances(played.groups)
    if variances is not None:
        values["method/branch_variance_share"] = variances.share
        values["method/branch_variance_total"] = variances.total
    merged = strip_reductions(merge_outputs([step.output for step in learned]))
    updates = [step.optim_metrics for step in learned if step.optim_metrics is not None]
    if updates:
        merged["loss"] = merged["loss"] / len(updates)
    values |= {f"train/{key}": value for key, value in merged.items()}
    for said in updates:  # of several optimizer steps the last one's norm and learning rate stand
        values |= {f"train/{key}": float(value) for key, value in said.items()}
    return values | _time_metrics(played, values, times)


def lag_metrics(taken: Taken, stream: Stream, learned: Sequence[Learned]) -> dict[str, float]:
    """What playing ahead did: how old the batch is, what waits, and whether short dialogues came first."""
    num_stale = len(taken.stale)
    values = {f"groups_{state}": float(count) for state, count in stream.pool.counts().items()}
    values["attempts_playing"] = float(stream.num_attempts_playing)
    values["tokens_drawn"] = float(stream.num_untaken_tokens)
    values["groups_dropped_stale"] = float(num_stale)
    values["stale_share"] = num_stale / max(1, num_stale + len(taken.entries))
    if taken.staleness:
        values["staleness_mean"] = fmean(taken.staleness)
        values["staleness_max"] = float(max(taken.staleness))
    bias = stream.pool.length_bias()
    if bias is not None:
        values["length_bias"] = bias
    named = {f"pool/{name}": value for name, value in values.items()}
    ratios = [ratio for step in learned for ratio in _mean_ratios(step)]
    if ratios:
        low, high = GEO_BAND
        named["train/geo_outside_fraction"] = fmean(not low <= ratio <= high for ratio in ratios)
    return named


def _mean_ratios(learned: Learned) -> Iterator[float]:
    """Per datum the geometric mean of trainer over sampler: what a sequence mask would judge."""
    outputs = iter(learned.output.loss_fn_outputs)
    for lesson in learned.lessons:
        for datum in lesson.datums:
            output, inputs = next(outputs), datum.loss_fn_inputs
            if "logprobs" not in inputs:
                continue
            gaps = (output["logprobs"].to_numpy() - inputs["logprobs"].to_numpy())[is_trained(datum)]
            if len(gaps):
                yield math.exp(min(20.0, float(gaps.mean())))


def _time_metrics(played: RolloutResult, values: Mapping[str, float], times: Times) -> dict[str, float]:
    """Shares add up to 1; playing is split between sampler and env by how long attempts waited for each."""
    total = times.total_s
    sampler, env = values.get("rollout/sampler_wait_s", 0.0), values.get("rollout/env_wait_s", 0.0)
    playing = times.rollout_s / total
    env_share = playing * env / (env + sampler) if env + sampler else 0.0
    num_tokens = sum(trajectory.num_sampled_tokens for trajectory in played.stats.kept)
    return {
        "time/step_s": total,
        "time/sampling_share": playing - env_share,
        "time/env_share": env_share,
        "time/training_share": (times.train_s + times.publish_s) / total,
        "rollout/sampled_tokens_per_s": num_tokens / times.played_s,
    }


def part_metrics(world: World, tasks: TaskOrder, batch: Batch) -> dict[str, float]:
    """What was played of each world and each level; nothing where there is one world without a curriculum."""
    if not isinstance(world, JointWorld) or batch.taken is None:
        return {}
    entries = batch.taken.entries
    labels = [labels_of(world, entry.plan.task.id) for entry in entries]
    values: dict[str, float] = {}
    for name in world.parts if world.kind == "world" else ():
        own = [entry for entry, label in zip(entries, labels, strict=True) if label[WORLD_LABEL] == name]
        values |= {f"world/{key}_{name}": value for key, value in _played_part(own).items()}
    by_leaf: dict[str, list[PoolEntry]] = {}
    for entry, label in zip(entries, labels, strict=True):
        if LEVEL_LABEL in label:
            leaf = leaf_of(world, entry.plan.task.id).replace(SEPARATOR, "_")
            by_leaf.setdefault(leaf, []).append(entry)
    dealt = [int(label[LEVEL_LABEL]) for label in labels if LEVEL_LABEL in label]
    if dealt:
        values["curriculum/level_mean"] = fmean(dealt)
    for leaf, (rate, chance) in tasks.chances().items():
        played = _played_part(by_leaf.get(leaf, []))
        values |= {f"curriculum/{key}_{leaf}": played[key] for key in ("groups", "success") if key in played}
        values |= {f"curriculum/rate_{leaf}": rate, f"curriculum/chance_{leaf}": chance}
    return values


def _played_part(entries: Sequence[PoolEntry]) -> dict[str, float]:
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
    agreements = [one.metrics["outcome_agreement"] for one in attempts if "outcome_agreement" in one.metrics]
    if agreements:
        values["outcome_agreement"] = fmean(agreements)
    return values
