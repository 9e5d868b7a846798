"""Small worlds and samplers for the rollout's tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.client.fake import ScriptedSampler
from turnwise.envs import sync
from turnwise.envs.base import Env, EnvStep, Split, Task, user
from turnwise.renderers.base import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import Message, Trajectory

QUESTION = user("Guess.")


@dataclass
class CountingEnv:
    """Ends with reward 1 after `num_turns` replies; every method can be replaced."""

    num_turns: int = 2
    on_step: Callable[[Message], Any] | None = None
    on_close: Callable[[], Any] | None = None
    first: Sequence[Message] = (QUESTION,)
    replies: list[Message] = field(default_factory=list)
    num_closed: int = 0

    async def start(self) -> Sequence[Message]:
        return list(self.first)

    async def step(self, reply: Message) -> EnvStep:
        self.replies.append(reply)
        if self.on_step is not None:
            answer = self.on_step(reply)
            return await answer if asyncio.iscoroutine(answer) else answer
        return self.answer()

    async def close(self) -> None:
        self.num_closed += 1
        if self.on_close is not None:
            closing = self.on_close()
            if asyncio.iscoroutine(closing):
                await closing

    def answer(self) -> EnvStep:
        if len(self.replies) >= self.num_turns:
            return EnvStep(reward=1.0, terminated=True, is_success=True)
        return EnvStep(messages=[user(f"Again, {len(self.replies)}.")], reward={"shaping": 0.25})


class World:
    """A world whose envs a function makes; it keeps them."""

    name = "test"
    max_turns = 8
    max_tokens = 16

    def __init__(self, make: Callable[[Task, int], Any] | None = None) -> None:
        self._make = make or (lambda _task, _seed: CountingEnv())
        self.envs: list[Any] = []
        self.seeds: list[int] = []

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return make_tasks(count)

    def make_env(self, task: Task, seed: int) -> Env:
        env = self._make(task, seed)
        self.envs.append(env)
        self.seeds.append(seed)
        return env

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


def make_tasks(count: int) -> list[Task]:
    return [Task(id=f"task-{index}") for index in range(count)]


def saying(renderer: Renderer, text: str | Callable[[list[int]], str] = "My guess is 5.") -> ScriptedSampler:
    """A sampler that always says the same, or what a function of the prompt gives."""

    def reply(prompt_ids: list[int]) -> list[int]:
        content = text if isinstance(text, str) else text(prompt_ids)
        return renderer.encode_reply(Message(role="assistant", content=content))

    return ScriptedSampler(reply)


def quick(**fields: Any) -> RolloutConfig:
    """A config with deadlines that only a call which hangs can miss."""
    usual = {"step_deadline_s": 30.0, "sample_deadline_s": 30.0, "close_deadline_s": 5.0, "attempt_deadline_s": 120.0}
    usual |= {"max_turns": 8, "max_tokens_per_turn": 256, "max_trajectory_tokens": 4096}
    return RolloutConfig(**{**usual, "group_size": 4, "max_retries": 0, **fields})


async def play_env(
    env: object, renderer: Renderer, sampler: Any = None, stats: RolloutStats | None = None, **config: Any
) -> Trajectory:
    attempt = Attempt(task_id="t", index=0, seed=7, make_env=lambda: env)  # type: ignore[arg-type, return-value]
    return await play(attempt, sampler or saying(renderer), renderer, quick(**config), stats or RolloutStats())


def env_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "turnwise-env"]


def num_busy_threads() -> int:
    """Those in a call; the others wait a moment for another env before they end."""
    return len(env_threads()) - sync.num_idle_threads()


def wait_for_threads(within_s: float = 30.0) -> int:
    """How many env threads are left when the others had time to end."""
    end_s = time.monotonic() + within_s
    while env_threads() and time.monotonic() < end_s:
        time.sleep(0.01)
    return len(env_threads())
