"""Envs of verifiers' older kind, with the package itself. `test_adapters_packages.py` runs this file where it is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from attempts import play, said
from turnwise.envs.registry import get_world


def _has_older_kind() -> bool:
    try:
        return version("verifiers").startswith(("0.1.", "0.2.", "0.3."))
    except PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not _has_older_kind(), reason="run by tests/contract/test_adapters_packages.py, with verifiers before 0.4"
)

ENVS = '''\
import verifiers as vf
from datasets import Dataset


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"].strip() == answer)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Are you sure?"}]


def _settings():
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]
    return {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[right])}


def single():
    return vf.SingleTurnEnv(**_settings(), system_prompt="Say the sum.")


def again():
    return Again(**_settings(), max_turns=2)


def tools():
    return vf.ToolEnv(**_settings(), tools=[add], max_turns=3)
'''


@pytest.fixture
def envs(tmp_path: Path) -> str:
    file = tmp_path / "classic_envs.py"
    file.write_text(ENVS, encoding="utf-8")
    return f"verifiers_classic:{file}"


def _sum_asked_in(question: str) -> str:
    return str(int(question.partition(" ")[0]) + 1)


async def test_a_single_turn_env_asks_once_and_its_rubric_is_the_reward(envs: str) -> None:
    world = get_world(f"{envs}:single")
    (task,) = world.tasks("train", 1, 0)
    start, (step,) = await play(world, ["no"], task)
    assert [(message.role, message.content) for message in start[:1]] == [("system", "Say the sum.")]
    assert (step.reward, step.terminated, step.is_success) == (0.0, True, False)
    _, (step,) = await play(world, [_sum_asked_in(start[-1].content)], task)
    assert (step.reward, step.is_success, dict(step.info)) == (1.0, True, {"right": 1.0, "num_turns": 1.0})
    held_out = {one.id for one in world.tasks("test", 8, 0)}
    assert held_out
    assert held_out.isdisjoint(one.id for one in world.tasks("train", 32, 0))


async def test_a_multi_turn_env_answers_between_the_turns(envs: str) -> None:
    world = get_world(f"{envs}:again")
    (task,) = world.tasks("train", 1, 0)
    start, steps = await play(world, ["no", "still no"], task)
    assert said(steps) == ["Are you sure?"]
    assert steps[-1].terminated
    _, steps = await play(world, ["no", _sum_asked_in(start[-1].content)], task)
    assert [step.reward for step in steps] == [0.0, 1.0], "the last reply counts"


async def test_a_tool_env_runs_the_tool_that_the_policy_calls(envs: str) -> None:
    world = get_world(f"{envs}:tools")
    (task,) = world.tasks("train", 1, 0)
    call = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'
    start, steps = await play(world, [call, "no"], task)
    assert "add(" in start[0].content, "the policy is told of the tool"
    assert said(steps)[0].endswith("23")
    assert (steps[-1].terminated, steps[-1].reward) == (True, 0.0)
