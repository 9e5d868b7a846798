"""Asks a model for a score, within limits, and decides what happens if there is none.

A question takes these steps, in order: look in the cache; share the answer if another attempt is asking the same
question; wait for the rate limit; wait for the limit of questions at the same time; send up to `max_tries` requests.
All of it has one deadline. An answer without a readable score counts as a failed try. Only answers with a score are
stored.

Without a score, the fallback decides:

    fail    the attempt is recorded with the judge to blame, and never scored
    value   a fixed score is counted
    skip    the attempt is scored without the judge's channel
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.judges.cache import AnswerCache, MemoryCache, make_key
from turnwise.judges.models import JudgeBusyError, JudgeFailedError, JudgeModel
from turnwise.judges.rubric import Rubric
from turnwise.runtime.per_loop import PerLoop
from turnwise.trajectory import Message

Fallback = Literal["fail", "value", "skip"]

BACK_OFF_S = 0.5
"""Wait n times this before try n + 1, unless the server names a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeLimits:
    """Limits on asking a judge, and what to do without a score."""

    deadline_s: float = 45.0
    """Time limit of one score, with waiting and all tries. Keep it below the rollout's deadline for a step."""
    max_tries: int = 3
    max_concurrency: int = 8
    requests_per_minute: float = 0.0
    """0 sets no limit."""
    fallback: Fallback = "fail"
    fallback_value: float | None = None
    """The score, 0 to 1, for the fallback `value`."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ConfigError(f"deadline_s={self.deadline_s}; expected a number of seconds above 0")
        for name in ("max_tries", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        if not (math.isfinite(self.requests_per_minute) and self.requests_per_minute >= 0):
            raise ConfigError(f"requests_per_minute={self.requests_per_minute}; expected 0 (no limit) or more")
        if self.fallback not in ("fail", "value", "skip"):
            raise ConfigError(f"fallback={self.fallback!r}; expected fail, value or skip")
        if (self.fallback == "value") != (self.fallback_value is not None):
            raise ConfigError(
                f"fallback={self.fallback} with fallback_value={self.fallback_value}; only `value` needs one"
            )
        if self.fallback_value is not None and not 0 <= self.fallback_value <= 1:
            raise ConfigError(f"fallback_value={self.fallback_value}; expected 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's result for one attempt."""

    score: float | None
    """The score, 0 to 1. None if the fallback skips the judge."""
    answer: str = ""
    """The judge's answer as text."""
    problem: str = ""
    """Why the fallback was used. Empty if the judge gave the score."""


@dataclass(slots=True)
class _LoopState:
    """The state that belongs to one event loop."""

    slots: asyncio.Semaphore
    under_way: dict[str, asyncio.Task[str]] = field(default_factory=dict[str, "asyncio.Task[str]"])


class Judge:
    """A model with a rubric and limits. Attempts share a judge; it works in any event loop."""

    def __init__(
        self, model: JudgeModel, rubric: Rubric, *, cache: AnswerCache | None = None, limits: JudgeLimits | None = None
    ) -> None:
        self.model = model
        self.rubric = rubric
        self.limits = limits or JudgeLimits()
        self._cache = cache if cache is not None else MemoryCache()
        self._pace = _Pace(self.limits.requests_per_minute)
        num_slots = self.limits.max_concurrency
        self._loops = PerLoop(lambda: _LoopState(asyncio.Semaphore(num_slots)))
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts since the judge was made: scores, cache_hits, shared, requests, failed_requests, fallbacks."""
        return self._counts

    async def score(self, dialogue: Sequence[Message], reference: str = "") -> Verdict:
        """Score a finished attempt."""
        self._counts["scores"] += 1
        prompt = self.rubric.ask(dialogue, reference)
        deadline = asyncio.timeout(self.limits.deadline_s)
        try:
            async with deadline:
                answer = await self._answer(prompt)
        except TimeoutError:
            if not deadline.expired():
                raise
            return self._fall_back(f"no score within {self.limits.deadline_s:g} s")
        except JudgeFailedError as cause:
            return self._fall_back(str(cause))
        return Verdict(score=self.rubric.read(answer), answer=answer)

    async def _answer(self, prompt: Sequence[Message]) -> str:
        key = make_key(self.model.name, prompt)
        kept = self._cache.get(key)
        if kept is not None and self.rubric.read(kept) is not None:
            self._counts["cache_hits"] += 1
            return kept
        state = self._loops.get()
        task = state.under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(state, key, prompt))
            state.under_way[key] = task
            task.add_done_callback(lambda done: _forget(state, key, done))
        else:
            self._counts["shared"] += 1
        # Shield the task: the first asker may be cancelled while others still wait. The task has its own deadline.
        return await asyncio.shield(task)

    async def _ask(self, state: _LoopState, key: str, prompt: Sequence[Message]) -> str:
        """Try until there is an answer with a score. All who wait get the answer, or a `JudgeFailedError`."""
        deadline = asyncio.timeout(self.limits.deadline_s)
        try:
            async with deadline:
                return await self._try(state, key, prompt)
        except TimeoutError as cause:
            if not deadline.expired():
                raise
            raise JudgeFailedError(f"no score within {self.limits.deadline_s:g} s") from cause

    async def _try(self, state: _LoopState, key: str, prompt: Sequence[Message]) -> str:
        problem = "it was not asked"
        for number in range(1, self.limits.max_tries + 1):
            wait_s = number * BACK_OFF_S
            try:
                answer = await self._request(state, prompt)
            except JudgeBusyError as busy:
                problem = str(busy)
                wait_s = busy.wait_s if busy.wait_s is not None else wait_s
            else:
                if self.rubric.read(answer) is not None:
                    self._cache.put(key, answer)
                    return answer
                problem = f"no score in its answer {answer[-80:]!r}"
            self._counts["failed_requests"] += 1
            if wait_s > self.limits.deadline_s:
                raise JudgeFailedError(f"{problem}; it asks for {wait_s:g} s, more than the deadline")
            if number < self.limits.max_tries:
                await asyncio.sleep(wait_s)
        raise JudgeFailedError(f"{self.limits.max_tries} tries: {problem}")

    async def _request(self, state: _LoopState, prompt: Sequence[Message]) -> str:
        await self._pace.wait()
        async with state.slots:
            self._counts["requests"] += 1
            return await self.model.answer(prompt)

    def _fall_back(self, problem: str) -> Verdict:
        self._counts["fallbacks"] += 1
        if self.limits.fallback == "fail":
            raise AttemptFailed(Party.JUDGE, problem)
        return Verdict(score=self.limits.fallback_value, problem=problem)


def _forget(state: _LoopState, key: str, task: asyncio.Task[str]) -> None:
    state.under_way.pop(key, None)
    if not task.cancelled():
        task.exception()  # read the exception: if all who waited were cancelled, asyncio would warn


class _Pace:
    """Spreads requests evenly over time, across all event loops and threads."""

    def __init__(self, requests_per_minute: float) -> None:
        self._gap_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next_s = 0.0
        self._lock = threading.Lock()

    async def wait(self) -> None:
        if not self._gap_s:
            return
        with self._lock:
            now_s = time.monotonic()
            moment_s = max(now_s, self._next_s)
            self._next_s = moment_s + self._gap_s
        await asyncio.sleep(moment_s - now_s)
