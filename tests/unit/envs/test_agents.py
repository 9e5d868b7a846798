"""An agent written with the openai package is a world: its calls are the turns of an attempt."""

# ruff: noqa: ARG001 - an agent has this signature

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from cases import for_each
from turnwise.envs.agents import AgentWorld
from turnwise.envs.base import Split, assistant
from turnwise.envs.config import EnvConfig
from turnwise.envs.worlds import as_world
from turnwise.errors import AttemptFailed, ConfigError, DataError
from turnwise.memory.config import MemoryConfig
from turnwise.training.objects import PythonObjects
from turnwise.trajectory import RESTART

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def two_rounds(client: Any, task: dict[str, Any], bonus: float = 0.0) -> float:
    messages: list[Any] = [{"role": "user", "content": f"Number {task['seed']}."}]
    for _ in range(2):
        said = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.1).choices[0].message
        messages += [said, {"role": "user", "content": "Again."}]
    return bonus + (said.content == "two")


def silent(client: Any, task: dict[str, Any]) -> float:
    return 1.0


def env_of(agent: Any, **options: Any) -> Any:
    world = as_world(agent, options)
    return world.make_env(world.tasks("train", 1, seed=0)[0], seed=0)


async def test_calls_are_turns_and_what_the_agent_returns_is_the_reward() -> None:
    env = env_of(two_rounds, bonus=0.5)
    start = await env.start()
    assert [message.role for message in start] == ["user"]
    step = await env.step(assistant("one"))
    assert [(message.role, message.content) for message in step.messages] == [("user", "Again.")]
    assert not step.is_over
    last = await env.step(assistant("two"))
    assert (last.terminated, last.reward) == (True, 1.5)
    await env.close()


async def test_a_rewritten_history_starts_the_dialogue_over() -> None:
    def forgetful(client: Any, task: dict[str, Any]) -> bool:
        for text in ("First.", "Second."):
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": text}])
        return True

    env = env_of(forgetful)
    await env.start()
    step = await env.step(assistant("one"))
    assert [(message.content, message.name) for message in step.messages] == [("Second.", RESTART)]
    last = await env.step(assistant("two"))
    assert (last.reward, last.is_success) == (1.0, True)


async def test_tools_streams_and_coroutines_work() -> None:
    seen: list[Any] = []

    async def agent(client: Any, task: dict[str, Any]) -> float:
        ask = [{"role": "user", "content": "Add."}]
        answer = await client.chat.completions.create(model="x", messages=ask, tools=TOOLS)
        seen.append(answer.choices[0].message.tool_calls[0].function.name)
        stream = await client.chat.completions.create(model="x", messages=ask, stream=True)
        seen.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
        return 1.0

    env = env_of(agent)
    first = await env.start()
    assert first[0].role == "system"
    assert "add()" in first[0].content
    await env.step(assistant('<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    assert (await env.step(assistant("three words here"))).reward == 1.0
    assert seen == ["add", "three words here"]


async def test_an_agent_that_fails_is_blamed_and_one_that_asks_for_too_much_hears_why() -> None:
    heard: list[str] = []

    def greedy(client: Any, task: dict[str, Any]) -> float:
        try:
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "?"}], presence_penalty=1)
        except Exception as error:  # noqa: BLE001
            heard.append(str(error))
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "?"}])
        raise ValueError("broken")

    env = env_of(greedy)
    await env.start()
    with pytest.raises(AttemptFailed, match=r"the agent raised ValueError\('broken'\)"):
        await env.step(assistant("x"))
    assert "presence_penalty is not supported here" in heard[0]

    with pytest.raises(DataError, match="returned without a call"):
        await env_of(silent).start()


async def test_no_thread_of_an_abandoned_agent_stays() -> None:
    env = env_of(two_rounds)
    await env.start()
    await env.close()
    await env.close()
    deadline = time.monotonic() + 120
    while any(thread.name == "turnwise-agent" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_tasks_come_from_a_file_and_its_rows_are_in_one_split(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"seed": n, "word": f"w{n}"}) for n in range(40)), encoding="utf-8")
    world = AgentWorld(two_rounds, rows=file)
    train, test = ({task.data["word"] for task in world.tasks(split, 40, seed=0)} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == 40
    with pytest.raises(ConfigError, match="bonuss"):
        as_world(two_rounds, {"bonuss": 1})


@for_each(
    ("fields", "options"),
    [
        (("question",), {}),
        (("prompt", "input"), {}),
        (("id",), {}),
        (("word",), {"row_key": "word"}),
        (("word", "id"), {"row_key": "word, id"}),
    ],
)
def test_rows_that_ask_the_same_are_never_held_out_and_trained_on(
    fields: tuple[str, ...], options: dict[str, str], tmp_path: Path
) -> None:
    """Each of 60 tasks is there three times, with another answer, another source and more spaces."""
    rows = [
        {**dict.fromkeys(fields, f"task{' ' * (copy + 1)}{n}"), "answer": copy, "source": f"{n}-{copy}"}
        for n in range(60)
        for copy in range(3)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    world = as_world(two_rounds, {"rows": str(file), **options})
    found = {split: world.tasks(split, 300, seed=0) for split in get_args(Split)}
    asked = [{" ".join(task.data[fields[0]].split()) for task in found[split]} for split in ("train", "test")]
    assert not asked[0] & asked[1]
    assert 3 < len(asked[1]) < 30
    assert len({task.id for tasks in found.values() for task in tasks}) == 180, "every row is played"


def test_a_row_without_the_fields_that_identify_a_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": "a"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="a row has no field words; it has word"):
        AgentWorld(two_rounds, rows=tmp_path / "rows.jsonl", row_key="words")


def test_a_memory_is_refused_for_an_agent_which_writes_its_prompts_itself() -> None:
    """Behind a new beginning, a window would join the start of one conversation to the middle of another."""
    objects = PythonObjects(env=two_rounds)
    assert objects.make_world(EnvConfig(name="python:two_rounds")).max_turns == 10
    with pytest.raises(ConfigError, match=r"memory\.window, and python:two_rounds is an agent"):
        objects.make_world(EnvConfig(name="python:two_rounds"), memory=MemoryConfig(window=1))
