from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl_gym")

from attempts import play
from turnwise.envs.base import Task, assistant
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError, DataError

OWN_ENV = """\
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Yes(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.word = extras["word"]
        self.max_turns = extras.get("max_turns", 2)

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Go."}], {}

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        observations = [] if done or action == "silence" else [{"role": "user", "content": "And?"}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=float(self.word in action), done=done,
            metadata={"turn": self.turns, "text": "no"}, postprocessed_action=action.strip(),
        )

    def get_metrics(self):
        return {"steps": self.turns}

class NoEnv:
    pass
"""


def _truth(task: Task) -> str:
    return task.data["reward_spec"]["ground_truth"]


async def test_gsm8k_of_skyrl_scores_generated_problems() -> None:
    world = get_world("skyrl_gym:gsm8k")
    task = world.tasks("train", 1, 0)[0]
    _, right = await play(world, [f"so\n#### {_truth(task)}"], task)
    _, wrong = await play(world, ["#### -1"], task)
    assert (right[0].reward, right[0].terminated, right[0].is_success) == (1.0, True, True)
    assert (wrong[0].reward, wrong[0].terminated, wrong[0].is_success) == (0.0, True, False)


async def test_turn_rewards_of_the_multi_turn_env_stay_with_their_turn() -> None:
    world = get_world("skyrl_gym:gsm8k_multi_turn")
    assert world.max_turns == 5
    task = world.tasks("train", 1, 0)[0]
    _, steps = await play(world, ["no idea", "#### -1", f"#### {_truth(task)}", "late"], task)
    assert [step.reward for step in steps] == pytest.approx([0, 0.2 / 5, 1])
    assert steps[0].messages[0].role == "user"
    assert steps[-1].info == {"steps": 3.0}


async def test_max_turns_reaches_the_env() -> None:
    world = get_world("skyrl_gym:gsm8k_multi_turn", max_turns=2)
    _, steps = await play(world, ["a", "b", "c"])
    assert len(steps) == world.max_turns == 2
    assert steps[-1].terminated


def test_generated_problems_are_held_out() -> None:
    world = get_world("skyrl_gym:gsm8k")
    train = {task.data["prompt"][0]["content"] for task in world.tasks("train", 100, 0)}
    assert not train & {task.data["prompt"][0]["content"] for task in world.tasks("test", 50, 0)}


@pytest.fixture
def own_env(tmp_path: Path) -> str:
    file = tmp_path / "yes_env.py"
    file.write_text(OWN_ENV, encoding="utf-8")
    return f"skyrl_gym:{file}:Yes"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    prompts = [[{"role": "system", "content": f"Task {n}"}] for n in range(40)]
    file.write_text("\n".join(json.dumps({"prompt": p, "word": "yes"}) for p in prompts), encoding="utf-8")
    return file


async def test_an_env_of_your_own_gets_its_row(own_env: str, rows: Path) -> None:
    world = get_world(own_env, data=str(rows))
    start, steps = await play(world, [" yes ", "yes"])
    assert [(message.role, message.content[:4]) for message in start] == [("system", "Task"), ("user", "Go.")]
    assert [step.reward for step in steps] == [1.0, 1.0]
    assert steps[0].info == {"turn": 1.0, "postprocessed": 1.0}
    assert steps[1].info == {"turn": 2.0, "steps": 2.0, "postprocessed": 1.0}


async def test_an_env_that_falls_silent_is_the_one_to_blame(own_env: str, rows: Path) -> None:
    world = get_world(own_env, data=str(rows))
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    with pytest.raises(DataError, match="messages is empty but the attempt goes on"):
        await env.step(assistant("silence"))
    await env.close()


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("gsm9k", {}, "no env 'gsm9k'; did you mean 'gsm8k'"),
        ("search", {}, "needs rows: env.options.data=rows.jsonl"),
        ("search", {"env_config": {"topkk": 1}, "data": "x"}, "env_config=.* does not fit SearchEnv"),
    ],
)
def test_what_is_missing_is_said(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        get_world(f"skyrl_gym:{name}", **options)


def test_rows_that_an_env_cannot_use_are_found_out_at_once(rows: Path, own_env: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be made from its first row .keys prompt, word.*reward_spec field"):
        get_world("skyrl_gym:gsm8k", data=str(rows))
    with pytest.raises(ConfigError, match="expected a subclass of skyrl_gym's BaseTextEnv"):
        get_world(own_env.replace("Yes", "NoEnv"), data=str(rows))


def test_the_default_config_of_an_env_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "Q"}], "reward_spec": {"ground_truth": {"target": ["a"]}}}
    file.write_text("\n".join(json.dumps({**row, "n": n}) for n in range(20)), encoding="utf-8")
    assert get_world("skyrl_gym:search", data=str(file)).max_turns == 2
