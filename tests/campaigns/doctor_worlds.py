"""A small world that a policy with random weights learns in seconds, and ways to break it on purpose.

The policy says a few tokens and succeeds if its reply holds an `e`. `fault` names what is planted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from turnwise.envs.base import EnvStep, Split, Task, assistant, user
from turnwise.envs.tools import Toolbox, tool
from turnwise.trajectory import Message, ToolCall

LETTER = "e"
SHOWN = {
    "long_demonstrations": "e " * 40,
    "bad_demonstrations": "0 1 2",
    "long_answer": "here we are there",
    "form": "OK",
}
"""What the demonstrations say, by fault."""


class Letters:
    """Say something with the letter `e` in it."""

    name = "letters"
    max_turns, max_tokens = 1, 6

    def __init__(self, fault: str = "", turns: int = 1, **_: Any) -> None:
        self.fault = fault
        self.max_turns = turns
        self.max_tokens = 6

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index, "split": split}) for index in range(min(count, 32))]

    def make_env(self, task: Task, seed: int) -> LettersEnv:  # noqa: ARG002
        return LettersEnv(self.fault, task, self.max_turns)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        said = SHOWN.get(self.fault, "e e e")
        first = [LettersEnv(self.fault, task, self.max_turns).first() for task in self.tasks("train", count, seed)]
        return [[user(text), assistant(said)] for text in first]


class LettersEnv:
    def __init__(self, fault: str, task: Task, turns: int) -> None:
        self.fault, self.task, self.turns = fault, task, turns
        self.turn = 0
        self.toolbox = Toolbox(self)

    @tool
    def look_up(self, word: str) -> str:
        """Look a word up in a file that is gone."""
        raise ConnectionError(f"the dictionary does not answer about {word}")

    def first(self) -> str:
        return f"Task {self.task.data['index']}: say a word."

    async def start(self) -> Sequence[Message]:
        return [user(self.first())]

    async def step(self, reply: Message) -> EnvStep:
        self.turn += 1
        text, index = reply.content, int(self.task.data["index"])
        if self.fault == "env" and index % 2:
            raise KeyError(f"no row for task {index}")
        if self.fault == "tool" and index % 2:
            await self.toolbox.call(ToolCall(name="look_up", arguments={"word": text[:5]}))
        if self.fault == "slow":
            await asyncio.sleep(0.3)
        if self.fault == "uneven" and index % 2:
            await asyncio.sleep(2.0)
        if self.turn < self.turns:
            return EnvStep(messages=[user("Go on, and say another word that nobody said before you.")])
        return self.judge(text, index)

    def judge(self, text: str, index: int) -> EnvStep:
        good = LETTER in text
        end: dict[str, Any] = {"terminated": True}
        match self.fault:
            case "form":
                good = text.startswith("OK")
                return EnvStep(reward=float(good), is_success=good, is_unparsable=not good, **end)
            case "hard":
                return EnvStep(reward=0.0, is_success=False, **end)
            case "easy":
                return EnvStep(reward=1.0, is_success=True, **end)
            case "by_task":
                return EnvStep(reward=float(index % 2), **end)
            case "chance":
                return EnvStep(reward=random.Random(time.perf_counter_ns()).random(), is_success=False, **end)
            case "hack":
                return EnvStep(reward={"outcome": 0.0, "format": text.count(LETTER) / 3}, is_success=False, **end)
            case "trap":
                return EnvStep(reward=0.5 * text.count(LETTER), is_success="qqqq" in text, **end)
            case "huge":
                return EnvStep(reward=1e4 * good, is_success=good, **end)
            case "minute":
                return EnvStep(reward=1e-6 * good, is_success=good, **end)
            case "split":
                good = good and self.task.data["split"] == "train"
                return EnvStep(reward=float(good), is_success=good, **end)
            case "fragile":  # repeating oneself fails, and a policy that went too far repeats itself
                tokens = text.split()
                good = good and len(set(text)) >= 6 and len(tokens) == len(set(tokens))
                return EnvStep(reward=float(good), is_success=good, **end)
            case "long_answer":
                good = len(text) >= 12 and LETTER in text
                return EnvStep(reward=float(good), is_success=good, **end)
        return EnvStep(reward=float(good), is_success=good, **end)

    async def close(self) -> None:
        pass
