"""Envs of verifiers' older kind. The package is large and conflicts with the newer one that the other adapter needs, so
its part is played by a stand-in with the same calls: `get_dataset`, `get_eval_dataset`, `run_rollout` and a client.
`test_verifiers_classic_package.py` plays the package's own envs.
"""

from __future__ import annotations

import signal
import sys
from types import ModuleType
from typing import Any

import pytest

from attempts import play
from turnwise.envs.registry import get_world
from turnwise.errors import AttemptFailed, ConfigError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


class ChatClient:
    """As verifiers' clients are made: around a client of the openai package."""

    def __init__(self, client: Any) -> None:
        self.client = client


class Env:
    """Asks, and asks again; the last reply is compared with the answer."""

    max_turns = 2
    eval_dataset: list[Any] | None = None

    def __init__(self, num_rows: int = 40, num_held_out: int = 0) -> None:
        self.rows = [
            {"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "answer": str(n + 1), "example_id": n}
            for n in range(num_rows)
        ]
        if num_held_out:
            self.eval_dataset = self.rows[:num_held_out]
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def get_dataset(self, n: int) -> list[Any]:
        return self.rows[:n]

    def get_eval_dataset(self, n: int) -> list[Any]:
        return (self.eval_dataset or self.rows)[:n]

    async def run_rollout(self, row: Any, client: ChatClient, model: str, sampling_args: Any) -> dict[str, Any]:
        assert sampling_args == {}
        create = client.client.chat.completions.create
        messages = list(row["prompt"])
        first = (await create(model=model, messages=messages, tools=[TOOL])).choices[0].message
        if first.content == "crash":
            return {"reward": 0.0, "error": "the env broke", "metrics": {}}
        if first.tool_calls:
            said = {"role": "tool", "content": row["answer"], "tool_call_id": first.tool_calls[0].id}
        else:
            said = {"role": "user", "content": "Again."}
        messages += [first.model_dump(exclude_none=True), said]
        last = (await create(model=model, messages=messages, tools=[TOOL])).choices[0].message
        reward = float(last.content == row["answer"])
        return {"reward": reward, "error": None, "metrics": {"right": reward}}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, sums = ModuleType("verifiers.clients"), ModuleType("classic_sums")
    vars(clients)["OpenAIChatCompletionsClient"] = ChatClient
    vars(sums).update(load_environment=Env, nothing=dict)
    for module in (ModuleType("verifiers"), clients, sums):
        monkeypatch.setitem(sys.modules, module.__name__, module)


async def test_every_call_of_the_env_is_a_turn_and_its_score_the_reward() -> None:
    world = get_world("verifiers_classic:classic_sums:load_environment")
    (task,) = world.tasks("train", 1, 0)
    start, (first, last) = await play(world, ["5", "wrong"], task)
    assert world.max_turns == 2
    assert start[-1].content.endswith("+ 1 =")
    assert "- add(" in start[0].content, "the policy is told of the tools"
    assert [message.content for message in first.messages] == ["Again."]
    assert (last.reward, last.is_success, dict(last.info)) == (0.0, False, {"right": 0.0})


async def test_a_tool_call_of_the_policy_reaches_the_env() -> None:
    world = get_world("verifiers_classic:classic_sums:load_environment")
    (task,) = world.tasks("train", 1, 0)
    start, (first,) = await play(world, [CALL], task)
    (result,) = first.messages
    assert result.role == "tool"
    asked = int(start[-1].content.split()[0])
    assert result.content == str(asked + 1)
    _, steps = await play(world, [CALL, result.content], task)
    assert (steps[-1].reward, steps[-1].is_success) == (1.0, True)


def test_rows_that_are_held_out_are_never_trained_on() -> None:
    for options in ({}, {"args": {"num_held_out": 8}}, {"args": {"num_held_out": 40}}):
        world = get_world("verifiers_classic:classic_sums:load_environment", **options)
        train, test = ({task.id for task in world.tasks(split, 200, 0)} for split in ("train", "test"))
        assert train
        assert test
        assert not train & test
        assert len(train | test) == 40


async def test_an_error_of_the_env_fails_the_attempt() -> None:
    with pytest.raises(AttemptFailed, match="the env broke"):
        await play(get_world("verifiers_classic:classic_sums:load_environment"), ["crash"])


def test_the_handlers_of_the_run_stay() -> None:
    before = signal.getsignal(signal.SIGINT)
    get_world("verifiers_classic:classic_sums:load_environment")
    assert signal.getsignal(signal.SIGINT) is before


def test_something_that_is_no_env_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an env of verifiers"):
        get_world("verifiers_classic:classic_sums:nothing")
