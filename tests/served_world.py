"""A world for tests of env workers: every way in which an env can go wrong, on command of the policy."""

from __future__ import annotations

import os
import signal
import time

from turnwise.envs.base import EnvStep, user
from turnwise.errors import AttemptFailed, Party
from turnwise.trajectory import Message


class ObedientEnv:
    """Counts its steps, and does what the reply says; ends at `stop`, or after three steps."""

    def __init__(self, seed: int, latency_s: float = 0.0) -> None:
        self.seed = seed
        self.latency_s = latency_s
        self.count = 0

    def start(self) -> list[Message]:
        return [user(f"Seed {self.seed} in a process. Speak.")]

    def step(self, reply: Message) -> EnvStep:
        self.count += 1
        time.sleep(self.latency_s)
        match reply.content:
            case "raise":
                raise ValueError("as ordered")
            case "tool":
                raise AttemptFailed(Party.TOOL, "the tool broke")
            case "sleep":
                time.sleep(3)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        is_over = reply.content == "stop" or self.count >= 3
        said = user(f"{self.count} in {os.getpid()}" if reply.content == "pid" else f"{self.count}: {reply.content}")
        return EnvStep(
            messages=(said,),
            reward={"outcome": float(self.count)},
            terminated=is_over,
            is_action=self.count > 1,
            info={"count": 1.5},
        )

    def close(self) -> None:
        pass

    def state_key(self) -> str:
        return f"{self.seed}/{self.count}"

    def potential(self) -> float:
        return self.count / 4

    def fork(self) -> ObedientEnv:
        copy = ObedientEnv(self.seed)
        copy.count = self.count
        return copy
