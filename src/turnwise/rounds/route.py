"""Sends the attempts of a round to their pools. One that says what an earlier one said is counted and goes nowhere.

    sft          the best few good attempts at each task
    rl           tasks at which some attempts are good and some are not: what RL can learn from; RL plays them again
    preference   of such a task, the best and the worst attempt from the same start
    continued    bad attempts, if asked: the world's words in them are learned, the replies are not

Without routing every good attempt goes to `sft`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.credit.preferences import PreferencePair
from turnwise.errors import DataError
from turnwise.rounds.config import FlywheelConfig
from turnwise.rounds.store import PlayedAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The rows that a round adds to each pool."""

    sft: list[int] = field(default_factory=list[int])
    rl: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """(task, share of good attempts)."""
    preference: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(chosen, rejected)."""
    continued: list[int] = field(default_factory=list[int])
    num_duplicates: int = 0


def route(attempts: Sequence[PlayedAttempt], options: FlywheelConfig) -> Routes:
    """Route the judged attempts of one round."""
    groups: dict[str, list[PlayedAttempt]] = defaultdict(list)
    for one in attempts:
        groups[one.task_id].append(one)
    num_duplicates = sum(one.duplicate_of is not None for one in attempts)
    if not options.routing:
        good = [one.id for one in attempts if one.is_good and one.duplicate_of is None]
        return Routes(sft=good, num_duplicates=num_duplicates)
    routes = Routes(num_duplicates=num_duplicates)
    for task_id, group in groups.items():
        _route_group(task_id, group, options, routes)
    return routes


def _route_group(task_id: str, group: Sequence[PlayedAttempt], options: FlywheelConfig, routes: Routes) -> None:
    fresh = [one for one in group if one.duplicate_of is None]
    good = sorted((one for one in fresh if one.is_good), key=_rank)
    routes.sft.extend(one.id for one in good[: options.best_per_task])
    share = sum(bool(one.is_good) for one in group) / len(group)
    if 0 < share < 1:
        routes.rl.append((task_id, share))
    bad = sorted((one for one in fresh if not one.is_good), key=_rank)
    if good and bad and can_pair(good[0], bad[-1]):
        routes.preference.append((good[0].id, bad[-1].id))
    if options.continued_steps:
        routes.continued.extend(one.id for one in bad if len(one.trajectory.turns) > 1)


def _rank(one: PlayedAttempt) -> tuple[float, int, int]:
    """The best first: the higher score, then fewer tokens, then the earlier attempt."""
    return (-(one.score or 0.0), sum(len(turn.sampled_ids) for turn in one.trajectory.turns), one.id)


def can_pair(chosen: PlayedAttempt, rejected: PlayedAttempt) -> bool:
    """Whether the two start alike, differ, and have something to train."""
    try:
        pair = PreferencePair(chosen=chosen.trajectory, rejected=rejected.trajectory)
    except DataError:
        return False
    return not pair.is_identical and not pair.is_masked(only_branch_turn=False)
