"""Plays one dialogue to turn h, then several continuations: the attempts of a group differ from turn h on.

    start ... turn h-1 | turn h ... end        attempt 0
                       | turn h ... end        attempt 1
                       | turn h ... end        ...

The dialogue before h is played once. Each continuation has its own env in the same state: a fork of the first env if it
has `fork()`, otherwise a fresh env with the same seed that gets the same replies. The states are compared
(`state_key()`, and every answer of a replay), and a copy that differs fails its attempt. Sampler and env draw different
numbers in each continuation (`reseed(seed)`, if the env has it). All continuations hold the same ids before turn h, so
they share the KV cache in sampling and the prefix tree in training.

A dialogue may end before turn h. Its group then branches at a turn that is drawn again from the turns it had, or is
dropped as `ended_before_branch`. For this, one savepoint is kept while the dialogue runs, chosen by reservoir sampling
with the right probabilities, so at most one spare env is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from turnwise.client.base import SamplingClient
from turnwise.credit.branching import turn_probabilities
from turnwise.envs.base import Task, World, assistant
from turnwise.envs.joint import labels_of
from turnwise.errors import AttemptFailed, ConfigError
from turnwise.renderers.base import Renderer
from turnwise.rollout.call import EnvCalls
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.group import DroppedGroup, Quarantine, Rollout
from turnwise.rollout.limits import Clock, RolloutLimits
from turnwise.rollout.play import (
    Attempt,
    Player,
    Savepoint,
    check_same_answer,
    check_same_state,
    close_in_any_case,
    play_to_the_end,
)
from turnwise.rollout.seeds import derive_seed, world_seed
from turnwise.rollout.sources import PlayBranches
from turnwise.trajectory import Branch, EndReason, Message, Trajectory, TrajectoryGroup

CHECKED_TURNS = 3
"""Number of turns at which `check_can_branch` compares a copy."""


@dataclass(slots=True)
class _Trunk:
    """The dialogue that a group shares, and the savepoint at which the attempts leave it."""

    player: Player
    seed: int
    """Seed of the env."""
    point: Savepoint | None = None
    """None if the dialogue ended before its turn."""
    probability: float = 1.0
    num_sampled_tokens: int = 0
    end_reason: EndReason | None = None

    async def close(self) -> None:
        if self.point is not None and self.point.parked is not None:
            await self.point.parked.close()
        await self.player.close()


class BranchRollout(Rollout):
    """Branches one dialogue of each task; a group has `plan.continuations` attempts. Otherwise like `Rollout`."""

    def __init__(
        self,
        world: World,
        sampler: SamplingClient,
        renderer: Renderer,
        config: RolloutConfig,
        *,
        plan: PlayBranches,
        quarantine: Quarantine | None = None,
    ) -> None:
        # The signature of `Rollout`, plus the plan.
        config = config.for_world(world).model_copy(update={"group_size": plan.continuations})
        super().__init__(world, sampler, renderer, config, quarantine=quarantine)
        self._plan = plan

    async def play_group(self, task: Task, seed: int) -> TrajectoryGroup | DroppedGroup:
        reason = self.quarantine.reason(task.id)
        if reason is not None:
            return self.drop(task, "quarantined", reason, lost=self._plan.continuations)
        trunk = await self._play_trunk(task, seed)
        if isinstance(trunk, Trajectory):
            return self.finish_group(task, [trunk])
        self.stats.add_shared_tokens(trunk.num_sampled_tokens)
        try:
            return await self._continue(task, trunk, seed)
        finally:
            await close_in_any_case(trunk.close())

    async def _continue(self, task: Task, trunk: _Trunk, seed: int) -> TrajectoryGroup | DroppedGroup:
        point = trunk.point
        if point is None:
            detail = f"the dialogue ended ({trunk.end_reason}) before the turn that it was to branch at"
            return self.drop(task, "ended_before_branch", detail, lost=self._plan.continuations)
        trajectories = await self.play_all(partial(self._try_continuation, task, seed, trunk, point), task)
        return self.finish_group(task, trajectories, branch_turn=len(point.turns), branch_probability=trunk.probability)

    async def _play_trunk(self, task: Task, group_seed: int) -> _Trunk | Trajectory:
        """Play to the turn at which the group branches. Returns a failed trajectory if all tries failed."""
        retry = 0
        while True:
            # A retry keeps the env's seed; the sampler draws anew.
            attempt = Attempt(
                task_id=task.id,
                index=0,
                seed=world_seed(group_seed),
                make_env=lambda: self.world.make_env(task, world_seed(group_seed)),
                branch=Branch(turn=0, seed=derive_seed(group_seed, "trunk", retry)),
                labels=labels_of(self.world, task.id),
            )
            async with self.slots:
                trunk = await self._try_trunk(attempt, self.rules(task), derive_seed(group_seed, "turn", retry))
            if isinstance(trunk, _Trunk):
                return trunk
            if not self.may_retry(task, trunk, retry):
                return trunk
            retry += 1

    async def _try_trunk(self, attempt: Attempt, rules: RolloutConfig, turn_seed: int) -> _Trunk | Trajectory:
        probabilities_H = turn_probabilities(self._plan.turn, rules.max_turns, p=self._plan.p)
        player = Player(attempt, self.pick_sampler(), self.renderer, rules, self.stats)
        trunk = _Trunk(player=player, seed=attempt.seed)
        is_ready = False
        try:
            await self._run_trunk(trunk, probabilities_H, np.random.default_rng(turn_seed))
            is_ready = True
            return trunk
        except AttemptFailed as error:
            failure = self.stats.to_failure(error)
            trajectory = player.to_trajectory(EndReason.FAILED, failure)
            self.stats.add_try(trajectory)
            self.quarantine.record_try(failure)
            return trajectory
        finally:
            if not is_ready:
                await close_in_any_case(trunk.close())

    async def _run_trunk(self, trunk: _Trunk, probabilities_H: NDArray[np.float64], rng: np.random.Generator) -> None:
        """Play until turn h. Keep a savepoint in case the dialogue ends before it."""
        player = trunk.player
        wanted = int(rng.choice(len(probabilities_H), p=probabilities_H))
        await player.begin()
        end_reason = player.limit_reached()
        while end_reason is None and player.num_turns < wanted:
            turn = player.num_turns
            if self._plan.redraw and rng.random() * probabilities_H[: turn + 1].sum() < probabilities_H[turn]:
                await self._hold(trunk, await player.save(is_fork=True))
            end_reason = await player.turn() or player.limit_reached()
        trunk.num_sampled_tokens = player.num_sampled_tokens
        trunk.end_reason = end_reason
        if end_reason is None:
            await self._hold(trunk, await player.save(is_fork=False))
            trunk.probability = float(probabilities_H[wanted])
        elif trunk.point is not None:
            drawn = len(trunk.point.turns)
            trunk.probability = float(probabilities_H[drawn] / probabilities_H[: player.num_turns].sum())

    @staticmethod
    async def _hold(trunk: _Trunk, point: Savepoint) -> None:
        before, trunk.point = trunk.point, point
        if before is not None and before.parked is not None:
            await close_in_any_case(before.parked.close())

    async def _try_continuation(
        self, task: Task, group_seed: int, trunk: _Trunk, point: Savepoint, index: int, retry: int
    ) -> Trajectory:
        branch = Branch(turn=len(point.turns), seed=derive_seed(group_seed, index, retry), reseeds_env=True)
        attempt = Attempt(
            task_id=task.id,
            index=index,
            seed=trunk.seed,
            make_env=lambda: self.world.make_env(task, trunk.seed),
            branch=branch,
            labels=labels_of(self.world, task.id),
        )
        player = Player(attempt, self.pick_sampler(), self.renderer, self.rules(task), self.stats, point)
        return await play_to_the_end(player)


async def check_can_branch(world: World, limits: RolloutLimits, *, seed: int = 0) -> str:
    """Branch a short dialogue without a model, and check that copies of the env answer like the original.

    Returns how the world branches, `fork` or `replay`; raises `ConfigError` when it does neither.
    """
    task = world.tasks("train", 1, seed)[0]
    dialogues = world.demonstrations(1, seed)
    replies = [message for dialogue in dialogues for message in dialogue if message.role == "assistant"]
    replies = (replies or [assistant("Hello."), assistant("Yes."), assistant("Go on.")])[:CHECKED_TURNS]
    try:
        return await _ForkCheck(world, task, limits, seed).run(replies)
    except AttemptFailed as error:
        raise ConfigError(
            f"{world.name} cannot branch in the middle of an attempt: {error.detail}. Give the env a fork() that "
            "copies all of its state, or let everything in it follow from its task, its seed and the replies; or "
            "choose a method that plays attempts from the start, such as grpo"
        ) from error


class _ForkCheck:
    """Compares an env with a fresh copy of it at each of the first turns."""

    def __init__(self, world: World, task: Task, limits: RolloutLimits, seed: int) -> None:
        self._clock = Clock(limits.attempt_deadline_s)
        self._limits = limits
        self._make_env = lambda: world.make_env(task, seed)
        self._open: list[EnvCalls] = []

    async def run(self, replies: Sequence[Message]) -> str:
        try:
            return await self._run(replies)
        finally:
            for env in self._open:
                await close_in_any_case(env.close())

    async def _run(self, replies: Sequence[Message]) -> str:
        env = self._new()
        start = await env.start()
        answers: list[tuple[Message, ...]] = []
        for turn, reply in enumerate(replies):
            copy = self._new()
            if env.can_fork:
                await copy.start_as_fork(env)
            else:
                check_same_answer(-1, start, await copy.start())
                for earlier, said in enumerate(replies[:turn]):
                    check_same_answer(earlier, answers[earlier], tuple((await copy.step(said)).messages))
            check_same_state(await env.state_key(), await copy.state_key())
            step, again = await env.step(reply), await copy.step(reply)
            check_same_answer(turn, tuple(step.messages), tuple(again.messages))
            answers.append(tuple(step.messages))
            if step.is_over or again.is_over:
                break
        return "fork" if env.can_fork else "replay"

    def _new(self) -> EnvCalls:
        env = EnvCalls(self._make_env, self._limits, self._clock)
        self._open.append(env)
        return env
