"""What a batch is made of, played as in a run: who starts in which world, and what a method makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.client.publish import VersionedSampler
from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.envs.registry import get_world
from turnwise.methods.base import datums_of
from turnwise.renderers import Renderer
from turnwise.rollout.group import Rollout
from turnwise.rollout.replay import replay
from turnwise.training.assemble import Parts
from turnwise.training.checkpoint import RunState
from turnwise.training.evaluate import evaluate
from turnwise.training.supply import Batch, Supply
from turnwise.trajectory import Message, TrajectoryGroup
from turnwise.types import SampledSequence, SamplingParams
from turnwise.watch.watchdog import Watchdog
from unit.training.conftest import MakeRig

BARGAIN = get_world("bargain")


class DigitSampler(ScriptedSampler):
    """Says a digit that follows from the seed it is given."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__([])
        self._renderer = renderer

    def _sequence(self, prompt_ids: list[int], params: SamplingParams) -> SampledSequence:  # noqa: ARG002
        ids = self._renderer.encode_reply(Message(role="assistant", content=str(1 + (params.seed or 0) % 9)))
        return SampledSequence("stop", list(ids), [-0.5] * len(ids))


@dataclass
class TestWorld:
    """Envs from a function of task and seed; keeps count of them."""

    __test__ = False

    make: Callable[[Task, int], Any]
    name: str = "test"
    max_turns: int = 4
    max_tokens: int = 4
    made: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(task, seed) of every env."""

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:
        return BARGAIN.tasks(split, count, seed)

    def make_env(self, task: Task, seed: int) -> Any:
        self.made.append((task.id, seed))
        return self.make(task, seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class SumEnv:
    """Worth what the digits of its replies add up to."""

    def __init__(self, num_turns: int, first: str = "go") -> None:
        self._num_left = num_turns
        self._first = first
        self._sum = 0

    async def start(self) -> Sequence[Message]:
        return [user(self._first)]

    async def step(self, reply: Message) -> EnvStep:
        self._num_left -= 1
        self._sum += int(reply.content)
        if self._num_left:
            return EnvStep(messages=[user("on")])
        return EnvStep(reward=float(self._sum), terminated=True, is_success=self._sum > 10)

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    parts: Parts
    batches: list[Batch]

    @property
    def groups(self) -> list[TrajectoryGroup]:
        return [group for batch in self.batches for group in batch.played.groups]


@pytest.fixture
def play(make_rig: MakeRig, renderer: Renderer) -> Any:
    async def play(world: Any, method: dict[str, Any], *, num_batches: int = 2, **sections: Any) -> Played:
        train = {"steps": num_batches, "tasks_per_step": 6, **sections.pop("train", {})}
        generator = {"group_size": 6, "same_start": True, **sections.pop("rollout", {})}
        rig = make_rig({"train": train, "rollout": generator, "method": method, **sections})
        rig.world = world
        supply = Supply(rig.parts(), renderer, Watchdog())
        sampler = VersionedSampler(DigitSampler(renderer), 0)
        supply.open(sampler, 0, RunState(), num_batches)
        batches: list[Batch] = []
        for step in range(num_batches):
            batches.append(await supply.batch(step))
            supply.learned(num_batches)
        await supply.close()
        return Played(parts=rig.parts(), batches=batches)

    return play


def moods(group: TrajectoryGroup) -> set[float]:
    return {trajectory.metrics["glad"] for trajectory in group.trajectories}


def total_weight(parts: Parts, batch: Batch) -> float:
    lessons = parts.method.lessons(batch.items)
    return sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in datums_of(lessons))


async def test_on_bargain_a_group_meets_one_mood_whatever_the_method_and_groups_meet_both(
    play: Any, renderer: Renderer
) -> None:
    worlds: dict[str, list[tuple[str, int]]] = {}
    for name in ("grpo", "gigpo", "rebn", "ppo", "rft", "dpo", "la_grpo", "refuel"):
        played = await play(BARGAIN, {"name": name})
        assert all(len(moods(group)) == 1 for group in played.groups), name
        assert {mood for group in played.groups for mood in moods(group)} == {0.0, 1.0}, name
        assert all(len({t.turns[-1].sampled_ids for t in group.trajectories}) > 1 for group in played.groups), name
        worlds[name] = [(group.task_id, group.trajectories[0].seed) for group in played.groups]
        config = played.parts.rollout
        task = next(task for task in played.batches[0].tasks if task.id == played.groups[0].task_id)
        for trajectory in played.groups[0].trajectories:
            again = await replay(BARGAIN, task, trajectory, renderer, config)
            assert again.is_exact, again.lines()
    assert all(met == worlds["grpo"] for met in worlds.values()), "every method learns in the same worlds"


async def test_each_attempt_may_draw_a_world_of_its_own_and_an_evaluation_always_does(
    play: Any, renderer: Renderer
) -> None:
    played = await play(BARGAIN, {"name": "grpo"}, rollout={"same_start": False})
    assert max(len(moods(group)) for group in played.groups) == 2
    assert all(t.branch is None for group in played.groups for t in group.trajectories)
    shared = (await play(BARGAIN, {"name": "grpo"}, eval={"samples": 16})).parts
    assert (shared.rollout.same_start, shared.eval_rollout.same_start) == (True, False)
    found = await evaluate(
        {"": Rollout(BARGAIN, DigitSampler(renderer), renderer, shared.eval_rollout)},
        shared.held_out,
        seed=0,
        label="",
        step=0,
    )
    assert all(len(moods(group)) == 2 for group in found.played.groups)


async def test_an_attempt_that_is_played_again_stays_in_its_groups_world(play: Any) -> None:
    for name in ("grpo", "la_grpo"):
        count = itertools.count()

        def make(task: Task, seed: int, count: Any = count) -> Any:
            if next(count) % 3 == 0:
                raise OSError("the sandbox died")
            return BARGAIN.make_env(task, seed)

        world = TestWorld(make)
        played = await play(world, {"name": name}, num_batches=1, rollout={"max_retries": 10})
        assert played.batches[0].played.stats.metrics()["rollout/retries"] > 0
        assert len(played.groups) == 6
        assert {(group.task_id, t.seed) for group in played.groups for t in group.trajectories} == set(world.made)
        assert len(set(world.made)) == 6, "one world per group"


async def test_a_dialogue_of_t_turns_weighs_t_times_as_much_when_divided_by_the_probability(play: Any) -> None:
    """H = 4: a dialogue of T turns is branched in T of 4 cases, and then weighs 4."""
    method = {"name": "la_grpo", "divide_by_probability": True}
    for num_turns in (1, 2, 4):
        for normalisation in ("token_mean", "seq_mean", "turn_mean", "prompt_mean"):
            world = TestWorld(lambda *_, num_turns=num_turns: SumEnv(num_turns))
            played = await play(
                world, {**method, "normalisation": normalisation}, num_batches=8, train={"num_tasks": 64}
            )
            totals = []
            for batch in played.batches:
                assert {dropped.why for dropped in batch.played.dropped} <= {"ended_before_branch"}
                assert len(batch.played.groups) + len(batch.played.dropped) == 6
                totals.append(total_weight(played.parts, batch))
                assert totals[-1] == pytest.approx(4 * len(batch.played.groups) / 6)
            assert fmean(totals) == pytest.approx(num_turns, rel=0.35), (num_turns, normalisation)


async def test_refuel_pairs_all_continuations_that_it_was_told_to_play_each_with_one_other(play: Any) -> None:
    played = await play(TestWorld(lambda *_: SumEnv(3)), {"name": "refuel"}, num_batches=1)
    (batch,) = played.batches
    assert {len(group.trajectories) for group in batch.played.groups} == {6}
    sides = [
        (lesson.trajectory.task_id, lesson.trajectory.attempt) for lesson in played.parts.method.lessons(batch.items)
    ]
    assert len(set(sides)) == len(sides), "no attempt is in two pairs"
    pairs = list(zip(sides[0::2], sides[1::2], strict=True))
    assert all(task == other and {a // 2} == {b // 2} for (task, a), (other, b) in pairs), "whatever they got"
    assert len(pairs) > len(batch.played.groups), "more than the best against the worst"


async def test_a_group_whose_starts_differ_is_dropped_from_dpo_and_counted(play: Any) -> None:
    count = itertools.count()

    def make(task: Task, _: int) -> SumEnv:
        is_odd = task.id == min(task.id for task in BARGAIN.tasks("train", 6, 0))
        return SumEnv(2, first=f"go {next(count)}" if is_odd else "go")

    played = await play(TestWorld(make), {"name": "dpo"}, num_batches=1)
    (batch,) = played.batches
    assert batch.kept.dropped["different_starts"] == 1
    assert len(batch.kept.groups) >= 4
    assert played.parts.method.lessons(batch.items), "the others are learned from"
