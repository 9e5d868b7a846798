"""What the runs of a comparison came to: one result per run, and what they say together.

Methods are compared seed by seed: runs of one seed start from the same weights and meet the same tasks, so the
difference holds less luck than the two numbers that it is of. Two measures are compared that way:

    final   held-out success at the last evaluation
    area    mean held-out success over the sampled tokens: the area under the learning curve, as a share. It reads every
            evaluation, so it holds less of one evaluation's luck, and it tells who learns sooner.

A difference is told apart from 0 by Student's interval over the seeds; with several methods in a world, Holm's
correction says which of them would be so if the methods were all alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from turnwise.config.files import Tree
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.training.critic import NUM_PARTS
from turnwise.training.progress import num_drawn_tokens
from turnwise.watch.intervals import Interval, mean_interval

LEVEL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished run."""

    world: str
    label: str
    seed: int
    success: float
    success_low: float
    success_high: float
    """Of this run alone, over its held-out tasks."""
    best_success: float
    """The highest of its evaluations, which flatters: it picks the luckiest."""
    area: float
    """Mean success over the sampled tokens."""
    reward: float
    start_success: float
    """Before the first step of the method, after a warm-up if there was one."""
    steps: int
    sampled_tokens: int
    trained_tokens: int
    duration_s: float
    """Of the steps, evaluations not counted."""
    curve: tuple[tuple[int, int, float], ...]
    """(sampled tokens, trained tokens, held-out success) at every evaluation."""
    critic: tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...] = ()
    """(step, error, explained variance) by fifth of held-out attempts at every evaluation; empty without a critic."""


def write_result(file: Path, result: Result, config: Tree) -> None:
    """All that a comparison needs of a run, in a small file beside it: complete or not at all."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(json.dumps({"config": config, "result": asdict(result)}) + "\n", encoding="utf-8")
    unfinished.replace(file)


def stored_result(file: Path) -> tuple[Result, Tree] | None:
    """What `write_result` wrote: the result and the run's config; None where there is no such file."""
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    fields = content["result"]
    curve = tuple((sampled, trained, success) for sampled, trained, success in fields["curve"])
    critic = tuple((step, tuple(errors), tuple(explained)) for step, errors, explained in fields["critic"])
    return Result(**{**fields, "curve": curve, "critic": critic}), content["config"]


def read_result(world: str, label: str, seed: int, place: Path, *, bound: int = 0) -> Result:
    """What a finished run says of itself.

    Args:
        bound: sampled tokens that it had; 0: those that it drew.
    """
    with RunReader(place) as run:
        rows = run.evaluations()
        ends = [row for row in rows if row.label == "end"]
        if not ends:
            raise ConfigError(f"{place} has no evaluation at its end; set eval.tasks")
        end = ends[-1]
        before = [row for row in rows if row.label in ("start", "warm-up")][-1]
        trained = run.metric("train/num_trained_tokens")

        def num_trained(step: int) -> int:
            return round(sum(value for at, value in trained if at <= step))

        curve = [(0, 0, before.success)]
        pretraining = num_drawn_tokens(run, 0)
        if pretraining:  # the policy is still what it was
            curve.append((pretraining, 0, before.success))
        curve += [
            (num_drawn_tokens(run, row.step), num_trained(row.step), row.success)
            for row in rows
            if row.label in ("step", "end")
        ]
        sampled = num_drawn_tokens(run, end.step)
        known = [success for _, _, success in curve if math.isfinite(success)]
        return Result(
            world=world,
            label=label,
            seed=seed,
            success=end.success,
            success_low=end.success_low,
            success_high=end.success_high,
            best_success=max(known, default=math.nan),
            area=area_under(curve, bound or sampled),
            reward=end.reward,
            start_success=before.success,
            steps=end.step,
            sampled_tokens=sampled,
            trained_tokens=num_trained(end.step),
            duration_s=sum(value for _, value in run.metric("time/step_s")),
            curve=tuple(curve),
            critic=_read_critic(run),
        )


def _read_critic(run: RunReader) -> tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...]:
    errors, explained = (
        [dict(run.metric(f"eval/critic_{name}_{part}")) for part in range(1, NUM_PARTS + 1)]
        for name in ("error", "explained_variance")
    )
    return tuple(
        (step, tuple(part[step] for part in errors), tuple(part.get(step, math.nan) for part in explained))
        for step in sorted(errors[0])
    )


def area_under(curve: Sequence[tuple[int, int, float]], tokens: int) -> float:
    """Mean success from nothing sampled to `tokens` sampled, straight lines between evaluations.

    A run that ended before keeps its last success; what was sampled beyond is not counted. nan where nothing was
    sampled.

    >>> area_under([(0, 0, 0.0), (100, 0, 1.0)], 200)
    0.75
    """
    known = [(float(x), y) for x, _, y in curve if math.isfinite(y)]
    if len(known) < 2 or tokens <= 0 or known[-1][0] <= 0:
        return math.nan
    xs, ys = np.array([x for x, _ in known]), np.array([y for _, y in known])
    grid = np.unique(np.concatenate([xs[xs < tokens], [0.0, float(tokens)]]))
    heights = np.interp(grid, xs, ys)
    return float(np.sum(np.diff(grid) * (heights[:-1] + heights[1:]) / 2) / tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more a method has than the first one, seed by seed."""

    interval: Interval
    """Unbounded where there is one seed."""
    num_seeds: int
    p: float
    """Of a difference at least as far from 0, were there none; nan where it cannot be told."""
    p_holm: float = math.nan
    """The same, corrected for the methods that the first one is compared with in this world."""

    @property
    def is_told(self) -> bool:
        """The 95 % interval excludes 0."""
        return self.p < LEVEL

    @property
    def is_told_by_holm(self) -> bool:
        return self.p_holm < LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One method in one world: means over seeds."""

    world: str
    label: str
    num_seeds: int
    success: Interval
    best_success: float
    area: Interval
    reward: float
    start_success: float
    steps: float
    sampled_tokens: float
    trained_tokens: float
    duration_s: float
    more_success: Difference | None
    """Against the first method of the world; None for that one itself."""
    more_area: Difference | None


def summarize(results: Sequence[Result]) -> list[Summary]:
    """ComparedWorld by world, method by method, in the order in which they come."""
    found: list[Summary] = []
    for world in dict.fromkeys(result.world for result in results):
        inside = [result for result in results if result.world == world]
        labels = list(dict.fromkeys(result.label for result in inside))
        success = _differences(inside, labels, results[0].label, "success")
        area = _differences(inside, labels, results[0].label, "area")
        for label in labels:
            own = [result for result in inside if result.label == label]
            found.append(
                Summary(
                    world=world,
                    label=label,
                    num_seeds=len(own),
                    success=_success(own),
                    best_success=_mean([result.best_success for result in own]),
                    area=_between_seeds([result.area for result in own]),
                    reward=_mean([result.reward for result in own]),
                    start_success=_mean([result.start_success for result in own]),
                    steps=_mean([result.steps for result in own]),
                    sampled_tokens=_mean([result.sampled_tokens for result in own]),
                    trained_tokens=_mean([result.trained_tokens for result in own]),
                    duration_s=_mean([result.duration_s for result in own]),
                    more_success=success.get(label),
                    more_area=area.get(label),
                )
            )
    return found


def _differences(inside: Sequence[Result], labels: Sequence[str], against: str, measure: str) -> dict[str, Difference]:
    found = {
        label: paired_difference(inside, label, against, measure=measure)
        for label in labels
        if label != against and against in labels
    }
    corrected = holm([one.p for one in found.values()])
    return {
        label: Difference(interval=one.interval, num_seeds=one.num_seeds, p=one.p, p_holm=p_holm)
        for (label, one), p_holm in zip(found.items(), corrected, strict=True)
    }


def paired_difference(results: Sequence[Result], label: str, against: str, *, measure: str = "success") -> Difference:
    """How much more, over the seeds that both methods have in one world."""
    by_seed = {(result.label, result.seed): float(getattr(result, measure)) for result in results}
    both = [seed for name, seed in by_seed if name == label and (against, seed) in by_seed]
    found = [by_seed[label, seed] - by_seed[against, seed] for seed in both]
    found = [value for value in found if math.isfinite(value)]
    interval = mean_interval([[value] for value in found])
    return Difference(interval=interval, num_seeds=len(found), p=_p_of_no_difference(found))


def _p_of_no_difference(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if error < 1e-12:  # counts of successes may differ by the same number for a few seeds; that is no certainty
        return 1.0 if abs(mean) < 1e-12 else math.nan
    return student_p(mean / error, len(values) - 1)


def student_p(t: float, freedom: int) -> float:
    """Two-sided: the chance of a value at least as far from 0 as `t` (Abramowitz and Stegun 26.7.3 and 26.7.4).

    >>> [round(student_p(t, freedom), 4) for t, freedom in ((2.2622, 9), (12.706, 1), (2.4469, 6))]
    [0.05, 0.05, 0.05]
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = total = math.cos(angle) if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0)) if freedom % 2 else sine * total
    return max(0.0, 1.0 - inside)


def holm(p_values: Sequence[float]) -> list[float]:
    """Each corrected for how many there are (Holm 1979); those that could not be told are not counted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if math.isfinite(p))
    corrected, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[index] = highest
    return corrected


def _success(own: Sequence[Result]) -> Interval:
    """Between seeds; of a single seed, that of its held-out tasks."""
    if len(own) == 1:
        return Interval(own[0].success, own[0].success_low, own[0].success_high)
    return _between_seeds([result.success for result in own])


def _between_seeds(values: Sequence[float]) -> Interval:
    """Inside [0, 1]; unbounded where one seed is all there is."""
    known = [value for value in values if math.isfinite(value)]
    found = mean_interval([[value] for value in known])
    return found if len(known) < 2 else Interval(found.value, max(found.low, 0.0), min(found.high, 1.0))


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan
