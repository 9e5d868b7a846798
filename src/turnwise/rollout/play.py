"""One env, one sampler, one renderer -> one trajectory.

    start -> render -> [limits] -> sample -> parse -> step -> extend -> [limits] -> sample -> ...

Every end has one `StopReason`. A turn is recorded when the env has answered it, so no turn has a reward that nobody
gave: an attempt that fails or runs out of time keeps the turns before. A failed attempt is data, with the party to
blame; only bugs of ours and cancellation leave `play` as exceptions. The env is closed in any case.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from turnwise.client.base import SamplingClient
from turnwise.envs.base import Env, EnvStep
from turnwise.errors import AttemptFailed, Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.call import DeadlinePassed, call, call_now
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.env_calls import EnvCalls
from turnwise.rollout.limits import Clock
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import Failure, Message, StopReason, Trajectory, Turn
from turnwise.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is to be played."""

    task_id: str
    index: int
    """Which attempt of its group, from 0."""
    seed: int
    make_env: Callable[[], Env]


async def play(
    attempt: Attempt, sampler: SamplingClient, renderer: Renderer, config: RolloutConfig, stats: RolloutStats
) -> Trajectory:
    """Play one attempt to its end."""
    player = _Player(attempt, sampler, renderer, config, stats)
    failure: Failure | None = None
    try:
        stop_reason = await player.run()
    except AttemptFailed as error:
        stop_reason, failure = StopReason.FAILED, Failure(party=error.party, detail=error.detail)
    finally:
        await _to_the_end(player.close())
    return player.to_trajectory(stop_reason, failure)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that has deadlines of its own, however often we are cancelled meanwhile."""
    task = asyncio.create_task(work)
    was_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        raise asyncio.CancelledError
    task.result()


class _Player:
    """The state of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        sampler: SamplingClient,
        renderer: Renderer,
        config: RolloutConfig,
        stats: RolloutStats,
    ) -> None:
        self._attempt = attempt
        self._sampler = sampler
        self._renderer = renderer
        self._config = config
        self._stats = stats
        self._clock = Clock(config.limits.attempt_deadline_s)
        self._env = EnvCalls(attempt.make_env, config.limits, self._clock)
        self._start: tuple[Message, ...] = ()
        self._history: list[Message] = []
        """What the current prompt stands for."""
        self._turns: list[Turn] = []
        self._metrics: dict[str, float] = {}
        self._is_success: bool | None = None

    async def run(self) -> StopReason:
        try:
            return await self._run()
        except DeadlinePassed:
            if self._turns and self._clock.is_over:
                return StopReason.TIME_LIMIT
            raise

    async def close(self) -> None:
        try:
            await self._env.close()
        finally:
            self._stats.add_abandoned(self._env.num_abandoned)
            if self._env.close_problem is not None:
                self._stats.add_close_failure()

    def to_trajectory(self, stop_reason: StopReason, failure: Failure | None) -> Trajectory:
        return Trajectory(
            task_id=self._attempt.task_id,
            attempt=self._attempt.index,
            seed=self._attempt.seed,
            start=self._start,
            turns=tuple(self._turns),
            stop_reason=stop_reason,
            failure=failure,
            is_success=self._is_success,
            metrics=self._metrics,
            duration_s=self._clock.spent_s,
        )

    async def _run(self) -> StopReason:
        self._start = await self._timed(Party.ENV, self._env.start())
        self._history = list(self._start)
        prompt_ids = call_now(Party.RENDERER, "start", lambda: self._renderer.start(self._start))
        while (stop_reason := self._limit_reached(prompt_ids)) is None:
            env_state = await self._env.state_key()
            response = await self._sample(prompt_ids)
            reply = self._parse(response)
            step = await self._timed(Party.ENV, self._env.step(reply))
            self._turns.append(self._to_turn(prompt_ids, response, reply, step, env_state))
            self._metrics.update({key: float(value) for key, value in step.info.items()})
            if step.is_success is not None:
                self._is_success = bool(step.is_success)
            stop_reason = self._end_after(step)
            if stop_reason is not None:
                return stop_reason
            prompt_ids = self._extend(prompt_ids, step)
        return stop_reason

    def _limit_reached(self, prompt_ids: list[int]) -> StopReason | None:
        """Asked before each sampling. A first prompt that does not fit is no attempt at all."""
        if self._config.limits.num_tokens_left(len(prompt_ids)) < 1:
            if not self._turns:
                limit = self._config.limits.max_trajectory_tokens
                detail = f"the first prompt has {len(prompt_ids)} tokens and max_trajectory_tokens is {limit}"
                raise AttemptFailed(Party.ENV, detail)
            return StopReason.MAX_TOKENS
        if self._clock.is_over and self._turns:
            return StopReason.TIME_LIMIT
        return None

    async def _sample(self, prompt_ids: list[int]) -> SampleResponse:
        config, turn = self._config, len(self._turns)
        params = SamplingParams(
            max_tokens=config.limits.num_tokens_left(len(prompt_ids)),
            seed=derive_seed(self._attempt.seed, "turn", turn),
            stop=list(config.stop) or None,
            stop_token_ids=list(self._renderer.stop_ids),
            temperature=config.temperature,
        )
        prompt = ModelInput.from_ints(prompt_ids)
        work = call(
            Party.SAMPLER,
            "sample",
            lambda: self._sampler.sample_async(prompt, num_samples=1, sampling_params=params),
            deadline_s=self._clock.at_most(config.limits.sample_deadline_s),
        )
        response = await self._timed(Party.SAMPLER, work)
        _check_response(response)
        return response

    def _parse(self, response: SampleResponse) -> Message:
        tokens = response.sequences[0].tokens
        return call_now(Party.RENDERER, "parse", lambda: self._renderer.parse(tokens))

    def _to_turn(
        self, prompt_ids: list[int], response: SampleResponse, reply: Message, step: EnvStep, env_state: str | None
    ) -> Turn:
        sequence: SampledSequence = response.sequences[0]
        parts = {part: float(value) for part, value in step.reward_parts.items()}
        policy, penalty = self._config.on_unparsable, self._config.unparsable_penalty
        if step.is_unparsable:
            self._stats.add_unparsable()
            if policy == "penalise" and penalty:
                parts["penalty"] = parts.get("penalty", 0.0) - penalty
        return Turn(
            prompt_ids=tuple(prompt_ids),
            sampled_ids=tuple(int(token) for token in sequence.tokens),
            sampler_logprobs=tuple(float(logprob) for logprob in sequence.logprobs or ()),
            policy_version=response.policy_version,
            temperature=self._config.logprob_temperature,
            reply=reply,
            observation=tuple(step.messages),
            reward_parts=parts,
            is_trained=not (step.is_unparsable and policy == "mask"),
            is_cut=sequence.stop_reason == "length",
            env_state=env_state,
        )

    def _end_after(self, step: EnvStep) -> StopReason | None:
        """The env's own end comes before any limit of ours."""
        if step.terminated:
            return StopReason.TERMINATED
        if step.truncated:
            return StopReason.TRUNCATED
        if step.is_unparsable and self._config.on_unparsable == "end":
            return StopReason.UNPARSABLE
        return StopReason.MAX_TURNS if len(self._turns) >= self._config.limits.max_turns else None

    def _extend(self, prompt_ids: list[int], step: EnvStep) -> list[int]:
        turn, history = self._turns[-1], tuple(self._history)
        extension = call_now(
            Party.RENDERER,
            "extend",
            lambda: self._renderer.extend(prompt_ids, turn.sampled_ids, step.messages, history=history),
        )
        self._history += [turn.reply, *step.messages]
        return extension.ids

    async def _timed(self, party: Party, work: Awaitable[T]) -> T:
        started_s = time.monotonic()
        try:
            return await work
        finally:
            self._stats.add_wait(party, time.monotonic() - started_s)


def _check_response(response: SampleResponse) -> None:
    """Refuse what cannot be trained on; no logprob is made up."""
    if len(response.sequences) != 1:
        raise AttemptFailed(Party.SAMPLER, f"{len(response.sequences)} sequences came; one was asked for")
    sequence = response.sequences[0]
    if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
        came = "none" if sequence.logprobs is None else str(len(sequence.logprobs))
        raise AttemptFailed(Party.SAMPLER, f"{len(sequence.tokens)} tokens and {came} logprobs came")
    if not sequence.tokens:
        raise AttemptFailed(Party.SAMPLER, "a reply of no tokens came; not even a stop")
    if not all(math.isfinite(logprob) for logprob in sequence.logprobs):
        raise AttemptFailed(Party.SAMPLER, "a logprob that is not finite came")
