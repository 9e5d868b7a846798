"""Chats of a file as a world: what is read, what is held out, what a reply earns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attempts import play
from turnwise.envs.adapters.chat import ChatWorld, row_to_chat
from turnwise.envs.check import check_env
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError, DataError


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def write(place: Path, rows: list[dict[str, Any]]) -> str:
    place.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(place)


def chats(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                says("user", f"{n}?"),
                says("assistant", f"{n}!"),
                says("user", "Again?"),
                says("assistant", "No"),
            ]
        }
        for n in range(first, first + count)
    ]


def test_a_file_of_chats_keeps_the_rules_of_worlds(tmp_path: Path) -> None:
    world = get_world(f"chat:{write(tmp_path / 'chats.jsonl', chats(0, 20))}")
    assert check_env(world, num_tasks=3).is_ok
    assert (world.max_turns, world.max_tokens) == (2, 14)


async def test_held_out_chats_are_never_demonstrated(tmp_path: Path) -> None:
    place, other = write(tmp_path / "a.jsonl", chats(0, 40)), write(tmp_path / "b.jsonl", chats(40, 10))
    for world, num_held_out in ((ChatWorld(place), None), (ChatWorld(place, test_rows=other), 10)):
        held_out = {task.id for task in world.tasks("test", 50, 0)}
        shown = {tuple(message.content for message in dialogue) for dialogue in world.demonstrations(200, 0)}
        tested = [await world.make_env(task, 0).start() for task in world.tasks("test", 50, 0)]
        starts = {asked.content for first in tested for asked in first}
        assert not starts & {dialogue[0] for dialogue in shown}
        assert num_held_out in (None, len(held_out))
    with pytest.raises(ConfigError, match="40 chats are in both"):
        ChatWorld(place, test_rows=place)


@pytest.mark.parametrize(
    ("replies", "rewards", "is_success"),
    [(["7!", "No"], [0.5, 0.5], True), (["7", " No "], [0.0, 0.5], False)],
)
async def test_each_reply_that_equals_the_data_earns_its_share(
    tmp_path: Path, replies: list[str], rewards: list[float], *, is_success: bool
) -> None:
    world = ChatWorld(write(tmp_path / "a.jsonl", chats(7, 1)), test_rows=write(tmp_path / "b.jsonl", chats(8, 1)))
    _, steps = await play(world, replies)
    assert [step.reward for step in steps] == rewards
    assert [message.content for message in steps[0].messages] == ["Again?"]
    assert steps[-1].is_success is is_success


def test_tool_calls_and_other_columns_are_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {**says("user", "1 + 1?"), "tool_calls": None, "name": None}
    answered = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    chat = row_to_chat({"messages": [asked, answered, result, says("assistant", "2"), says("user", "Thanks.")]})
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert '<tool_call>{"name": "add"' in chat.messages[1].content
    assert row_to_chat({"prompt": "1 + 1?", "completion": "2"}).messages[1].content == "2"
    both = row_to_chat({"prompt": [says("user", "1 + 1?")], "completion": [says("assistant", "2")]})
    assert both == row_to_chat({"prompt": "1 + 1?", "completion": "2"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello"}, "columns text; expected messages"),
        ({"messages": "hello"}, "messages is str"),
        ({"messages": [says("user", "hello")]}, "and then one of the assistant"),
        ({"messages": [says("user", "a"), says("assistant", "b"), says("assistant", "c")]}, "two assistant messages"),
        ({"messages": [says("human", "a"), says("assistant", "b")]}, "role: "),
        ({"prompt": 3, "completion": "b"}, "int in place of messages"),
    ],
)
def test_a_row_that_is_no_chat_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        row_to_chat(row)
