"""The metrics of a rollout, all under `rollout/`.

`rollout/attempts` = `rollout/attempts_kept` + the sum of all `rollout/dropped_*`. A try is one play of an attempt; a
failed attempt may be tried again. Averages are over kept attempts.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypedDict

from turnwise.errors import AttemptFailed, Party
from turnwise.runtime.raised_at import raised_at, user_traceback
from turnwise.trajectory import Failure, Trajectory


class StatsState(TypedDict):
    """The numbers of a `RolloutStats`, ready for JSON."""

    dropped: dict[str, int]
    counts: dict[str, int]
    waited_s: dict[str, float]


class FirstFailures:
    """The first failure of each party in a run, with its exception; `tell` is called with each of them at once."""

    def __init__(self, tell: Callable[[AttemptFailed], None] = lambda _: None) -> None:
        self._tell = tell
        self._by_party: dict[Party, AttemptFailed] = {}

    @property
    def first(self) -> AttemptFailed | None:
        return next(iter(self._by_party.values()), None)

    def add(self, error: AttemptFailed) -> None:
        if error.party not in self._by_party:
            kept = AttemptFailed(error.party, error.detail)
            kept.__cause__ = error.__cause__
            if error.__cause__ is not None:  # its lines stay; the objects in its frames (an env, a thread) are let go
                traceback.clear_frames(error.__cause__.__traceback__)
            self._by_party[error.party] = kept
            self._tell(kept)


class RolloutStats:
    """Counts while a rollout runs. Call `metrics()` at any time."""

    def __init__(self) -> None:
        self.kept: list[Trajectory] = []
        """The attempts of groups that were kept."""
        self.dropped: Counter[str] = Counter()
        """Number of attempts that are not trained on, by reason."""
        self.failures = FirstFailures()
        """A function that is called with every failure as it happens; all rollouts of a run share it."""
        self._counts: Counter[str] = Counter()
        self._waited_s: defaultdict[str, float] = defaultdict(float)

    @classmethod
    def merged(cls, parts: Iterable[RolloutStats]) -> RolloutStats:
        """Add up the counts of several rollouts."""
        whole = cls()
        for part in parts:
            whole.kept += part.kept
            whole.dropped.update(part.dropped)
            whole._counts.update(part._counts)
            for party, seconds in part._waited_s.items():
                whole._waited_s[party] += seconds
        return whole

    def to_state(self) -> StatsState:
        """The numbers, ready for JSON, without the attempts themselves."""
        return StatsState(dropped=dict(self.dropped), counts=dict(self._counts), waited_s=dict(self._waited_s))

    @classmethod
    def from_state(cls, state: StatsState, kept: Sequence[Trajectory]) -> RolloutStats:
        stats = cls()
        stats.kept = list(kept)
        stats.dropped, stats._counts = Counter(state["dropped"]), Counter(state["counts"])
        stats._waited_s.update(state["waited_s"])
        return stats

    @property
    def num_abandoned(self) -> int:
        """Number of env calls that were left behind in their threads."""
        return self._counts["abandoned_calls"]

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the sampler drew, for kept and dropped attempts."""
        return self._counts["tokens_drawn"]

    def to_failure(self, error: AttemptFailed) -> Failure:
        """What a trajectory keeps of an exception that ended it."""
        self.failures.add(error)
        return failure_of(error)

    def add_try(self, trajectory: Trajectory) -> None:
        self._counts["tries"] += 1
        if trajectory.failure is not None:
            self._counts[f"failures_{trajectory.failure.party}"] += 1

    def add_retry(self) -> None:
        self._counts["retries"] += 1

    def add_shared_tokens(self, count: int) -> None:
        """Count tokens of a shared dialogue: they were sampled once, however many attempts hold them."""
        self._counts["shared_sampled_tokens"] += count

    def add_kept_group(self, kept: Sequence[Trajectory], failed: Sequence[Trajectory]) -> None:
        self._counts["groups_kept"] += 1
        self.kept.extend(kept)
        self.add_failed(failed)
        if any(trajectory.start != kept[0].start for trajectory in kept):
            self._counts["groups_with_unequal_starts"] += 1

    def add_dropped_group(self, why: str, num_attempts: int, failed: Sequence[Trajectory]) -> None:
        """Count a dropped group. `num_attempts` of it did not fail themselves."""
        self._counts["groups_dropped"] += 1
        if num_attempts:
            self.dropped[why] += num_attempts
        self.add_failed(failed)

    def add_failed(self, failed: Sequence[Trajectory]) -> None:
        """Count attempts that still failed after all retries."""
        for trajectory in failed:
            assert trajectory.failure is not None
            self.dropped[f"{trajectory.failure.party}_failed"] += 1

    def add_quarantined_task(self) -> None:
        self._counts["tasks_quarantined"] += 1

    def add_abandoned(self, count: int) -> None:
        self._counts["abandoned_calls"] += count

    def add_close_failure(self) -> None:
        self._counts["close_failures"] += 1

    def add_sampled(self, num_tokens: int) -> None:
        """Count tokens that the sampler drew, for kept and dropped attempts; a shared beginning counts once."""
        self._counts["tokens_drawn"] += num_tokens

    def add_drafts(self, num_tokens: int, num_accepted: int) -> None:
        """Count tokens that the sampler guessed and checked, and those that were right."""
        if num_tokens:
            self._counts["draft_tokens"] += num_tokens
            self._counts["draft_tokens_accepted"] += num_accepted

    def add_unparsable(self) -> None:
        self._counts["unparsable_replies"] += 1

    def add_wait(self, party: Party, seconds: float) -> None:
        """Add the time that one attempt waited for a party; attempts that run side by side add up."""
        self._waited_s[party] += seconds

    def metrics(self) -> dict[str, float]:
        """All metrics by name; an average over nothing is left out."""
        values: dict[str, float] = {name: float(count) for name, count in self._counts.items() if count}
        values |= {f"dropped_{why}": float(count) for why, count in self.dropped.items()}
        values |= {f"{party}_wait_s": seconds for party, seconds in self._waited_s.items()}
        if drafted := self._counts["draft_tokens"]:
            values["draft_accepted_share"] = self._counts["draft_tokens_accepted"] / drafted
        values["attempts_kept"] = float(len(self.kept))
        values["attempts"] = float(len(self.kept) + self.dropped.total())
        if self.kept:
            values |= _averages(self.kept)
            values["sampled_tokens"] += self._counts["shared_sampled_tokens"]
        return {f"rollout/{name}": value for name, value in sorted(values.items())}


def failure_of(error: AttemptFailed) -> Failure:
    """The exception that ended an attempt, with the place and the traceback of what a party raised."""
    traceback, facts = "", dict(error.facts)
    if error.__cause__ is not None:
        traceback, place = user_traceback(error.__cause__), raised_at(error.__cause__)
        facts = {"place": place, **facts} if place else facts
    return Failure(party=error.party, detail=error.detail, traceback=traceback, facts=facts)


def success_rate(trajectories: Sequence[Trajectory]) -> float | None:
    """Share of successes; None if the env never gives a verdict. An attempt that ended before a verdict failed."""
    if all(trajectory.is_success is None for trajectory in trajectories):
        return None
    return fmean(float(trajectory.is_success is True) for trajectory in trajectories if trajectory.is_judged)


def num_splits(trajectory: Trajectory) -> int:
    """Number of turns whose prompt does not extend the ids before it; each of them starts a new datum."""
    count = 0
    ids: tuple[int, ...] = ()
    for turn in trajectory.turns:
        count += turn.prompt_ids[: len(ids)] != ids
        ids = turn.prompt_ids + turn.sampled_ids
    return count


def _averages(kept: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for trajectory in kept for turn in trajectory.turns]
    values = {
        "sampled_tokens": float(sum(trajectory.num_sampled_tokens for trajectory in kept)),
        "sampled_tokens_per_turn_mean": fmean(len(turn.sampled_ids) for turn in turns),
        "prompt_tokens_max": float(max(len(turn.prompt_ids) for turn in turns)),
        "turns_mean": fmean(len(trajectory.turns) for trajectory in kept),
        "duration_mean_s": fmean(trajectory.duration_s for trajectory in kept),
        "duration_max_s": max(trajectory.duration_s for trajectory in kept),
        "reward_mean": fmean(trajectory.total_reward for trajectory in kept),
        "cut_turn_share": fmean(turn.is_cut for turn in turns),
        "untrained_turns": float(sum(not turn.is_trained for turn in turns)),
        "splits": float(sum(num_splits(trajectory) for trajectory in kept)),
    }
    success = success_rate(kept)
    if success is not None:
        values["success_mean"] = success
    parts: defaultdict[str, float] = defaultdict(float)
    for turn in turns:
        for part, value in turn.reward_parts.items():
            parts[part] += value
    values |= {f"reward_{part}_mean": total / len(kept) for part, total in parts.items()}
    stops = Counter(trajectory.end_reason for trajectory in kept)
    values |= {f"stop_{reason}_share": count / len(kept) for reason, count in stops.items()}
    keys = sorted({key for trajectory in kept for key in trajectory.metrics})
    for key in keys:
        values[f"env_{key}_mean"] = fmean(t.metrics[key] for t in kept if key in t.metrics)
    return values
