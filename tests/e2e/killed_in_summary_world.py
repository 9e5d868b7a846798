"""A world whose process dies, once, at the moment when the policy is about to write a summary."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.trajectory import Message

WINDOW = 2
"""The run sets `memory.window` to it: after so many turns a summary is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledInSummary:
    """Replies should hold an `a`. With `marker`, a file that is not there yet, the fifteenth attempt to need a
    summary kills the process and leaves the file."""

    name: str = "killed"
    max_turns: int = 6
    max_tokens: int = 4
    marker: str = ""

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> KilledEnv:  # noqa: ARG002
        return KilledEnv(self)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class KilledEnv:
    num_due = 0

    def __init__(self, world: KilledInSummary) -> None:
        self._world = world
        self._turn = 0
        self._is_counted = False

    async def start(self) -> Sequence[Message]:
        return [user("say something")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        is_over = self._turn == self._world.max_turns
        return EnvStep(
            messages=() if is_over else [user(f"more {self._turn}")],
            reward=reply.content.count("a") / self._world.max_turns,
            terminated=is_over,
            is_success="a" in reply.content if is_over else None,
        )

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        """Asked for before every reply, so also between a request for a summary and the summary."""
        marker = Path(self._world.marker)
        if self._world.marker and self._turn == WINDOW and not self._is_counted and not marker.exists():
            self._is_counted = True  # the state is the same after the summary
            KilledEnv.num_due += 1
            if KilledEnv.num_due == 15:  # in the second step
                marker.write_text("killed", encoding="utf-8")
                os.kill(os.getpid(), signal.SIGKILL)
        return f"turn {self._turn}"
