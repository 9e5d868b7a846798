"""A world with a difficulty dial whose process dies, once, in the middle of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.envs.difficulty import Levels
from turnwise.trajectory import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledInMix:
    """An attempt succeeds if its seed's remainder by 10 is below `luck`. With `marker`, a file that is not there yet,
    the fifteenth env to be closed kills the process and leaves the file."""

    name: ClassVar[str] = "luck"
    max_turns: ClassVar[int] = 1
    max_tokens: ClassVar[int] = 4
    difficulties: ClassVar[Levels] = ({"luck": 10}, {"luck": 5}, {"luck": 0})

    luck: int = 5
    marker: str = ""

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> KilledEnv:  # noqa: ARG002
        return KilledEnv(self, seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class KilledEnv:
    num_closed = 0

    def __init__(self, world: KilledInMix, seed: int) -> None:
        self._world = world
        self._is_lucky = seed % 10 < world.luck

    async def start(self) -> Sequence[Message]:
        return [user("say something")]

    async def step(self, reply: Message) -> EnvStep:
        reward = float(self._is_lucky) + 0.1 * len(reply.content)  # so that there is something to learn
        return EnvStep(reward=reward, terminated=True, is_success=self._is_lucky)

    async def close(self) -> None:
        KilledEnv.num_closed += 1
        marker = Path(self._world.marker)
        if self._world.marker and KilledEnv.num_closed == 15 and not marker.exists():
            marker.write_text("killed", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
