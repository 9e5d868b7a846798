"""Experiments of ScienceWorld, in its own Java process."""

from __future__ import annotations

import asyncio
import shutil

import pytest

scienceworld = pytest.importorskip("scienceworld", reason="run by tests/contract/test_java_packages.py")

from attempts import play, said  # noqa: E402 - after the check that the library is there
from turnwise.envs.adapters.scienceworld import ScienceWorldWorld, experiment_names  # noqa: E402
from turnwise.envs.base import assistant  # noqa: E402
from turnwise.envs.check import check_env  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

PATIENT_S = 120.0
SHORT = "find-living-thing"


def test_an_experiment_keeps_the_rules_and_its_gold_path_solves_it() -> None:
    report = check_env(get_world(f"scienceworld:{SHORT}"), num_tasks=2, deadline_s=PATIENT_S)
    assert report.is_ok, report


async def test_the_gold_path_succeeds_and_the_rewards_add_up_to_one() -> None:
    world = ScienceWorldWorld(SHORT)
    (task,) = world.tasks("test", 1, 0)
    player = world.expert(task)
    start, steps = await play(world, [player(()) for _ in range(60)], task)
    assert "Your task is to find a" in start[1].content
    assert steps[-1].is_success
    assert sum(step.reward_parts["outcome"] for step in steps) == pytest.approx(1.0)


async def test_the_wrong_focus_ends_it_and_a_reset_does_not_reach_the_simulator() -> None:
    world = ScienceWorldWorld(SHORT)
    (task,) = world.tasks("train", 1, 0)
    _, steps = await play(world, ["reset task", "focus on agent"], task)
    assert [step.is_unparsable for step in steps] == [True, False]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, False)


async def test_attempts_beside_each_other_hear_what_each_hears_alone() -> None:
    """Of several levels, started at the same time; animals wander by the simulator's global random numbers."""
    worlds = [ScienceWorldWorld("find-animal", simplifications=level) for level in ("easy", "", "openDoors")]
    tasks = worlds[0].tasks("train", 3, 0)
    commands = ["go to outside", "look around", "wait", "open door to kitchen", "look around", "wait", "look around"]
    alone = [said((await play(world, commands, task))[1]) for world, task in zip(worlds, tasks, strict=True)]
    envs = [world.make_env(task, 0) for world, task in zip(worlds, tasks, strict=True)]
    try:
        await asyncio.gather(*(env.start() for env in envs))
        beside: list[list[str]] = [[] for _ in envs]
        for command in commands:
            for place, env in enumerate(envs):
                beside[place] += said([await env.step(assistant(command))])
    finally:
        for env in envs:
            await env.close()
    assert beside == alone


def test_the_splits_are_the_packages_and_share_no_variation() -> None:
    world = ScienceWorldWorld(SHORT)
    train, held_out = ({task.id for task in world.tasks(split, 400, 0)} for split in ("train", "test"))
    assert train
    assert held_out
    assert not train & held_out


def test_without_java_the_world_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    with pytest.raises(ConfigError, match=r"no `java` was found.*default-jre-headless"):
        get_world(f"scienceworld:{SHORT}")


def test_an_unknown_experiment_is_refused_with_the_nearest_name() -> None:
    assert len(experiment_names()) == 30
    with pytest.raises(ConfigError, match="did you mean 'boil'"):
        get_world("scienceworld:boill")


def test_a_misspelt_simplification_is_refused_and_so_is_one_that_the_experiment_forbids() -> None:
    with pytest.raises(ConfigError, match=r"simplifications='openDoor'; did you mean 'openDoors'\?"):
        ScienceWorldWorld(SHORT, simplifications="easy,openDoor")
    with pytest.raises(ConfigError, match="power-component needs electrical actions"):
        ScienceWorldWorld("power-component", simplifications="noElectricalAction")
