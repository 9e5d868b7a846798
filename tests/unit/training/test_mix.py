"""Runs in several worlds: what they are made of, what a step and an evaluation say of each, and what stays fixed."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cases import for_each
from turnwise.client.fake import ScriptedSampler
from turnwise.config.files import load_config
from turnwise.envs.base import Task
from turnwise.envs.config import EnvConfig
from turnwise.envs.joint import JointWorld, leaf_of, leaves
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.models.facts import ModelFacts, read_facts
from turnwise.opponents.seating import two_sided
from turnwise.outcomes import OutcomeWorld
from turnwise.rollout.group import Rollout
from turnwise.runlog.reader import RunReader
from turnwise.training.assemble import Parts, assemble, held_out_tasks
from turnwise.training.evaluate import play_evaluation
from turnwise.training.objects import NO_OBJECTS, PythonObjects
from turnwise.training.policy import WorldChoice
from turnwise.training.task_order import MixedTasks, WorldTasks
from unit.training.conftest import CoinWorld, MakeRig, Rig

DOORS = ("env.mix={doors: {name: key_door, difficulty: 1, share: 3}, guess: {name: guess_number}}", "model=tiny")
SMALL = ("train.num_tasks=12", "eval.tasks=6", "warmup.steps=0")


@pytest.fixture(scope="module")
def facts(tiny_dir: Path) -> ModelFacts:
    return read_facts(tiny_dir)


def _assemble(facts: ModelFacts, *options: str, name: str = "mix") -> Parts:
    return assemble(load_config(name, [*options, *SMALL]), facts)


def test_a_world_holds_out_in_a_mix_what_it_holds_out_alone(facts: ModelFacts) -> None:
    mix = _assemble(facts, *DOORS)
    alone = _assemble(facts, "env.difficulty=1", "model=tiny", name="key_door")
    assert [task for task in mix.held_out if task.id.startswith("doors/")] == [
        Task(id=f"doors/{task.id}", data=task.data) for task in alone.held_out
    ]
    assert Counter(leaf_of(mix.world, task.id) for task in mix.held_out) == {"doors": 6, "guess": 6}


def test_no_group_trains_on_a_held_out_task_of_any_world(facts: ModelFacts) -> None:
    same = "env.mix={a: {name: key_door, difficulty: 0}, b: {name: key_door, difficulty: 0, options: {spare_turns: 1}}}"
    for options, name in ((DOORS, "mix"), ((same, "model=tiny"), "mix"), (("env.curriculum=true",), "key_door")):
        parts = _assemble(facts, *options, "model=tiny", name=name)
        world = parts.world
        assert isinstance(world, JointWorld)
        held_out = {key for task in parts.held_out for key in world.contents(task)}
        dealt = [parts.tasks.item(number) for number in range(60)]
        assert not held_out & {key for task in dealt for key in world.contents(task)}


def test_each_world_is_played_within_its_own_limits(facts: ModelFacts) -> None:
    parts = _assemble(facts, *DOORS)
    for task in parts.held_out:
        leaf = leaves(parts.world)[leaf_of(parts.world, task.id)]
        assert parts.rules(task).max_turns == parts.eval_rules(task).max_turns == leaf.max_turns
        assert parts.rules(task).max_tokens_per_turn == leaf.max_tokens
        assert parts.eval_rules(task).group_size == parts.config.eval.samples
    assert len({parts.rules(task).max_turns for task in parts.held_out}) == 2
    limited = _assemble(facts, *DOORS, "rollout.max_turns=3")
    assert {limited.rules(task).max_turns for task in limited.held_out} == {3}


def test_held_out_tasks_of_a_curriculum_are_those_of_its_goal_or_of_every_level(facts: ModelFacts) -> None:
    goal = _assemble(facts, "env.curriculum=true", "env.difficulty=2", "model=tiny", name="key_door")
    fixed = _assemble(facts, "env.difficulty=2", "model=tiny", name="key_door")
    assert [task.data for task in goal.held_out] == [task.data for task in fixed.held_out]
    assert {leaf_of(goal.world, task.id) for task in goal.held_out} == {"level2"}
    assert set(leaves(goal.world)) == {"level0", "level1", "level2"}
    every = _assemble(facts, "env.curriculum=true", "model=tiny", name="key_door")
    assert {leaf_of(every.world, task.id) for task in every.held_out} == set(leaves(every.world))


def test_playing_does_not_move_the_held_out_tasks(facts: ModelFacts) -> None:
    parts = _assemble(facts, "env.curriculum=true", "model=tiny", name="key_door")
    before = held_out_tasks(parts.config, parts.world)
    for number in range(50):
        parts.tasks.item(number)
        parts.tasks.count(number, [True])
    assert held_out_tasks(parts.config, parts.world) == before == parts.held_out


def _unknown(facts: ModelFacts, told: str, *options: str, name: str = "mix") -> None:
    with pytest.raises(ConfigError) as caught:
        _assemble(facts, *options, "model=tiny", name=name)
    assert told in str(caught.value)


def test_worlds_that_cannot_be_joined_are_refused_before_anything_is_spent(facts: ModelFacts) -> None:
    _unknown(facts, "no world 'no_such'", "env.mix=key_door,no_such")
    _unknown(facts, "gymnasium:Taxi-v4 has 0 levels", "env.curriculum=true", name="gymnasium:Taxi-v4")
    _unknown(facts, "difficulty=0 leaves the first one", "env.curriculum=true", "env.difficulty=0", name="key_door")
    _unknown(facts, "has the levels 0 to", "env.curriculum=true", "env.difficulty=99", name="key_door")
    _unknown(facts, "both set num_rooms", "env.curriculum=true", "env.options.num_rooms=2", name="key_door")
    _unknown(
        facts,
        "env.mix.talk.options.opponent=self is a model",
        "env.mix={talk: {name: negotiate, options: {opponent: self}}, key_door: }",
    )


def test_a_scripted_opponent_plays_in_a_mix(facts: ModelFacts) -> None:
    parts = _assemble(facts, "env.mix=key_door,tic_tac_toe", "model=tiny")
    assert two_sided(leaves(parts.world)["tic_tac_toe"]) is not None


def test_a_world_object_beside_a_mix_is_refused() -> None:
    config = load_config("mix", DOORS)
    with pytest.raises(ConfigError, match=r"env\.mix beside python:coin: both are worlds"):
        PythonObjects(env=CoinWorld()).make_world(config.env)


def test_warm_up_needs_scripts_of_every_world(facts: ModelFacts) -> None:
    silent = "env.mix={key_door: , slow: {name: 'turnwise.bench.slow_world:SlowWorld'}}"
    with pytest.raises(ConfigError, match="slow has no scripted dialogues to warm up with"):
        assemble(load_config("mix", [silent, "model=tiny", "warmup.steps=1"]), facts)


def _joint(rig: Rig, **parts: CoinWorld) -> Rig:
    """The rig's loop in several coins."""
    world = JointWorld(name="mix", kind="world", parts=parts, sources={name: name for name in parts})
    plain = rig.parts

    def make() -> Parts:
        own = plain()
        orders = {
            name: WorldTasks([world.joint_task(name, task) for task in part.tasks("train", 6, 0)], 2, 0)
            for name, part in parts.items()
        }
        held_out = [world.joint_task(name, task) for name, part in parts.items() for task in part.tasks("test", 3, 0)]
        return replace(own, world=world, tasks=MixedTasks(orders, dict.fromkeys(parts, 1.0)), held_out=tuple(held_out))

    rig.parts = make  # type: ignore[method-assign]
    return rig


def _run(rig: Rig) -> RunReader:
    loop = rig.loop()
    asyncio.run(loop.run())
    rig.writer.close()
    return rig.run()


def test_a_run_says_of_every_attempt_and_every_step_which_world_it_was(make_rig: MakeRig) -> None:
    rig = _joint(make_rig({"train": {"steps": 3}}), fair=CoinWorld(), won=CoinWorld(is_easy=True))
    with _run(rig) as run:
        for row in run.attempts():
            world = run.stored_dialogue(row.id).labels["world"]
            assert row.task_id.startswith(f"{world}/")
        for name in ("fair", "won"):
            assert [value for _, value in run.metric(f"world/groups_{name}")] == [1.0, 1.0, 1.0]
            rows = [row for row in run.attempts(phase="train", step=1) if row.task_id.startswith(f"{name}/")]
            assert run.metric(f"world/success_{name}")[0][1] == sum(row.is_success is True for row in rows) / len(rows)
            assert run.metric(f"world/turns_{name}")[0][1] == 1.0
        assert {row.outcome for row in run.attempts(phase="train") if row.task_id.startswith("won/")} == {"constant"}


class SaysYes:
    """Stands for an outcome model to which every attempt is a success."""

    async def score(self, conversations: Sequence[Any]) -> list[float]:
        return [1.0 for _ in conversations]

    def cuts(self, conversation: Any) -> bool:  # noqa: ARG002
        return False


def test_a_mix_says_of_each_world_how_often_outcome_model_and_verifier_agree(make_rig: MakeRig) -> None:
    model = cast(Any, SaysYes())
    fair, won = (OutcomeWorld(inner=coin, model=model) for coin in (CoinWorld(), CoinWorld(is_easy=True)))
    rig = _joint(make_rig({"train": {"steps": 3}}), fair=cast(Any, fair), won=cast(Any, won))
    with _run(rig) as run:
        assert run.metric("world/outcome_agreement_fair") == run.metric("world/success_fair")
        assert [value for _, value in run.metric("world/outcome_agreement_won")] == [1.0] * 3
        assert run.metric("world/success_fair")[0][1] < 1


def test_an_evaluation_gives_each_world_and_their_plain_mean(make_rig: MakeRig) -> None:
    rig = _joint(make_rig({"train": {"steps": 1}}), fair=CoinWorld(), won=CoinWorld(is_easy=True))
    with _run(rig) as run:
        (fair, *_), (won, *_) = ([value for _, value in run.metric(f"world/eval_success_{n}")] for n in ("fair", "won"))
        row = run.evaluations()[0]
        assert won == 1.0
        assert row.success == pytest.approx((fair + won) / 2)
        assert row.success_low < row.success <= row.success_high <= 1.0
        assert (row.num_tasks, row.num_attempts) == (6, 6)


def test_a_world_in_which_every_attempt_fails_leaves_no_mean_of_the_others(make_rig: MakeRig) -> None:
    rig, parts = make_rig({}), {"won": CoinWorld(is_easy=True), "broken": CoinWorld(is_broken=True)}
    world = JointWorld(name="mix", kind="world", parts=parts, sources={name: name for name in parts})
    tasks = [world.joint_task(name, task) for name, part in parts.items() for task in part.tasks("test", 3, 0)]
    sampler = ScriptedSampler(lambda _: [7, rig.renderer.stop_ids[0]])
    rollout = Rollout(world, sampler, rig.renderer, rig.parts().eval_rollout)
    evaluation = asyncio.run(play_evaluation(rollout, tasks, seed=0, label="step", step=1))
    assert evaluation.by_world["won"].success == 1.0
    assert evaluation.by_world["broken"].num_attempts == 0
    assert (evaluation.row.num_attempts, evaluation.row.num_failed) == (3, 3)
    assert math.isnan(evaluation.row.success)
    assert math.isnan(evaluation.row.reward), "so it is never the best checkpoint"


@for_each(
    ("name", "options"),
    [("mix", DOORS), ("key_door", ("env.curriculum=true", "env.curriculum_window=4", "env.difficulty=2"))],
)
def test_a_policy_is_measured_in_another_world_without_levels_and_options_of_its_own(
    name: str, options: tuple[str, ...]
) -> None:
    config, _ = WorldChoice(name="calculator").apply(load_config(name, options), NO_OBJECTS, [])
    assert config.env == EnvConfig(name="calculator")


def test_a_curriculum_in_a_world_without_verdicts_is_refused(make_rig: MakeRig) -> None:
    class Silent(CoinWorld):
        def make_env(self, task: Task, seed: int) -> Any:
            env = super().make_env(task, seed)
            step = env.step

            class Env:
                start, close = env.start, env.close

                async def step(self, reply: Any) -> Any:
                    return replace(await step(reply), is_success=None)

            return Env()

    rig = make_rig({"train": {"steps": 1}, "eval": {"tasks": 0}})
    world = JointWorld(name="coin", kind="level", parts={"level0": Silent()}, sources={"level0": "coin"})
    plain = rig.parts
    order = WorldTasks([world.joint_task("level0", task) for task in Silent().tasks("train", 4, 0)], 2, 0)
    rig.parts = lambda: replace(plain(), world=world, tasks=order)  # type: ignore[method-assign]
    with pytest.raises(TurnwiseError, match="without saying whether it succeeded"):
        asyncio.run(rig.loop().run())


def test_the_plan_names_the_worlds_and_their_shares(facts: ModelFacts) -> None:
    from turnwise.training.setup import NEW_RUN, Setup

    parts = _assemble(facts, *DOORS)
    setup = Setup(config=parts.config, directory=Path("runs/x"), start=NEW_RUN, facts=facts, parts=parts)
    lines = setup.plan_lines()
    assert any("doors (key_door) 75%, level 1; guess (guess_number) 25% of the groups" in line for line in lines)


def test_a_curriculums_state_survives_the_checkpoints_json(facts: ModelFacts) -> None:
    parts = _assemble(facts, "env.curriculum=true", "model=tiny", name="key_door")
    for number in range(10):
        parts.tasks.item(number)
    state = parts.tasks.to_state(8)
    other = _assemble(facts, "env.curriculum=true", "model=tiny", name="key_door")
    other.tasks.restore(json.loads(json.dumps(state)))
    assert [other.tasks.item(number) for number in (8, 9, 10, 11)] == [
        parts.tasks.item(number) for number in (8, 9, 10, 11)
    ]


def test_an_ordinary_world_is_made_as_ever() -> None:
    world = NO_OBJECTS.make_world(load_config("key_door").env)
    assert not isinstance(world, JointWorld)
