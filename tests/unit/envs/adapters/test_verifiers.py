"""Needs verifiers (144 MB with what it drags in), which is in the extra `adapters` and not in `dev`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="run by tests/contract/test_adapters_packages.py")

from fastapi import FastAPI

from attempts import play
from local_server import serving
from turnwise.envs.base import assistant
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError, DataError

SUMS = """\
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def correct(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break":
            raise RuntimeError("the scorer is broken")
        return 2.0 * (trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    first: int = 0
    num_tasks: int = 40


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + self.config.num_tasks):
            data = SumData(prompt=f"{n} + 1 =", system_prompt="Say the sum.", answer=str(n + 1))
            yield SumTask(data, self.config.task)
"""
TEACHER = (
    SUMS
    + '''

class TeacherEnvConfig(vf.EnvConfig):
    pupil: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()
    asks_both: bool = False


class TeacherEnv(vf.Env[TeacherEnvConfig]):
    """Asks again until the sum is right; one point off for every further try."""

    async def run(self, task, agents):
        if self.config.asks_both:
            await agents.other.run(task)
        tries = 0
        async with agents.pupil.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                tries += 1
                segment = await interaction.turn(f"No. Try {tries + 1}.")
        interaction.trace.record_reward("tries", -tries, 1.0)
'''
)


TOOLS = SUMS.replace(
    "class SumConfig",
    """class Abacus(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        "Add."
        return a + b


SumTask.toolsets = classmethod(lambda cls, config: [Abacus(vf.ToolsetConfig())])


class SumConfig""",
)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    file = tmp_path / "sums.py"
    file.write_text(SUMS, encoding="utf-8")
    return f"verifiers:{file}:SumTaskset"


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    file = tmp_path / "teacher.py"
    file.write_text(TEACHER, encoding="utf-8")
    return f"verifiers:{file}:SumTaskset"


async def test_the_tasksets_rewards_are_the_reward(sums: str) -> None:
    world = get_world(sums)
    assert world.max_turns == 1
    task = world.tasks("train", 1, 0)[0]
    start, steps = await play(world, [str(task.data["idx"] + 1)], task)
    assert [(m.role, m.content) for m in start] == [("system", "Say the sum."), ("user", f"{task.data['idx']} + 1 =")]
    assert (steps[0].reward, steps[0].terminated, steps[0].is_success) == (1.0, True, True)
    assert steps[0].info == {"length": len(str(task.data["idx"] + 1)), "reward_correct": 2.0}
    _, steps = await play(world, ["no"], task)
    assert (steps[0].reward, steps[0].terminated, steps[0].is_success) == (0.0, True, False)


async def test_an_env_with_turns_says_only_what_is_new(teacher: str) -> None:
    world = get_world(teacher)
    task = world.tasks("train", 1, 0)[0]
    _, steps = await play(world, ["x", "y", str(task.data["idx"] + 1)], task)
    assert [[m.content for m in step.messages] for step in steps] == [["No. Try 2."], ["No. Try 3."], []]
    assert steps[-1].reward == 1.0 - 2
    assert steps[-1].info["reward_tries"] == -2.0


async def test_the_turn_limit_truncates_and_what_was_earned_counts(teacher: str) -> None:
    world = get_world(teacher, max_turns=2)
    _, steps = await play(world, ["x", "y", "z"])
    assert len(steps) == 2
    assert (steps[-1].terminated, steps[-1].truncated) == (False, True)


async def test_a_broken_scorer_is_the_envs_fault(sums: str) -> None:
    world = get_world(sums)
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    with pytest.raises(DataError, match=r"the episode failed: TaskError: .*the scorer is broken"):
        await env.step(assistant("break"))
    await env.close()


async def test_two_seats_of_the_policy_are_refused(teacher: str) -> None:
    world = get_world(teacher, env={"asks_both": True})
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    with pytest.raises(DataError, match="asks the policy in two dialogues"):
        await env.step(assistant("x"))
    await env.close()


async def test_a_seat_with_a_client_of_its_own_is_not_the_policys(teacher: str) -> None:
    asked: list[str] = []
    app = FastAPI()

    @app.post("/v1/chat/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": "hm"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    with serving(app) as address:
        other = {"client": {"base_url": f"{address}/v1", "api_key_var": "NO_KEY"}}
        world = get_world(teacher, env={"asks_both": True, "other": other})
        task = world.tasks("train", 1, 0)[0]
        _, steps = await play(world, [str(task.data["idx"] + 1)], task)
    assert steps[-1].reward == 1.0
    assert asked == [f"{task.data['idx']} + 1 ="]


async def test_attempts_run_beside_each_other(teacher: str) -> None:
    world = get_world(teacher)
    tasks = world.tasks("train", 8, 0)
    played = await asyncio.gather(*(play(world, ["x", str(task.data["idx"] + 1)], task) for task in tasks))
    assert [steps[-1].reward for _, steps in played] == [0.0] * 8


async def test_nothing_is_left_of_an_attempt_that_was_given_up(sums: str) -> None:
    world = get_world(sums)
    threads = set(threading.enumerate())
    for task in world.tasks("train", 3, 0):
        env = world.make_env(task, 0)
        await env.start()
        await env.close()
        await env.close()
    left = set(threading.enumerate()) - threads
    for thread in left:
        thread.join(timeout=5)
    assert not [thread for thread in left if thread.is_alive()]


def test_splits_share_no_task_and_a_taskset_of_its_own_can_be_held_out(sums: str) -> None:
    world = get_world(sums)
    train, test = ({task.id for task in tasks} for tasks in (world.tasks("train", 200, 0), world.tasks("test", 200, 0)))
    assert len(train | test) == 40
    assert not train & test
    world = get_world(sums, test_taskset={"first": 100, "num_tasks": 5})
    assert {task.data["idx"] for task in world.tasks("test", 5, 0)} == set(range(5))
    assert len({task.id for task in world.tasks("train", 40, 0)}) == 40
    with pytest.raises(ConfigError, match=r"5 tasks of test_taskset=.* are train tasks too"):
        get_world(sums, test_taskset={"num_tasks": 5})


def test_tool_servers_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has tool servers \(Abacus\); only tasksets without can be trained"):
        get_world(f"verifiers:{tmp_path}/tools.py:SumTaskset")


def test_mistakes_are_named(sums: str) -> None:
    with pytest.raises(ConfigError, match="taskset 'no-such-taskset' not found"):
        get_world("verifiers:no-such-taskset")
    with pytest.raises(ConfigError, match=r"expected a subclass of verifiers\.v1\.Taskset"):
        get_world(sums.replace("SumTaskset", "SumTask"))
    with pytest.raises(ConfigError, match="num_task"):
        get_world(sums, taskset={"num_task": 3})
