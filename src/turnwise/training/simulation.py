"""A discrete-event model of a run on many devices: `turnwise cluster simulate`.

    attempts wait for a slot -> [ sampler draws a reply -> env answers ] per turn -> group done
    -> pool (the run's own rules) -> learners train -> weights are published -> the next groups are dealt

A sampler shares its rate between the replies that it draws. Which groups may start and which update learns from them is
decided by the pool of real runs (`pool.py`), so the model and a run cannot disagree about staleness.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from turnwise.envs.base import Task
from turnwise.errors import ConfigError
from turnwise.training.pool import GroupPlan, GroupState, Pool, PoolEntry, PoolRules
from turnwise.training.simulation_attempts import AttemptShape, DrawGroups

ENDLESS = 1 << 40
"""More updates than any simulation makes, so that a run's end does not show in its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """How fast the parts of a run are. Each number can be measured on one device."""

    sampler: tuple[tuple[float, float], ...]
    """Points of (replies drawn at the same time, tokens/s of one sampler device), by rising first number."""
    trainer: float
    """Tokens/s of one learner device."""
    draw_groups: DrawGroups
    context_tokens: float = 0.0
    """Tokens of an attempt that are trained on besides the sampled ones: prompts and answers of the env."""
    publish_s: float = 0.0
    """Seconds until one sampler has new weights. They go from sampler to sampler, twice as many in each round."""
    sync_s: float = 0.0
    """Seconds to sum the gradient over very many learners, once per step; a ring of n takes (n - 1) / n of it."""
    attempt_failure: float = 0.0
    """Probability that one try of an attempt fails, at any of its turns; it is then played again."""
    device_failures_per_h: float = 0.0
    """Failures of one device in an hour."""
    restart_s: float = 120.0
    """Seconds until a failed device works again."""

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.sampler]
        if not counts or counts != sorted(set(counts)) or min(rate for _, rate in self.sampler) <= 0 or counts[0] <= 0:
            raise ConfigError(f"sampler rates must be above 0, at rising counts of replies; got {self.sampler}")
        if not self.trainer > 0:
            raise ConfigError(f"the trainer's tokens/s must be above 0; got {self.trainer}")
        if not 0 <= self.attempt_failure < 1:
            raise ConfigError(f"the probability of a failure must be in [0, 1); got {self.attempt_failure}")
        if min(self.publish_s, self.sync_s, self.device_failures_per_h, self.restart_s, self.context_tokens) < 0:
            raise ConfigError("seconds, failures in an hour and context tokens must be at least 0")
        if self.device_failures_per_h * self.restart_s > 3600:
            raise ConfigError(
                f"a device that fails {self.device_failures_per_h:g} times in an hour and restarts in "
                f"{self.restart_s:g} s is down most of the time; give fewer failures or a faster restart"
            )

    def sampler_rate(self, count: int) -> float:
        """Tokens/s of a sampler that draws `count` replies: between points a line, below the first one from zero."""
        points = self.sampler
        after = bisect_right(points, count, key=lambda point: point[0])
        if after == len(points):
            return points[-1][1]
        low, low_rate = points[after - 1] if after else (0.0, 0.0)
        high, high_rate = points[after]
        return low_rate + (high_rate - low_rate) * (count - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """How many devices do what, and how a step is made up."""

    samplers: int
    learners: int
    is_colocated: bool = False
    """Samplers and learners are the same devices: while both have work, each gets half of the time, as in the engine
    (`engine/worker.py`)."""
    tasks_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 0
    concurrency: int = 64
    """Attempts at the same time for each sampler."""
    max_envs: int = 0
    """Most attempts at the same time over all samplers; 0: as many as `concurrency` allows."""

    def __post_init__(self) -> None:
        if min(self.samplers, self.learners, self.tasks_per_step, self.group_size, self.concurrency) < 1:
            raise ConfigError(f"devices, tasks, attempts and concurrency must be at least 1: {self}")
        if min(self.max_staleness, self.max_envs) < 0:
            raise ConfigError(f"max_staleness and max_envs must be at least 0: {self}")

    @property
    def num_devices(self) -> int:
        return max(self.samplers, self.learners) if self.is_colocated else self.samplers + self.learners

    @property
    def num_slots(self) -> int:
        """Attempts at the same time."""
        slots = self.concurrency * self.samplers
        return min(slots, self.max_envs) if self.max_envs else slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a simulated run did, without its first steps."""

    step_s: float
    staleness: tuple[int, ...]
    """The staleness of every group that was learned from."""
    sampler_idle: float
    """Share of the samplers' time in which they draw nothing."""
    learner_idle: float
    """Share of the learners' time in which they neither train nor publish."""
    env_idle: float
    """Share of the time of all places for attempts in which no call of an env is under way."""
    tokens_per_s: float
    """Tokens drawn, of all samplers together, tries that failed included."""

    @property
    def steps_per_s(self) -> float:
        return 1 / self.step_s

    @property
    def staleness_mean(self) -> float:
        return fmean(self.staleness)

    @property
    def staleness_p95(self) -> int:
        ranked = sorted(self.staleness)
        return ranked[math.ceil(0.95 * len(ranked)) - 1]


@dataclass(slots=True, eq=False)
class _SimulatedGroup:
    entry: PoolEntry
    attempts: Sequence[AttemptShape]
    num_left: int
    num_tokens: float = 0.0
    oldest: int | None = None


@dataclass(slots=True, eq=False)
class _SimulatedAttempt:
    group: _SimulatedGroup
    shape: AttemptShape
    fails_at: int | None
    """The turn in which this try fails."""
    sampler: _SimulatedSampler
    turn: int = 0


@dataclass(slots=True, eq=False)
class _SimulatedSampler:
    """Draws its replies side by side. `drawn` is how many tokens each of them would have got since the beginning."""

    number: int
    drawn: float = 0.0
    since: float = 0.0
    replies: list[tuple[float, int, _SimulatedAttempt]] = field(
        default_factory=list[tuple[float, int, _SimulatedAttempt]]
    )
    num_attempts: int = 0
    stamp: int = 0
    is_down: bool = False
    is_drawing: bool = False
    busy_s: float = 0.0
    num_tokens: float = 0.0


class Simulation:
    """One simulated run. The same arguments give the same numbers."""

    def __init__(self, rates: MeasuredRates, shape: ClusterShape, *, seed: int = 0) -> None:
        self._rates = rates
        self._shape = shape
        self._random = Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        rules = PoolRules(
            batch_size=shape.tasks_per_step, max_batch=shape.tasks_per_step, max_staleness=shape.max_staleness
        )
        self._pool = Pool(_plan_group, rules)
        self._groups: dict[int, _SimulatedGroup] = {}
        self._num_done = 0
        self._queue: deque[tuple[_SimulatedGroup, AttemptShape]] = deque()
        self._num_free = shape.num_slots
        self._samplers = [_SimulatedSampler(number) for number in range(shape.samplers)]
        self._by_load = [(0, number) for number in range(shape.samplers)]
        self._num_drawing = 0
        """Samplers that draw now."""
        self._is_training = False
        self._train_left_s = 0.0
        """Seconds left of the step under way, if nothing else used the learners' devices."""
        self._train_since = 0.0
        self._train_stamp = 0
        self._version = 0
        self._learner_busy_s = 0.0
        self._env_busy_s = 0.0
        self._learned_at: list[float] = []
        self._staleness: list[list[int]] = []

    def run(self, num_steps: int) -> Forecast:
        """Simulate until `num_steps` steps are learned after the first ones, which fill the pool."""
        if num_steps < 1:
            raise ConfigError(f"steps must be at least 1; got {num_steps}")
        num_first = self._shape.max_staleness + 1
        self._admit()
        self._plan_failure()
        self._run_until(num_first)
        start, before = self._now, self._counters()
        self._run_until(num_first + num_steps)
        elapsed = self._now - start
        busy = [after - earlier for earlier, after in zip(before, self._counters(), strict=True)]
        return Forecast(
            step_s=elapsed / num_steps,
            staleness=tuple(value for step in self._staleness[num_first : num_first + num_steps] for value in step),
            sampler_idle=_idle(busy[0], elapsed * self._shape.samplers),
            learner_idle=_idle(busy[1], elapsed),
            env_idle=_idle(busy[2], elapsed * self._shape.num_slots),
            tokens_per_s=busy[3] / elapsed,
        )

    def _run_until(self, num_learned: int) -> None:
        while len(self._learned_at) < num_learned:
            self._now, _, act = heapq.heappop(self._events)
            act()

    def _counters(self) -> tuple[float, float, float, float]:
        for sampler in self._samplers:
            self._advance(sampler)
        busy_s = sum(sampler.busy_s for sampler in self._samplers)
        num_tokens = sum(sampler.num_tokens for sampler in self._samplers)
        return busy_s, self._learner_busy_s, self._env_busy_s, num_tokens

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + seconds, self._num_events, act))

    # attempts

    def _admit(self) -> None:
        entries, size = self._pool.admit(ENDLESS), self._shape.group_size
        drawn = self._rates.draw_groups(self._random, [entry.plan.number for entry in entries], size)
        for entry, attempts in zip(entries, drawn, strict=True):
            group = _SimulatedGroup(entry, attempts, num_left=size)
            self._groups[entry.plan.number] = group
            self._queue.extend((group, attempt) for attempt in attempts)
        self._start_attempts()

    def _start_attempts(self) -> None:
        while self._queue and self._num_free:
            self._num_free -= 1
            self._try(*self._queue.popleft())

    def _try(self, group: _SimulatedGroup, shape: AttemptShape) -> None:
        failure = self._rates.attempt_failure
        fails_at = self._random.randrange(shape.turns) if failure and self._random.random() < failure else None
        sampler = self._least_loaded()
        self._load(sampler, 1)
        self._ask(_SimulatedAttempt(group, shape, fails_at, sampler))

    def _least_loaded(self) -> _SimulatedSampler:
        while self._by_load:
            load, number = self._by_load[0]
            sampler = self._samplers[number]
            if load == sampler.num_attempts and not sampler.is_down:
                return sampler
            heapq.heappop(self._by_load)
        return self._samplers[0]  # every sampler is down: wait for the first one

    def _load(self, sampler: _SimulatedSampler, change: int) -> None:
        sampler.num_attempts += change
        heapq.heappush(self._by_load, (sampler.num_attempts, sampler.number))

    def _ask(self, attempt: _SimulatedAttempt) -> None:
        """Begin to draw the reply of a turn."""
        group = attempt.group
        if group.oldest is None:
            group.oldest = self._version
        if attempt.sampler.is_down:
            self._load(attempt.sampler, -1)
            attempt.sampler = self._least_loaded()
            self._load(attempt.sampler, 1)
        sampler = attempt.sampler
        self._advance(sampler)
        self._num_events += 1
        wanted = attempt.shape.tokens / attempt.shape.turns
        heapq.heappush(sampler.replies, (sampler.drawn + wanted, self._num_events, attempt))
        self._plan_reply(sampler)

    def _advance(self, sampler: _SimulatedSampler) -> None:
        """Draw what a sampler has drawn since it was looked at."""
        seconds, sampler.since = self._now - sampler.since, self._now
        count = len(sampler.replies)
        if seconds and count and not sampler.is_down:
            num_tokens = seconds * self._rates.sampler_rate(count) * self._sampler_share
            sampler.drawn += num_tokens / count
            sampler.num_tokens += num_tokens
            sampler.busy_s += seconds

    @property
    def _sampler_share(self) -> float:
        """The share of its device that a sampler gets."""
        return 0.5 if self._is_training and self._shape.is_colocated else 1.0

    @property
    def _learner_share(self) -> float:
        """The share of their devices that learners get; the slowest learner holds up the others."""
        return 0.5 if self._shape.is_colocated and self._num_drawing else 1.0

    def _plan_reply(self, sampler: _SimulatedSampler) -> None:
        """Plan the end of the reply that is done first; what was planned before no longer counts."""
        sampler.stamp += 1
        count = len(sampler.replies)
        is_drawing = count > 0 and not sampler.is_down
        if is_drawing != sampler.is_drawing:
            self._advance_training()
            sampler.is_drawing = is_drawing
            self._num_drawing += 1 if is_drawing else -1
            self._plan_learned()
        if not is_drawing:
            return
        left = max(0.0, sampler.replies[0][0] - sampler.drawn)
        stamp, rate = sampler.stamp, self._rates.sampler_rate(count) * self._sampler_share
        self._after(left * count / rate, lambda: self._reply(sampler, stamp))

    def _reply(self, sampler: _SimulatedSampler, stamp: int) -> None:
        if stamp != sampler.stamp:
            return
        self._advance(sampler)
        _, _, attempt = heapq.heappop(sampler.replies)
        self._plan_reply(sampler)
        seconds = attempt.shape.env_s / attempt.shape.turns
        self._after(seconds, lambda: self._env_answers(attempt, seconds))

    def _env_answers(self, attempt: _SimulatedAttempt, seconds: float) -> None:
        self._env_busy_s += seconds
        group = attempt.group
        group.num_tokens += 0 if attempt.fails_at is not None else attempt.shape.tokens / attempt.shape.turns
        has_failed = attempt.turn == attempt.fails_at
        attempt.turn += 1
        if attempt.turn < attempt.shape.turns and not has_failed:
            self._ask(attempt)
            return
        self._load(attempt.sampler, -1)
        if has_failed:
            self._try(group, self._random.choice(group.attempts))
            return
        self._num_free += 1
        self._start_attempts()
        group.num_left -= 1
        if not group.num_left:
            group.entry.state = GroupState.DONE
            self._num_done += 1
            self._train_if_ready()

    # steps

    def _train_if_ready(self) -> None:
        if self._is_training or self._num_done < self._shape.tasks_per_step or not self._pool.is_ready:
            return
        taken = [self._groups.pop(entry.plan.number) for entry in self._pool.take()]
        self._num_done -= len(taken)
        self._staleness.append([self._version - group.oldest for group in taken if group.oldest is not None])
        num_attempts = len(taken) * self._shape.group_size
        num_tokens = sum(group.num_tokens for group in taken) + num_attempts * self._rates.context_tokens
        for sampler in self._samplers:
            self._advance(sampler)
        self._is_training = True
        self._train_left_s, self._train_since = self._train_s(num_tokens) + self._publish_s(), self._now
        for sampler in self._samplers:
            self._plan_reply(sampler)
        self._plan_learned()

    def _advance_training(self) -> None:
        """Train what was trained since this was looked at; called before a sampler begins to draw, or stops."""
        if self._is_training:
            seconds, self._train_since = self._now - self._train_since, self._now
            self._train_left_s = max(0.0, self._train_left_s - seconds * self._learner_share)
            self._learner_busy_s += seconds * self._learner_share

    def _plan_learned(self) -> None:
        """Plan the end of the step under way; what was planned before no longer counts."""
        self._train_stamp += 1
        if self._is_training:
            stamp = self._train_stamp
            self._after(self._train_left_s / self._learner_share, lambda: self._learned(stamp))

    def _train_s(self, num_tokens: float) -> float:
        """Seconds of a training pass; a failure of any learner begins it again after a restart."""
        learners, rates = self._shape.learners, self._rates
        pass_s = num_tokens / (rates.trainer * learners) + rates.sync_s * (learners - 1) / learners
        failures_per_s = rates.device_failures_per_h * learners / 3600
        total_s = pass_s
        if failures_per_s * pass_s > 7:  # one pass in a thousand would get through
            raise ConfigError(
                f"a step of {pass_s:.0f} s on {learners} learners never ends: one of them fails every "
                f"{1 / failures_per_s:.0f} s; give fewer failures, fewer learners or a smaller step"
            )
        while failures_per_s and (failed_after := self._random.expovariate(failures_per_s)) < pass_s:
            total_s += failed_after + rates.restart_s
        return total_s

    def _publish_s(self) -> float:
        return self._rates.publish_s * math.ceil(math.log2(self._shape.samplers + 1))

    def _learned(self, stamp: int) -> None:
        if stamp != self._train_stamp:
            return
        self._advance_training()
        for sampler in self._samplers:
            self._advance(sampler)
        self._is_training = False
        self._version += 1
        self._learned_at.append(self._now)
        self._pool.learned()
        for sampler in self._samplers:
            self._plan_reply(sampler)
        self._admit()
        self._train_if_ready()

    # failures of samplers

    def _plan_failure(self) -> None:
        per_s = self._rates.device_failures_per_h * self._shape.samplers / 3600
        if per_s:
            self._after(self._random.expovariate(per_s), self._fail)

    def _fail(self) -> None:
        """A sampler is lost with the replies that it draws; others begin them again, or wait for it if it is alone."""
        sampler = self._random.choice(self._samplers)
        self._plan_failure()
        if sampler.is_down:
            return
        self._advance(sampler)
        sampler.is_down = True
        lost = [attempt for _, _, attempt in sorted(sampler.replies)]
        sampler.replies.clear()
        self._plan_reply(sampler)
        self._after(self._rates.restart_s, lambda: self._back(sampler))
        for attempt in lost:
            self._ask(attempt)

    def _back(self, sampler: _SimulatedSampler) -> None:
        sampler.since = self._now
        sampler.is_down = False
        heapq.heappush(self._by_load, (sampler.num_attempts, sampler.number))
        self._plan_reply(sampler)


def simulate(rates: MeasuredRates, shape: ClusterShape, *, num_steps: int = 20, seed: int = 0) -> Forecast:
    """Simulate `num_steps` steps of a run."""
    return Simulation(rates, shape, seed=seed).run(num_steps)


def _plan_group(number: int) -> GroupPlan:
    return GroupPlan(number=number, task=Task(id=str(number), data={}), seed=number)


def _idle(busy_s: float, all_s: float) -> float:
    return min(1.0, max(0.0, 1 - busy_s / all_s))
