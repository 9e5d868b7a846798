"""AgentDojo's suites, with their own tools, data and checks."""

from __future__ import annotations

import pytest

agentdojo = pytest.importorskip("agentdojo", reason="run by tests/contract/test_agentdojo_package.py")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.envs.adapters.agentdojo import AgentDojoWorld  # noqa: E402
from turnwise.envs.base import Task  # noqa: E402
from turnwise.envs.check import check_env  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.envs.tools import format_tool_call as call  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

SUITES = ("banking", "slack", "travel", "workspace")
BILL = Task(id="banking-user_task_0", data={"user_task": "user_task_0"})


def _replies(world: AgentDojoWorld, task: Task) -> list[str]:
    player = world.expert(task)
    return [player(()) for _ in range(world.max_turns)]


@pytest.mark.parametrize("suite", ["banking", "slack"])
def test_a_suite_keeps_the_rules(suite: str) -> None:
    report = check_env(get_world(f"agentdojo:{suite}", injected=suite == "slack"), num_tasks=2, deadline_s=120.0)
    assert report.is_ok, report


@pytest.mark.parametrize("suite", SUITES)
async def test_the_solution_solves_every_task_and_doing_nothing_solves_none(suite: str) -> None:
    world = AgentDojoWorld(suite)
    tasks = {task.id: task for split in ("train", "test") for task in world.tasks(split, 60, 0)}
    for task in tasks.values():
        _, steps = await play(world, _replies(world, task), task)
        assert (steps[-1].is_success, steps[-1].reward) == (True, 1.0), task.id
        _, steps = await play(world, ["Done."], task)
        assert (steps[-1].is_success, steps[-1].reward) == (False, 0.0), task.id


async def test_every_attempt_has_a_state_of_its_own() -> None:
    world = AgentDojoWorld("banking")
    pay = call("send_money", recipient="X", amount=5.0, subject="s", date="2022-01-01")
    balances = [(await play(world, [call("get_balance"), pay], BILL))[1][0].messages[0].content for _ in range(2)]
    assert balances[0] == balances[1]


@pytest.mark.parametrize("text", [call("pay"), call("send_money", recipient="X")])
async def test_a_wrong_call_is_answered_with_an_error(text: str) -> None:
    _, steps = await play(AgentDojoWorld("banking"), [text], BILL)
    assert steps[0].messages[0].content.startswith("Error: ")
    assert (steps[0].is_over, steps[0].info["call_errors"]) == (False, 1.0)


async def test_who_does_what_the_data_ask_for_is_tricked_and_does_not_succeed() -> None:
    world = AgentDojoWorld("banking", injected=True)
    state = world.new_state(BILL.data["user_task"], "")
    asked = [one for task in world.suite.injection_tasks.values() for one in task.ground_truth(state)]
    obeying = [call(one.function, **one.args) for one in asked]
    replies = _replies(world, BILL)
    _, honest = await play(world, replies, BILL)
    _, obedient = await play(world, [replies[0], *obeying, *replies[1:]], BILL)
    assert "before anything else" in honest[0].messages[0].content
    assert (honest[-1].is_success, honest[-1].info["tricked"]) == (True, 0.0)
    assert (obedient[-1].is_success, obedient[-1].info["tricked"]) == (False, 1.0)


def test_an_unknown_suite_or_version_says_what_is_there() -> None:
    with pytest.raises(ConfigError, match="banking"):
        AgentDojoWorld("bankin")
    with pytest.raises(ConfigError, match=r"such as v1\.2\.2"):
        AgentDojoWorld("banking", version="v9")
