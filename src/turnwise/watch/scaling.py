"""Success against what may be spent at inference: samples, turns and tokens. Arithmetic over attempts, no play.

With n attempts at a task, c of them successes, the share of subsets of size k that hold a success is
1 - C(n - c, k) / C(n, k): an unbiased estimate of pass@k (arXiv:2107.03374, section 2.1). Best-of-k and majority vote
are estimated in the same way: the mean over all subsets of size k, in closed form where there is one.

Every point is a mean over tasks of numbers between 0 and 1. Its interval is Wilson's with tasks as trials, which is
right where a task's number is 0 or 1, and too wide rather than too narrow in between. What two policies differ by is
paired by task, because they play the same ones.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.watch.intervals import NOT_MEASURED, Interval, change_of, wilson

BudgetKind = Literal["pass@k", "best of k", "majority of k", "turns", "tokens"]
MAX_SUBSETS = 1000
"""If a task has more subsets than this, the votes of this many are counted, drawn with a fixed seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledAttempt:
    """What an attempt cost and what came out."""

    is_success: bool
    num_turns: int
    num_tokens: int
    score: float | None = None
    """The score that an outcome model gave."""
    answer: str | None = None
    """The final answer; None if the world records none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """Success at one budget."""

    kind: BudgetKind
    budget: int
    success: float
    success_low: float
    success_high: float
    num_tasks: int
    mean_tokens: float | None = None
    """Sampled tokens that k attempts at a task cost, on average; None for budgets of turns and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleChange:
    """How much more of the same tasks succeed after training, at one budget."""

    kind: BudgetKind
    budget: int
    change: float
    change_low: float
    change_high: float
    num_tasks: int


Tasks = Sequence[Sequence[ScaledAttempt]]


def pass_at_k(num_attempts: int, num_successes: int, k: int) -> float:
    """The share of subsets of k attempts that hold a success."""
    if not 0 < k <= num_attempts:
        raise ValueError(f"k={k}; expected 1 to {num_attempts}, the number of attempts")
    return 1 - math.comb(num_attempts - num_successes, k) / math.comb(num_attempts, k)


def best_of_k(attempts: Sequence[ScaledAttempt], k: int) -> float:
    """The mean over subsets of k attempts of the success of the one with the highest score; ties are drawn by lot."""
    scores = [_score(attempt) for attempt in attempts]
    by_score: defaultdict[float, list[bool]] = defaultdict(list)
    for attempt, score in zip(attempts, scores, strict=True):
        by_score[score].append(attempt.is_success)
    labels = [sum(by_score[score]) / len(by_score[score]) for score in sorted(scores, reverse=True)]
    # Attempt j, from the best, is picked by the subsets that hold it and k - 1 of those after it.
    count = len(attempts)
    picks = [label * math.comb(count - 1 - j, k - 1) for j, label in enumerate(labels)]
    return sum(picks) / math.comb(count, k)


def majority_of_k(attempts: Sequence[ScaledAttempt], k: int) -> float:
    """The mean over subsets of k attempts of the success of the most frequent answer; ties are drawn by lot.

    An attempt without an answer has no vote; a subset without any vote fails.
    """
    successes: defaultdict[str, list[bool]] = defaultdict(list)
    for attempt in attempts:
        if attempt.answer is not None:
            successes[attempt.answer].append(attempt.is_success)
    rates = {answer: sum(own) / len(own) for answer, own in successes.items()}
    answers = [attempt.answer for attempt in attempts]
    outcomes = [_vote([answers[index] for index in subset], rates) for subset in _subsets(len(attempts), k)]
    return sum(outcomes) / len(outcomes)


def scale_points(tasks: Tasks) -> list[ScalePoint]:
    """Every kind of budget that these attempts can tell of."""
    return [_point(one) for one in _estimates(tasks)]


def scale_changes(
    before: Mapping[str, Sequence[ScaledAttempt]], after: Mapping[str, Sequence[ScaledAttempt]]
) -> list[ScaleChange]:
    """What changed at every budget that both have, over the tasks that can tell of it both times."""
    both = [task for task in before if task in after]
    first = {(one.kind, one.budget): one.values for one in _estimates([before[task] for task in both])}
    found: list[ScaleChange] = []
    for one in _estimates([after[task] for task in both]):
        pairs = zip(first.get((one.kind, one.budget), ()), one.values, strict=False)
        known = [(was, now) for was, now in pairs if was is not None and now is not None]
        if known:
            change = change_of([was for was, _ in known], [now for _, now in known])
            found.append(
                ScaleChange(
                    kind=one.kind,
                    budget=one.budget,
                    change=change.value,
                    change_low=change.low,
                    change_high=change.high,
                    num_tasks=len(known),
                )
            )
    return found


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ..., and `most` itself."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)} - {0})


def _passed(attempts: Sequence[ScaledAttempt], k: int) -> float:
    return pass_at_k(len(attempts), sum(attempt.is_success for attempt in attempts), k)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """What each task says of one budget; None where it cannot tell."""

    kind: BudgetKind
    budget: int
    values: Sequence[float | None]
    costs: Sequence[float] = ()


def _estimates(tasks: Tasks) -> list[_Estimate]:
    attempts = [attempt for task in tasks for attempt in task]
    most = max((len(task) for task in tasks), default=0)
    sizes = powers_up_to(most)
    found = [_of_samples("pass@k", tasks, k, _passed) for k in sizes]
    if attempts and all(attempt.score is not None for attempt in attempts):
        found += [_of_samples("best of k", tasks, k, best_of_k) for k in sizes]
    if any(attempt.answer is not None for attempt in attempts):
        found += [_of_samples("majority of k", tasks, k, majority_of_k) for k in sizes]
    turns = powers_up_to(max((attempt.num_turns for attempt in attempts), default=0))
    found += [_of_limit("turns", tasks, limit, lambda attempt: attempt.num_turns) for limit in turns]
    tokens = powers_up_to(max((attempt.num_tokens for attempt in attempts), default=0))
    return found + [_of_limit("tokens", tasks, limit, lambda attempt: attempt.num_tokens) for limit in tokens]


def _of_samples(
    kind: BudgetKind, tasks: Tasks, k: int, estimate: Callable[[Sequence[ScaledAttempt], int], float]
) -> _Estimate:
    """Tasks with fewer than k attempts that were judged say nothing of k, and are left out of the count."""
    return _Estimate(
        kind=kind,
        budget=k,
        values=[estimate(task, k) if len(task) >= k else None for task in tasks],
        costs=[k * _mean_tokens(task) for task in tasks if len(task) >= k],
    )


def _of_limit(kind: BudgetKind, tasks: Tasks, limit: int, spent: Callable[[ScaledAttempt], int]) -> _Estimate:
    """An attempt that needed more than the limit would have been cut before its success."""
    values = [
        sum(one.is_success and spent(one) <= limit for one in task) / len(task) if task else None for task in tasks
    ]
    return _Estimate(kind=kind, budget=limit, values=values)


def _point(estimate: _Estimate) -> ScalePoint:
    values = [value for value in estimate.values if value is not None]
    found: Interval = wilson(sum(values) / len(values), len(values)) if values else NOT_MEASURED
    costs = estimate.costs
    return ScalePoint(
        kind=estimate.kind,
        budget=estimate.budget,
        success=found.value,
        success_low=found.low,
        success_high=found.high,
        num_tasks=len(values),
        mean_tokens=sum(costs) / len(costs) if costs else None,
    )


def _mean_tokens(task: Sequence[ScaledAttempt]) -> float:
    return sum(attempt.num_tokens for attempt in task) / len(task)


def _score(attempt: ScaledAttempt) -> float:
    if attempt.score is None:
        raise ValueError("an attempt has no score; best of k needs one of each")
    return attempt.score


def _subsets(count: int, k: int) -> list[tuple[int, ...]]:
    if math.comb(count, k) <= MAX_SUBSETS:
        return list(itertools.combinations(range(count), k))
    rng = random.Random(f"{count}:{k}")
    return [tuple(rng.sample(range(count), k)) for _ in range(MAX_SUBSETS)]


def _vote(answers: Sequence[str | None], rates: dict[str, float]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == top]
    return sum(rates[answer] for answer in winners) / len(winners)
