"""Tasks, messages and steps as JSON.

What comes back from JSON equals what went in: a number stays a number, and a step is checked when it is made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.envs.base import EnvStep, Task
from turnwise.trajectory import Message, ToolCall

PROTOCOL = 1
"""Both sides must speak the same one."""
Json = dict[str, Any]


def message_to_json(message: Message) -> Json:
    entry: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = [{"name": c.name, "arguments": dict(c.arguments), "id": c.id} for c in message.tool_calls]
        entry["tool_calls"] = calls
    if message.name is not None:
        entry["name"] = message.name
    return entry


def message_from_json(entry: Mapping[str, Any]) -> Message:
    fields = dict(entry)
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls", ()))
    return Message(tool_calls=calls, **fields)


def messages_from_json(entries: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(message_from_json(entry) for entry in entries)


def task_to_json(task: Task) -> Json:
    return {"id": task.id, "data": dict(task.data)}


def task_from_json(entry: Mapping[str, Any]) -> Task:
    return Task(id=entry["id"], data=dict(entry["data"]))


def step_to_json(step: EnvStep) -> Json:
    """The step with plain numbers: an env may answer with NumPy's, which JSON does not know."""
    reward = step.reward
    return {
        "messages": [message_to_json(message) for message in step.messages],
        "reward": {part: float(value) for part, value in reward.items()}
        if isinstance(reward, Mapping)
        else float(reward),
        "terminated": bool(step.terminated),
        "truncated": bool(step.truncated),
        "is_success": None if step.is_success is None else bool(step.is_success),
        "is_unparsable": bool(step.is_unparsable),
        "is_action": bool(step.is_action),
        "info": {name: float(value) for name, value in step.info.items()},
        "labels": {name: str(value) for name, value in step.labels.items()},
        "max_tokens": int(step.max_tokens),
    }


def step_from_json(entry: Mapping[str, Any]) -> EnvStep:
    fields = dict(entry)
    return EnvStep(messages=messages_from_json(fields.pop("messages")), **fields)
