"""Numbers with 95 % intervals, which take into account that several attempts at one task are not independent.

A success rate gets Wilson's interval, which stays inside [0, 1] and is useful at 0 and 1 too. With several attempts per
task, it uses the effective sample size, which depends on how much tasks differ and lies between the number of tasks and
the number of attempts. That difference is itself estimated from the tasks, so the quantile is Student's, with one
degree of freedom less than there are tasks, as in surveys of clusters (Korn and Graubard 1998). A mean reward gets
Student's interval over the means of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959964
# Student's t at 97.5 % by degrees of freedom; from 30 on the expansion below is right to three digits.
# fmt: off
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
DOUBTED_TASKS = 0.5
"""Weight, in tasks, of the assumption that attempts at one task are copies of each other: the least that keeps coverage
at 94 % or more for 4 to 64 tasks with 2 to 16 attempts each, also where most tasks are never solved."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A measured number and its 95 % confidence interval; nan if nothing was measured."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        """The interval of a share. Student's interval may reach beyond [0, 1]; it is cut there."""
        if math.isnan(self.value):
            return "not measured"
        return f"{self.value:.1%} [{max(self.low, 0.0):.1%}, {min(self.high, 1.0):.1%}]"

    def number(self) -> str:
        if math.isnan(self.value):
            return "not measured"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


NOT_MEASURED = Interval(math.nan, math.nan, math.nan)


def success_interval(outcomes_by_task: Sequence[Sequence[bool]]) -> Interval:
    """The share of successes over all attempts."""
    tasks = [list(outcomes) for outcomes in outcomes_by_task if outcomes]
    outcomes = [outcome for task in tasks for outcome in task]
    if not outcomes:
        return NOT_MEASURED
    rate, num_tasks = float(np.mean(outcomes)), len(tasks)
    if num_tasks == len(outcomes):
        return wilson(rate, num_tasks)  # independent trials
    if num_tasks == 1:
        return wilson(rate, 1)  # with one task, the difference between tasks is unknown: count all attempts as one
    return wilson(rate, _effective_size(tasks), quantile=_student(num_tasks - 1))


def wilson(rate: float, size: float, *, quantile: float = Z_95) -> Interval:
    """Wilson's score interval of a rate that was measured on `size` independent trials; 95 % by default."""
    z2 = quantile**2
    center = (rate + z2 / (2 * size)) / (1 + z2 / size)
    half = quantile / (1 + z2 / size) * math.sqrt(rate * (1 - rate) / size + z2 / (4 * size**2))
    return Interval(rate, 0.0 if rate == 0 else center - half, 1.0 if rate == 1 else center + half)


def mean_interval(values_by_task: Sequence[Sequence[float]]) -> Interval:
    """The mean over tasks of each task's mean."""
    means = [float(np.mean(values)) for values in values_by_task if values]
    if not means:
        return NOT_MEASURED
    mean = float(np.mean(means))
    if len(means) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _student(len(means) - 1) * float(np.std(means, ddof=1)) / math.sqrt(len(means))
    return Interval(mean, mean - half, mean + half)


def change_of(before: Sequence[float], after: Sequence[float]) -> Interval:
    """How much more the second of two success rates is, both means over the same tasks.

    The two rates have Wilson's intervals, with tasks as trials. The difference has Newcombe's (1998, method 10), which
    is shorter where the same tasks are easy both times. The correlation is itself estimated from the tasks, so it is
    taken to be a little less: coverage is then 94.7 % or more for 4 to 64 tasks. Student's interval of the differences
    covers 29 to 95 % there, because few tasks may all change alike by chance.
    """
    num_tasks = len(before)
    if num_tasks != len(after):
        raise ValueError(f"{num_tasks} tasks before and {len(after)} after; expected the same ones")
    if not num_tasks:
        return NOT_MEASURED
    one, two = (wilson(float(np.mean(values)), num_tasks) for values in (before, after))
    alike = _correlation(before, after) * max(num_tasks - 2, 0) / (num_tasks + 2)
    below = _combined(two.value - two.low, one.high - one.value, alike)
    above = _combined(two.high - two.value, one.value - one.low, alike)
    change = two.value - one.value
    return Interval(change, change - below, change + above)


def _correlation(before: Sequence[float], after: Sequence[float]) -> float:
    """The correlation of two numbers per task; 0 where it is negative, or unknown as one of them never differs."""
    if np.ptp(before) == 0 or np.ptp(after) == 0:
        return 0.0
    return max(0.0, float(np.corrcoef(before, after)[0, 1]))


def _combined(one: float, two: float, alike: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * alike * one * two + two**2))


def mean_of(intervals: Sequence[Interval]) -> Interval:
    """The plain mean of independent numbers; one that was not measured is left out.

    Each side of its interval adds the squared distances of the others to theirs (MOVER, Zou and Donner 2008), so a
    side that is longer in the parts is longer in the mean.
    """
    known = [one for one in intervals if not math.isnan(one.value)]
    if not known:
        return NOT_MEASURED
    value = sum(one.value for one in known) / len(known)
    below = math.sqrt(sum((one.value - one.low) ** 2 for one in known)) / len(known)
    above = math.sqrt(sum((one.high - one.value) ** 2 for one in known)) / len(known)
    return Interval(value, value - below, value + above)


def _student(freedom: int) -> float:
    return _T_975[freedom - 1] if freedom <= len(_T_975) else Z_95 + (Z_95**3 + Z_95) / (4 * freedom)


def _effective_size(tasks: Sequence[Sequence[bool]]) -> float:
    """The number of independent trials that would give as much information as these attempts at two or more tasks."""
    num_tasks, num_attempts = len(tasks), sum(len(task) for task in tasks)
    rate = sum(sum(task) for task in tasks) / num_attempts
    variance = float(np.var([np.mean(task) for task in tasks], ddof=1)) / num_tasks
    if variance == 0:
        size = float(num_tasks) if rate in (0, 1) else float(num_attempts)
    else:
        size = min(float(num_attempts), max(float(num_tasks), rate * (1 - rate) / variance))
    # A few tasks may look alike by chance. So a share of the worst case is added, in which all attempts at a task end
    # alike; it becomes smaller with more tasks.
    doubt = DOUBTED_TASKS / (num_tasks + DOUBTED_TASKS)
    return 1 / ((1 - doubt) / size + doubt / num_tasks)
