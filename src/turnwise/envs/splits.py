"""Decides by hash which tasks are held out, and by seed in which order tasks are drawn: the same on every machine."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from turnwise.envs.base import Split, Task
from turnwise.errors import ConfigError

T = TypeVar("T")

TEST_SHARE = 0.2

_TRIES_PER_TASK = 50


def split_of(key: str, test_share: float = TEST_SHARE) -> Split:
    """Return `test` for a fixed share of all keys. It depends on the key only, so no seed can mix the splits."""
    number = int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest()[:8], "big")
    return "test" if number < test_share * 2**64 else "train"


def random_for(*parts: object) -> random.Random:
    """Return a random generator seeded by the parts. A text seed means the same on every platform."""
    return random.Random(":".join(str(part) for part in parts))


def draw(items: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """Draw `count` items in random order. No item is repeated before every item was drawn."""
    if not items:
        raise ConfigError("there is nothing to draw from; this split has no tasks")
    drawn: list[T] = []
    while len(drawn) < count:
        drawn += rng.sample(items, min(len(items), count - len(drawn)))
    return drawn


def draw_tasks(make_task: Callable[[random.Random], Task], split: Split, count: int, rng: random.Random) -> list[Task]:
    """Generate `count` tasks of one split. They are all different if there are enough different ones."""
    found: dict[str, Task] = {}
    for _ in range(_TRIES_PER_TASK * max(count, 10)):
        if len(found) >= count:
            break
        task = make_task(rng)
        if split_of(task.id) == split:
            found.setdefault(task.id, task)
    if not found and count:
        raise ConfigError(f"no {split} task among {_TRIES_PER_TASK * max(count, 10)} draws; choose other options")
    return draw(list(found.values()), count, rng) if count else []


def in_split(tasks: Iterable[Task], split: Split) -> list[Task]:
    """The tasks of one split, by the hash of their ids."""
    return [task for task in tasks if split_of(task.id) == split]


def content_id(data: Mapping[str, Any]) -> str:
    """A short name for JSON values. Tasks named by their content are never in both splits."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode("utf-8")).hexdigest()[:12]
