"""The results of a comparison: one per run, and summaries over seeds.

Methods are compared seed by seed: runs of one seed start from the same weights and play the same tasks, so their
difference depends less on luck than each number alone. Two measures are compared that way:

    final   held-out success at the last evaluation
    area    mean held-out success over the sampled tokens: the area under the learning curve, as a share. It uses
            every evaluation, so it depends less on luck, and it shows which method learns sooner.

Runs remember which weights they started from. A pair whose starts differ, because a warm-up was made again or was
another one, is counted beside the difference: it compares more than the methods.

A difference counts if Student's 95 % interval over the seeds excludes 0. With several methods in a world, Holm's
correction tells which differences would also count if all methods were compared at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from turnwise.config.files import Tree
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import START_WEIGHTS
from turnwise.training.critic import NUM_PARTS
from turnwise.training.progress import branch_share_of, num_drawn_tokens
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
    """Upper end of this run's own 95 % interval, over its held-out tasks."""
    best_success: float
    """The highest of its evaluations. It is too high on average, because it picks the luckiest one."""
    area: float
    """Mean success over the sampled tokens."""
    reward: float
    start_success: float
    """Success before the method's first step (after the warm-up, if there was one)."""
    steps: int
    sampled_tokens: int
    trained_tokens: int
    duration_s: float
    """Seconds of all steps, without evaluations."""
    curve: tuple[tuple[int, int, float], ...]
    """(sampled tokens, trained tokens, held-out success) at every evaluation."""
    branch_share: float = math.nan
    """Var(R | prefix) / Var(R) over the steps of a method that branches; nan for others."""
    critic: tuple[tuple[int, tuple[float, ...], tuple[float, ...]], ...] = ()
    """(step, error, explained variance) by fifth of held-out attempts at every evaluation; empty without a critic."""
    start_weights: str = ""
    """A fingerprint of the weights before the method's first step; empty where it is not known."""


def write_result(file: Path, result: Result, config: Tree) -> None:
    """Write all that a comparison needs of a run to a small file beside it, complete or not at all."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(json.dumps({"config": config, "result": asdict(result)}) + "\n", encoding="utf-8")
    unfinished.replace(file)


def stored_result(file: Path) -> tuple[Result, Tree] | None:
    """Read the result and the run's config from `write_result`'s file; None if there is none."""
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    fields = content["result"]
    curve = tuple((sampled, trained, success) for sampled, trained, success in fields["curve"])
    critic = tuple((step, tuple(errors), tuple(explained)) for step, errors, explained in fields["critic"])
    return Result(**{**fields, "curve": curve, "critic": critic}), content["config"]


def read_result(world: str, label: str, seed: int, place: Path, *, bound: int = 0) -> Result:
    """Read the result of a finished run from its directory.

    Args:
        bound: its limit on sampled tokens; 0 takes the tokens that it sampled.
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
        if pretraining:  # the policy has not changed since
            curve.append((pretraining, 0, before.success))
        curve += [
            (num_drawn_tokens(run, row.step), num_trained(row.step), row.success)
            for row in rows
            if row.label in ("step", "end")
        ]
        sampled, share = num_drawn_tokens(run, end.step), branch_share_of(run)
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
            branch_share=math.nan if share is None else share,
            critic=_read_critic(run),
            start_weights=run.meta(START_WEIGHTS) or "",
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

    A run that ended earlier keeps its last success; tokens beyond `tokens` do not count. nan if nothing was sampled.

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
    """The difference of a method to the first method, seed by seed."""

    interval: Interval
    """The mean difference with its interval, which is unbounded with one seed."""
    num_seeds: int
    p: float
    """Probability of a difference at least this far from 0 if there is none in truth; nan if unknown."""
    p_holm: float = math.nan
    """`p` with Holm's correction for all methods that are compared with the first one in this world."""
    other_starts: tuple[int, ...] = ()
    """Seeds of which the two runs are known to have started from different weights."""

    @property
    def is_told(self) -> bool:
        """Whether the 95 % interval excludes 0."""
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
    branch_share: float
    """nan for a method that does not branch."""
    more_success: Difference | None
    """Difference to the first method of the world; None for the first method itself."""
    more_area: Difference | None


def summarize(results: Sequence[Result]) -> list[Summary]:
    """Summarize world by world and method by method, in their order."""
    found: list[Summary] = []
    for world in dict.fromkeys(result.world for result in results):
        inside = as_judged([result for result in results if result.world == world])
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
                    branch_share=_mean([result.branch_share for result in own]),
                    more_success=success.get(label),
                    more_area=area.get(label),
                )
            )
    return found


def as_judged(results: Sequence[Result]) -> list[Result]:
    """The results of a world, where a run of which no attempt ever came to its end counts as one without success.

    Its evaluations could not tell that the world judges success, and the other runs do. Left out, a policy that breaks
    down would raise the mean of its method.
    """
    if all(math.isnan(one.success) for one in results):
        return list(results)
    return [_without_success(one) if _has_no_verdict(one) else one for one in results]


def _has_no_verdict(result: Result) -> bool:
    """Whether attempts were played, and none of any evaluation was judged."""
    measured = [success for _, _, success in result.curve if math.isfinite(success)]
    return math.isnan(result.success) and not measured and math.isfinite(result.reward)


def _without_success(result: Result) -> Result:
    zeros = dict.fromkeys(("success", "success_low", "best_success", "area", "start_success"), 0.0)
    curve = tuple((sampled, trained, 0.0) for sampled, trained, _ in result.curve)
    return replace(result, **zeros, success_high=1.0, curve=curve)


def _differences(inside: Sequence[Result], labels: Sequence[str], against: str, measure: str) -> dict[str, Difference]:
    found = {
        label: paired_difference(inside, label, against, measure=measure)
        for label in labels
        if label != against and against in labels
    }
    corrected = holm([one.p for one in found.values()])
    return {label: replace(one, p_holm=p_holm) for (label, one), p_holm in zip(found.items(), corrected, strict=True)}


def paired_difference(results: Sequence[Result], label: str, against: str, *, measure: str = "success") -> Difference:
    """The difference over the seeds that both methods have in one world."""
    by_seed = {(result.label, result.seed): result for result in results}
    own = [one for (name, seed), one in by_seed.items() if name == label and (against, seed) in by_seed]
    pairs = [(one, by_seed[against, one.seed]) for one in own]
    found = [float(getattr(one, measure)) - float(getattr(other, measure)) for one, other in pairs]
    found = [value for value in found if math.isfinite(value)]
    return Difference(
        interval=mean_interval([[value] for value in found]),
        num_seeds=len(found),
        p=_p_of_no_difference(found),
        other_starts=tuple(one.seed for one, other in pairs if _starts_differ(one, other)),
    )


def _starts_differ(one: Result, other: Result) -> bool:
    known = {one.start_weights, other.start_weights} - {""}
    return len(known) == 2


def _p_of_no_difference(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if error < 1e-12:  # a few seeds may have the same difference by chance; that is no certainty
        return 1.0 if abs(mean) < 1e-12 else math.nan
    return student_p(mean / error, len(values) - 1)


def student_p(t: float, freedom: int) -> float:
    """Two-sided probability of a value at least as far from 0 as `t` (Abramowitz and Stegun 26.7.3 and 26.7.4).

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
    """Holm's correction (1979) of p-values for their number; nan values do not count.

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
    """The interval between seeds; for a single seed, the interval over its held-out tasks."""
    if len(own) == 1:
        return Interval(own[0].success, own[0].success_low, own[0].success_high)
    return _between_seeds([result.success for result in own])


def _between_seeds(values: Sequence[float]) -> Interval:
    """Student's interval between seeds, cut to [0, 1]; unbounded for one seed."""
    known = [value for value in values if math.isfinite(value)]
    found = mean_interval([[value] for value in known])
    return found if len(known) < 2 else Interval(found.value, max(found.low, 0.0), min(found.high, 1.0))


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan
