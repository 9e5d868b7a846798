"""Plays one attempt: an env, a sampler and a renderer make one trajectory.

    start -> render -> [limits] -> sample -> parse -> step -> extend -> [limits] -> sample -> ...

Every attempt ends with one `EndReason`. A turn is recorded after the env has answered it, so no reward is invented: an
attempt that fails or runs out of time keeps its earlier turns. A failed attempt is data, with the party to blame; only
our own bugs and cancellation leave `play` as exceptions. The env is always closed. An attempt may also start at a
`Savepoint`, in the middle of another attempt (`rollout.branch`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turnwise.client.base import SamplingClient
from turnwise.client.publish import UntilUpdate
from turnwise.envs.base import Env, EnvStep
from turnwise.errors import AttemptFailed, Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.call import DeadlinePassed, EnvCalls, call, call_now
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.limits import Clock
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.runtime.pending_calls import caller
from turnwise.trajectory import Branch, EndReason, Failure, Message, Trajectory, Turn
from turnwise.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

T = TypeVar("T")

CANNOT_REPLAY = "the env does not go the same way again with the same seed and the same replies:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt that is to be played."""

    task_id: str
    index: int
    """Index of the attempt in its group, from 0."""
    seed: int
    make_env: Callable[[], Env]
    branch: Branch | None = None
    """The turn at which it leaves the dialogue that its group shares."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that it has before the env gives it any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Savepoint:
    """The state of an attempt before one of its turns. Other attempts can continue from it."""

    start: tuple[Message, ...]
    turns: tuple[Turn, ...]
    history: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    """The next prompt of the sampler."""
    metrics: Mapping[str, float]
    labels: Mapping[str, str]
    is_success: bool | None
    max_reply_tokens: int
    """The env's limit on the next reply; 0: none."""
    env_state: str | None
    parked: EnvCalls | None
    """The env in that state, ready to be forked. None if a fresh env must replay the same replies."""


async def play(
    attempt: Attempt, sampler: SamplingClient, renderer: Renderer, config: RolloutConfig, stats: RolloutStats
) -> Trajectory:
    """Play one attempt to its end."""
    return await play_to_the_end(Player(attempt, sampler, renderer, config, stats))


async def play_to_the_end(player: Player) -> Trajectory:
    """Run a player to the end and close its env."""
    failure: Failure | None = None
    try:
        end_reason = await player.run()
    except AttemptFailed as error:
        end_reason, failure = EndReason.FAILED, player.stats.to_failure(error)
    finally:
        await close_in_any_case(player.close())
    return player.to_trajectory(end_reason, failure)


async def close_in_any_case(work: Coroutine[Any, Any, None]) -> None:
    """Await work that has its own deadlines, even if we are cancelled; the cancellation is raised afterwards."""
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


class Player:
    """One attempt while it is played."""

    def __init__(
        self,
        attempt: Attempt,
        sampler: SamplingClient,
        renderer: Renderer,
        config: RolloutConfig,
        stats: RolloutStats,
        savepoint: Savepoint | None = None,
    ) -> None:
        config.check_bounds()
        self._attempt = attempt
        self._savepoint = savepoint
        self._sampler = sampler
        self._renderer = renderer
        self._config = config
        self.stats = stats
        self._clock = Clock(config.attempt_deadline_s)
        self._env = EnvCalls(attempt.make_env, config, self._clock)
        self._start: tuple[Message, ...] = ()
        self._history: list[Message] = []
        """The messages that the current prompt stands for."""
        self._prompt_ids: list[int] = []
        self._turns: list[Turn] = []
        self._metrics: dict[str, float] = {}
        self._labels: dict[str, str] = dict(attempt.labels)
        self._is_success: bool | None = None
        self._max_reply_tokens = 0

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self._turns)

    async def run(self) -> EndReason:
        """Play from the start, or from the savepoint, to the end."""
        try:
            await self.begin()
            while (end_reason := await self.turn()) is None:
                pass
        except DeadlinePassed:
            if self._has_own_turns and self._clock.is_over:
                return EndReason.TIME_LIMIT
            raise
        return end_reason

    async def close(self) -> None:
        try:
            await self._env.close()
        finally:
            self.stats.add_abandoned(self._env.num_abandoned)
            if self._env.close_problem is not None:
                self.stats.add_close_failure()

    def to_trajectory(self, end_reason: EndReason, failure: Failure | None) -> Trajectory:
        return Trajectory(
            task_id=self._attempt.task_id,
            attempt=self._attempt.index,
            seed=self._attempt.seed,
            start=self._start,
            turns=tuple(self._turns),
            end_reason=end_reason,
            failure=failure,
            is_success=self._is_success if failure is None else None,
            metrics=self._metrics,
            duration_s=self._clock.spent_s,
            branch=self._attempt.branch,
            labels=self._labels,
        )

    async def begin(self) -> None:
        caller.set(f"{self._attempt.task_id}, attempt {self._attempt.index}")
        if self._savepoint is not None:
            await self._take_over(self._savepoint)
            return
        self._start = await self._timed(Party.ENV, self._env.start())
        self._history = list(self._start)
        self._prompt_ids = call_now(Party.RENDERER, "start", lambda: self._renderer.start(self._start))

    def limit_reached(self) -> EndReason | None:
        """The limit that forbids another reply, if any. Fails the attempt if even its first prompt does not fit."""
        if self._config.num_tokens_left(len(self._prompt_ids)) < 1:
            if not self._turns:
                needed, limit = len(self._prompt_ids), self._config.max_trajectory_tokens
                detail = f"the first prompt needs {needed} tokens, the limit is {limit} (rollout.max_trajectory_tokens)"
                raise AttemptFailed(Party.CONTEXT, detail, {"needed_tokens": needed, "limit_tokens": limit})
            return EndReason.MAX_TOKENS
        if self._clock.is_over and self._has_own_turns:
            return EndReason.TIME_LIMIT
        if isinstance(self._sampler, UntilUpdate) and self._sampler.is_outdated and self._has_own_turns:
            return EndReason.UPDATED
        return None

    async def turn(self) -> EndReason | None:
        """Play one turn, if a limit allows it. Returns why the attempt is over, or None if it goes on."""
        end_reason = self.limit_reached()
        if end_reason is not None:
            return end_reason
        await self._reseed()
        env_state, potential = await self._env.state_key(), await self._env.potential()
        response = await self._sample(self._prompt_ids)
        reply = self._parse(response)
        step = await self._timed(Party.ENV, self._env.step(reply))
        turn = self._to_turn(self._prompt_ids, response, reply, step, env_state)
        if potential is not None:
            after = 0.0 if step.terminated else await self._env.potential()
            turn = replace(turn, potential=potential, next_potential=after)
        self._turns.append(turn)
        self._metrics.update({key: float(value) for key, value in step.info.items()})
        self._labels.update(step.labels)
        if step.is_success is not None:
            self._is_success = bool(step.is_success)
        self._max_reply_tokens = step.max_tokens
        end_reason = self._end_after(step)
        if end_reason is None:
            self._prompt_ids = self._extend(self._prompt_ids, step)
        return end_reason

    async def save(self, *, is_fork: bool) -> Savepoint:
        """The attempt as it is now. Set `is_fork` if this attempt goes on: the savepoint gets a fork of the env."""
        env_state = await self._env.state_key()
        parked = None
        if self._env.can_fork:  # nothing is awaited after this: a fork that nobody holds would stay open
            parked = await self._env.fork() if is_fork else self._env
        return Savepoint(
            start=self._start,
            turns=tuple(self._turns),
            history=tuple(self._history),
            prompt_ids=tuple(self._prompt_ids),
            metrics=dict(self._metrics),
            labels=dict(self._labels),
            is_success=self._is_success,
            max_reply_tokens=self._max_reply_tokens,
            env_state=env_state,
            parked=parked,
        )

    async def _take_over(self, point: Savepoint) -> None:
        """Continue from the savepoint, in an own env that is brought to the same state."""
        if point.parked is None:
            await self._timed(Party.ENV, self._replay(point))
        else:
            await self._timed(Party.ENV, self._env.start_as_fork(point.parked))
        check_same_state(point.env_state, await self._env.state_key())
        self._start, self._turns, self._history = point.start, list(point.turns), list(point.history)
        self._prompt_ids, self._metrics = list(point.prompt_ids), dict(point.metrics)
        self._labels, self._is_success = dict(point.labels), point.is_success
        self._max_reply_tokens = point.max_reply_tokens

    async def _replay(self, point: Savepoint) -> None:
        check_same_answer(-1, point.start, await self._env.start())
        for index, turn in enumerate(point.turns):
            step = await self._env.step(turn.reply)
            check_same_answer(index, turn.observation, tuple(step.messages))
            if self._reward_parts(step) != turn.reward_parts:
                came = f"{self._reward_parts(step)}, and {dict(turn.reward_parts)} the first time"
                raise AttemptFailed(Party.ENV, f"{CANNOT_REPLAY} turn {index} was rewarded {came}")

    async def _reseed(self) -> None:
        branch = self._attempt.branch
        if branch is not None and branch.reseeds_env and branch.turn == len(self._turns):
            await self._env.reseed(branch.seed)

    @property
    def _has_own_turns(self) -> bool:
        return len(self._turns) > (0 if self._savepoint is None else len(self._savepoint.turns))

    def _seed(self, turn: int) -> int:
        branch = self._attempt.branch
        seed = self._attempt.seed if branch is None or turn < branch.turn else branch.seed
        return derive_seed(seed, "turn", turn)

    async def _sample(self, prompt_ids: list[int]) -> SampleResponse:
        config, turn = self._config, len(self._turns)
        params = SamplingParams(
            max_tokens=config.num_tokens_left(len(prompt_ids), self._max_reply_tokens),
            seed=self._seed(turn),
            stop=list(config.stop) or None,
            stop_token_ids=list(self._renderer.stop_ids),
            temperature=config.temperature,
        )
        prompt = ModelInput.from_ints(prompt_ids)
        work = call(
            Party.SAMPLER,
            "sample",
            lambda: self._sampler.sample_async(prompt, num_samples=1, sampling_params=params),
            deadline_s=self._clock.at_most(config.sample_deadline_s),
        )
        response = await self._timed(Party.SAMPLER, work)
        _check_response(response)
        self.stats.add_sampled(len(response.sequences[0].tokens))
        self.stats.add_drafts(response.num_draft_tokens, response.num_accepted_draft_tokens)
        return response

    def _parse(self, response: SampleResponse) -> Message:
        tokens = response.sequences[0].tokens
        return call_now(Party.RENDERER, "parse", lambda: self._renderer.parse(tokens))

    def _to_turn(
        self, prompt_ids: list[int], response: SampleResponse, reply: Message, step: EnvStep, env_state: str | None
    ) -> Turn:
        sequence: SampledSequence = response.sequences[0]
        if step.is_unparsable:
            self.stats.add_unparsable()
        return Turn(
            prompt_ids=tuple(prompt_ids),
            sampled_ids=tuple(map(int, sequence.tokens)),
            sampler_logprobs=tuple(map(float, sequence.logprobs or ())),
            policy_version=response.policy_version,
            token_versions=None if sequence.versions is None else tuple(map(int, sequence.versions)),
            temperature=self._config.logprob_temperature,
            reply=reply,
            observation=tuple(step.messages),
            reward_parts=self._reward_parts(step),
            is_trained=not (step.is_unparsable and self._config.on_unparsable == "mask"),
            is_cut=sequence.stop_reason == "length",
            is_unparsable=step.is_unparsable,
            is_action=step.is_action,
            env_state=env_state,
        )

    def _reward_parts(self, step: EnvStep) -> dict[str, float]:
        parts = {part: float(value) for part, value in step.reward_parts.items()}
        if step.is_unparsable and self._config.on_unparsable == "penalise" and self._config.unparsable_penalty:
            parts["penalty"] = parts.get("penalty", 0.0) - self._config.unparsable_penalty
        return parts

    def _end_after(self, step: EnvStep) -> EndReason | None:
        """Why the attempt ends after this step, or None. The env's own end comes before our limits."""
        if step.terminated:
            return EndReason.TERMINATED
        if step.truncated:
            return EndReason.TRUNCATED
        if step.is_unparsable and self._config.on_unparsable == "end":
            return EndReason.UNPARSABLE
        return EndReason.MAX_TURNS if len(self._turns) >= self._config.max_turns else None

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
            self.stats.add_wait(party, time.monotonic() - started_s)


def check_same_state(expected: str | None, came: str | None) -> None:
    if expected != came:
        raise AttemptFailed(
            Party.ENV, f"state_key() is {came!r:.120} in the copy, and {expected!r:.120} in the original"
        )


def check_same_answer(turn: int, expected: tuple[Message, ...], came: tuple[Message, ...]) -> None:
    """Fail if a replayed env answered differently. `turn` is -1 for the first messages."""
    if expected != came:
        where = "the first messages were" if turn < 0 else f"the answer to turn {turn} was"
        raise AttemptFailed(Party.ENV, f"{CANNOT_REPLAY} {where} {_said(came)}, and {_said(expected)} the first time")


def _said(messages: tuple[Message, ...]) -> str:
    return repr(" / ".join(message.content for message in messages)[:120])


def _check_response(response: SampleResponse) -> None:
    """Refuse a response that cannot be trained on; no logprob is ever invented."""
    if len(response.sequences) != 1:
        raise AttemptFailed(Party.SAMPLER, f"the sampler returned {len(response.sequences)} sequences; expected one")
    sequence = response.sequences[0]
    if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
        came = "none" if sequence.logprobs is None else str(len(sequence.logprobs))
        raise AttemptFailed(
            Party.SAMPLER,
            f"the reply has {len(sequence.tokens)} tokens and {came} logprobs",
        )
    if not sequence.tokens:
        raise AttemptFailed(Party.SAMPLER, "the reply has no tokens, not even a stop token")
    if not all(map(math.isfinite, sequence.logprobs)):
        raise AttemptFailed(Party.SAMPLER, "a logprob of the reply is not finite")
