"""Attempts with a verdict of a verifier, as JSON lines: what outcome models learn from and are measured on.

    {"world": "key_door", "task_id": "rooms-redblured", "messages": [{"role": "user", "content": "..."}], "label": true}

Which part an attempt belongs to depends on its world and task alone, so no task is in both parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.envs.base import Split
from turnwise.envs.joint import without_level
from turnwise.envs.splits import split_of
from turnwise.errors import ConfigError
from turnwise.trajectory import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAttempt:
    """A conversation, and whether it succeeded."""

    world: str
    task_id: str
    messages: tuple[Message, ...]
    label: bool

    @property
    def split(self) -> Split:
        """One task in five is held out, with all attempts at it."""
        return split_of(f"{self.world}/{self.task_id}")


def write_labelled(path: Path, attempts: Iterable[LabelledAttempt]) -> None:
    """Write a file; it appears whole or not at all."""
    lines = [
        json.dumps(
            {
                "world": one.world,
                "task_id": one.task_id,
                "messages": [_to_json(message) for message in one.messages],
                "label": one.label,
            }
        )
        for one in attempts
    ]
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(path)


def _to_json(message: Message) -> dict[str, str]:
    """A message without its calls, which are part of its text; some chat templates show the name of a tool."""
    named = {"name": message.name} if message.role == "tool" and message.name else {}
    return {"role": message.role, "content": message.content, **named}


def read_labelled(path: Path) -> list[LabelledAttempt]:
    """Read a file."""
    if not path.is_file():
        raise ConfigError(f"{path} is not there; expected a run directory, or a .jsonl file of labelled attempts")
    found: list[LabelledAttempt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row: Any = json.loads(line)
            messages = tuple(
                Message(role=one["role"], content=one["content"], name=one.get("name")) for one in row["messages"]
            )
            label = _read_label(row, f"{path}, line {number}")
            task_id = without_level(row["task_id"]) if "difficulty" in row else row["task_id"]  # a line of a pool
            found.append(LabelledAttempt(world=row["world"], task_id=task_id, messages=messages, label=label))
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as cause:
            raise ConfigError(
                f"{path}, line {number} is no labelled attempt: {cause!r}; expected world, task_id, messages and label"
            ) from cause
    return found


def _read_label(row: Mapping[str, Any], where: str) -> bool:
    """`label`, or `is_success` of a line that turnwise pools wrote: 0 or 1, because SQLite knows no booleans."""
    name = "label" if "label" in row else "is_success"
    label = row[name]
    if label is None:
        raise ConfigError(
            f"{where} has {name}=null: nobody said whether this attempt succeeded. Leave such lines out, such as with "
            "turnwise pools ... --where 'is_success IS NOT NULL', or give them a label"
        )
    if label not in (0, 1):
        raise ConfigError(f"{where} has {name}={label!r}; expected true or false")
    return bool(label)


def check_both_parts(attempts: Sequence[LabelledAttempt]) -> None:
    """Refuse labels from which nothing can be learned or measured."""
    for split, words in (("train", "to learn from"), ("test", "held out")):
        labels = {one.label for one in attempts if one.split == split}
        if len(labels) < 2:
            count = sum(one.split == split for one in attempts)
            raise ConfigError(
                f"of {len(attempts)} labelled attempts, {count} are {words}, and they do not have both labels; "
                "expected successes and failures on at least a few tasks: name more runs"
            )
