"""Branches: one dialogue to turn h, then continuations from exactly there, by fork or by replay; or a refusal."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.credit.branching import turn_probabilities
from turnwise.envs.base import EnvStep, Task, user
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError, Party
from turnwise.renderers.base import Renderer
from turnwise.rollout import play_groups
from turnwise.rollout.branch import BranchRollout, check_can_branch
from turnwise.rollout.group import RolloutEvent, RolloutResult
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.replay import replay
from turnwise.rollout.sources import PlayBranches
from turnwise.trajectory import Message, TrajectoryGroup
from turnwise.types import SampledSequence, SamplingParams
from unit.rollout.worlds import World, make_tasks, quick

pytestmark = pytest.mark.usefixtures("no_leaks")

LIMITS = RolloutLimits(max_turns=8, max_tokens_per_turn=256, max_trajectory_tokens=4096)


class NoisyEnv:
    """Says numbers that follow from its seed and from what it was told; ends after `num_turns` replies."""

    def __init__(self, world: Any, seed: int, num_turns: int = 6) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.seeds = [seed]
        self.num_turns = num_turns
        self.heard: list[str] = []
        self.num_closed = 0

    async def start(self) -> list[Message]:
        return [user(f"Begin with {self.random.randrange(1000)}.")]

    async def step(self, reply: Message) -> EnvStep:
        self.heard.append(reply.content)
        noise = self.random.randrange(1000)
        is_last = len(self.heard) >= self.num_turns
        return EnvStep(messages=[user(f"{noise} after {reply.content}")], reward=noise / 1000, terminated=is_last)

    async def close(self) -> None:
        self.num_closed += 1

    def state_key(self) -> str:
        return f"{self.heard} {self.random.getstate()[1][-1]}"

    def reseed(self, seed: int) -> None:
        self.random.seed(seed)
        self.seeds.append(seed)


class ForkingEnv(NoisyEnv):
    def fork(self) -> ForkingEnv:
        twin = copy.copy(self)
        twin.random, twin.heard, twin.seeds = copy.deepcopy(self.random), list(self.heard), list(self.seeds)
        twin.num_closed = 0
        self.world.envs.append(twin)
        return twin


class ThreadedForkingEnv:
    """The same with plain methods, which run in a thread."""

    def __init__(self, inner: ForkingEnv) -> None:
        self.inner = inner

    def start(self) -> list[Message]:
        return asyncio.run(self.inner.start())

    def step(self, reply: Message) -> EnvStep:
        return asyncio.run(self.inner.step(reply))

    def close(self) -> None:
        asyncio.run(self.inner.close())

    def state_key(self) -> str:
        return self.inner.state_key()

    def fork(self) -> ThreadedForkingEnv:
        return ThreadedForkingEnv(self.inner.fork())


class SeededSampler(ScriptedSampler):
    """Says a number that follows from the seed it is given."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__([])
        self.renderer = renderer
        self.seeds: list[int | None] = []

    def _sequence(self, prompt_ids: list[int], params: SamplingParams) -> SampledSequence:  # noqa: ARG002
        self.seeds.append(params.seed)
        ids = self.renderer.encode_reply(Message(role="assistant", content=str((params.seed or 0) % 1000)))
        return SampledSequence("stop", list(ids), [-0.5 - (params.seed or 0) % 7 for _ in ids])


def make_world(kind: type[NoisyEnv], **options: Any) -> World:
    world = World(lambda _, seed: kind(world, seed, **options))
    return world


async def branch(world: World, renderer: Renderer, tasks: int = 6, seed: int = 0, **fields: Any) -> RolloutResult:
    names = [name for name in ("turn", "p", "redraw") if name in fields]
    plan = PlayBranches(continuations=fields.pop("continuations", 3), **{name: fields.pop(name) for name in names})
    config = quick(**{"max_turns": 5, **fields})
    rollout = BranchRollout(world, SeededSampler(renderer), renderer, config, plan=plan)
    return await rollout.play(make_tasks(tasks), seed=seed)


def assert_shares_its_prefix(group: TrajectoryGroup) -> None:
    """Same start, same turns before h to the last id and logprob, and the same prompt and env state at turn h."""
    turn, first = group.branch_turn, group.trajectories[0]
    assert turn is not None
    for trajectory in group.trajectories:
        assert trajectory.start == first.start
        assert trajectory.seed == first.seed
        assert trajectory.turns[:turn] == first.turns[:turn]
        assert trajectory.turns[turn].prompt_ids == first.turns[turn].prompt_ids
        assert trajectory.branch is not None
        assert trajectory.branch.turn == turn


@pytest.mark.parametrize("kind", [ForkingEnv, NoisyEnv], ids=["fork", "replay"])
async def test_t14_continuations_share_every_id_before_the_branch_and_draw_differently_after_it(
    renderer: Renderer, kind: type[NoisyEnv]
) -> None:
    world = make_world(kind)
    result = await branch(world, renderer, tasks=24)
    assert len(result.groups) == 24
    assert {group.branch_turn for group in result.groups} == {0, 1, 2, 3, 4}
    for group in result.groups:
        assert_shares_its_prefix(group)
        turn = group.branch_turn or 0
        own = [trajectory.turns[turn] for trajectory in group.trajectories]
        assert len({one.sampled_ids for one in own}) == 3, "each continuation has a sampler seed of its own"
        assert len({one.observation for one in own}) == 3
        assert len({t.branch.seed for t in group.trajectories if t.branch is not None}) == 3
    assert all(env.num_closed == 1 for env in world.envs)


@pytest.mark.parametrize("kind", [ForkingEnv, NoisyEnv], ids=["fork", "replay"])
async def test_t14_the_env_goes_on_with_a_seed_of_its_own_in_each_continuation(
    renderer: Renderer, kind: type[NoisyEnv]
) -> None:
    world = make_world(kind)
    result = await branch(world, renderer, tasks=1, continuations=4)
    reseeded = [env.seeds for env in world.envs if len(env.seeds) > 1]
    assert len(reseeded) == 4
    assert len({tuple(seeds) for seeds in reseeded}) == 4
    assert len({seeds[0] for seeds in reseeded}) == 1, "and all had begun with the same one"
    assert sorted(seeds[1] for seeds in reseeded) == sorted(
        t.branch.seed for t in result.groups[0].trajectories if t.branch is not None
    )


async def test_each_task_branches_within_its_own_limits(renderer: Renderer) -> None:
    plan, tasks = PlayBranches(continuations=2), make_tasks(12)
    rollout = BranchRollout(make_world(ForkingEnv), SeededSampler(renderer), renderer, quick(max_turns=5), plan=plan)
    limits = {task.id: 2 if index % 2 else 5 for index, task in enumerate(tasks)}
    rollout.rules = lambda task: rollout.config.model_copy(update={"max_turns": limits[task.id]})
    result = await rollout.play(tasks, seed=0)
    assert len(result.groups) == 12, "no dialogue ends before its turn"
    for group in result.groups:
        assert {len(trajectory.turns) for trajectory in group.trajectories} == {limits[group.task_id]}


async def test_an_env_with_plain_methods_branches_too(renderer: Renderer) -> None:
    world = World(lambda _, seed: ThreadedForkingEnv(ForkingEnv(holder, seed)))
    holder = World()
    result = await branch(world, renderer, tasks=4)
    assert len(result.groups) == 4
    for group in result.groups:
        assert_shares_its_prefix(group)
    assert all(env.num_closed == 1 for env in [*holder.envs, *(env.inner for env in world.envs)])


async def test_the_shared_dialogue_is_sampled_once_and_counted_once(renderer: Renderer) -> None:
    world, sampler = make_world(ForkingEnv), SeededSampler(renderer)
    plan = PlayBranches(continuations=3)
    rollout = BranchRollout(world, sampler, renderer, quick(max_turns=5), plan=plan)
    result = await rollout.play(make_tasks(6), seed=0)
    shared = sum(group.branch_turn or 0 for group in result.groups)
    own = sum(5 - (group.branch_turn or 0) for group in result.groups) * 3
    assert len(sampler.prompts) == shared + own
    tokens = sum(
        len(turn.sampled_ids)
        for group in result.groups
        for index, trajectory in enumerate(group.trajectories)
        for turn in trajectory.turns[0 if index == 0 else group.branch_turn :]
    )
    assert result.stats.metrics()["rollout/sampled_tokens"] == tokens


async def test_the_turn_is_drawn_as_planned(renderer: Renderer) -> None:
    result = await branch(make_world(ForkingEnv), renderer, tasks=120, turn="geometric", p=0.5, continuations=2)
    counts = Counter(group.branch_turn for group in result.groups)
    probabilities = turn_probabilities("geometric", 5, p=0.5)
    for turn, probability in enumerate(probabilities):
        assert abs(counts[turn] / 120 - probability) < 4 * (probability * (1 - probability) / 120) ** 0.5
    for group in result.groups:
        assert group.branch_turn is not None
        assert group.branch_probability == pytest.approx(probabilities[group.branch_turn])


@pytest.mark.parametrize("kind", [ForkingEnv, NoisyEnv], ids=["fork", "replay"])
async def test_a_dialogue_that_ends_early_branches_at_one_of_the_turns_it_had(
    renderer: Renderer, kind: type[NoisyEnv]
) -> None:
    """Two turns of five: what is drawn beyond is drawn again, so both turns come equally often."""
    world = make_world(kind, num_turns=2)
    result = await branch(world, renderer, tasks=80, continuations=2)
    assert len(result.groups) == 80
    counts = Counter(group.branch_turn for group in result.groups)
    assert set(counts) == {0, 1}
    assert abs(counts[0] - 40) < 4 * 20**0.5
    assert {round(group.branch_probability, 6) for group in result.groups} == {0.2, 0.5}
    for group in result.groups:
        assert_shares_its_prefix(group)
    assert all(env.num_closed == 1 for env in world.envs)


async def test_without_redrawing_a_dialogue_that_ends_early_is_dropped_and_counted(renderer: Renderer) -> None:
    result = await branch(make_world(ForkingEnv, num_turns=2), renderer, tasks=60, redraw=False)
    why = Counter(dropped.why for dropped in result.dropped)
    assert set(why) == {"ended_before_branch"}
    assert len(result.groups) + len(result.dropped) == 60
    assert 20 < len(result.dropped) < 50
    assert result.stats.metrics()["rollout/dropped_ended_before_branch"] == 3 * len(result.dropped)
    assert {round(group.branch_probability, 6) for group in result.groups} == {0.2}


async def test_the_same_seed_gives_the_same_branches_whatever_runs_beside_them(renderer: Renderer) -> None:
    def rewards(result: RolloutResult) -> list[Any]:
        return [(group.task_id, group.branch_turn, group.rewards) for group in result.groups]

    first = rewards(await branch(make_world(ForkingEnv), renderer, seed=3))
    assert rewards(await branch(make_world(ForkingEnv), renderer, seed=3, max_concurrency=1)) == first
    assert rewards(await branch(make_world(NoisyEnv), renderer, seed=3)) == first, "by replay as by fork"
    assert rewards(await branch(make_world(ForkingEnv), renderer, seed=4)) != first


class ForgetfulEnv(NoisyEnv):
    """Draws on something other than its seed."""

    fresh = itertools.count()

    async def step(self, reply: Message) -> EnvStep:
        step = await super().step(reply)
        return EnvStep(messages=[user(f"{next(self.fresh)}")], reward=step.reward, terminated=step.terminated)


class ShallowEnv(NoisyEnv):
    """Its fork hears what the original heard, and begins anew."""

    def fork(self) -> ShallowEnv:
        return ShallowEnv(self.world, self.seeds[0])


async def test_t14_a_copy_in_another_state_fails_its_attempt_and_is_never_scored(renderer: Renderer) -> None:
    for kind, says in ((ShallowEnv, "state_key() is"), (ForgetfulEnv, "does not go the same way again")):
        result = await branch(make_world(kind), renderer, tasks=8)
        assert all(group.branch_turn == 0 for group in result.groups)
        failed = [trajectory for dropped in result.dropped for trajectory in dropped.failed]
        assert failed
        assert {trajectory.failure.party for trajectory in failed if trajectory.failure} == {Party.ENV}
        assert all(says in trajectory.failure.detail for trajectory in failed if trajectory.failure)


async def test_a_world_that_cannot_branch_is_refused_before_anything_is_played() -> None:
    with pytest.raises(ConfigError, match=r"test cannot branch in the middle of an attempt: .*Give the env a fork\(\)"):
        await check_can_branch(make_world(ForgetfulEnv), LIMITS)
    with pytest.raises(ConfigError, match="state_key"):
        await check_can_branch(make_world(ShallowEnv), LIMITS)


async def test_a_world_that_can_branch_says_how() -> None:
    worlds = [make_world(ForkingEnv), make_world(NoisyEnv)]
    assert [await check_can_branch(world, LIMITS) for world in worlds] == ["fork", "replay"]
    assert all(env.num_closed == 1 for world in worlds for env in world.envs)
    assert await check_can_branch(get_world("key_door"), LIMITS) == "fork"


async def test_a_failed_continuation_is_played_again_from_the_same_point(renderer: Renderer) -> None:
    class FragileEnv(ForkingEnv):
        num_failures = 0

        async def step(self, reply: Message) -> EnvStep:
            if len(self.seeds) > 1 and FragileEnv.num_failures < 2:
                FragileEnv.num_failures += 1
                raise RuntimeError("the sandbox died")
            return await super().step(reply)

    events: list[RolloutEvent] = []
    world = make_world(FragileEnv)
    config, plan = quick(max_turns=5, max_retries=2), PlayBranches(continuations=3)
    rollout = BranchRollout(world, SeededSampler(renderer), renderer, config, plan=plan)
    rollout.on_event = events.append
    result = await rollout.play(make_tasks(1), seed=1)
    (group,) = result.groups
    assert len(group.trajectories) == 3
    assert_shares_its_prefix(group)
    assert [event.kind for event in events].count("attempt_retried") == 2
    assert all(env.num_closed == 1 for env in world.envs)


async def test_a_continuation_that_stays_failed_is_apart_and_the_others_are_a_group(renderer: Renderer) -> None:
    class DoomedEnv(ForkingEnv):
        doomed: int | None = None

        async def step(self, reply: Message) -> EnvStep:
            if len(self.seeds) > 1:
                DoomedEnv.doomed = self.seeds[1] if DoomedEnv.doomed is None else DoomedEnv.doomed
                if self.seeds[1] == DoomedEnv.doomed:
                    raise RuntimeError("the sandbox died")
            return await super().step(reply)

    result = await branch(make_world(DoomedEnv), renderer, tasks=1)
    (group,) = result.groups
    assert (len(group.trajectories), len(group.failed)) == (2, 1)
    assert_shares_its_prefix(group)


async def test_cancelling_closes_every_env(renderer: Renderer) -> None:
    class SlowEnv(ForkingEnv):
        async def step(self, reply: Message) -> EnvStep:
            await asyncio.sleep(0.02)
            return await super().step(reply)

    world = make_world(SlowEnv)
    rollout = asyncio.create_task(branch(world, renderer, tasks=5))
    while len(world.envs) < 9:
        await asyncio.sleep(0.005)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert all(env.num_closed == 1 for env in world.envs)


async def test_a_branched_attempt_replays_exactly(renderer: Renderer) -> None:
    world = make_world(ForkingEnv)
    result = await branch(world, renderer, tasks=3)
    for group in result.groups:
        for trajectory in group.trajectories:
            again = await replay(world, Task(id=group.task_id), trajectory, renderer, quick(max_turns=5))
            assert again.is_exact, again.lines()


async def test_attempts_in_the_same_world_differ_by_what_the_policy_says_alone(renderer: Renderer) -> None:
    world = make_world(NoisyEnv)
    config = quick(max_turns=3)
    result = await play_groups(world, make_tasks(2), SeededSampler(renderer), renderer, config, seed=0)
    assert len(set(world.seeds)) == 2, "one per task"
    for group in result.groups:
        assert len({trajectory.turns[0].prompt_ids for trajectory in group.trajectories}) == 1
        assert len({trajectory.turns[0].sampled_ids for trajectory in group.trajectories}) == 4
        assert len({trajectory.turns[0].reward for trajectory in group.trajectories}) == 1, "the env drew the same"
    again = await replay(world, Task(id=result.groups[0].task_id), result.groups[0].trajectories[2], renderer, config)
    assert again.is_exact, again.lines()
