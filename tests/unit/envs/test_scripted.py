# ruff: noqa: ARG002 - the world is the same for every task

from __future__ import annotations

import pytest

from turnwise.envs.base import EnvStep, Split, Task, assistant, user
from turnwise.envs.scripted import play_demonstrations, play_script
from turnwise.trajectory import Message


class Echo:
    """Ends when it hears `end`; plain methods."""

    is_closed = False

    def start(self) -> list[Message]:
        return [user("Speak.")]

    def step(self, reply: Message) -> EnvStep:
        if reply.content == "crash":
            raise RuntimeError("broken")
        if reply.content == "end":
            return EnvStep(messages=[user("Bye.")], terminated=True)
        return EnvStep(messages=[user(f"You said {reply.content}.")])

    def close(self) -> None:
        self.is_closed = True


class World:
    max_turns = 3

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return [Task(id=f"{split}-{seed}-{n}", data={"words": ["a", "end"][n % 2 :]}) for n in range(count)]

    def make_env(self, task: Task, seed: int) -> Echo:
        return Echo()


async def test_a_dialogue_ends_with_the_last_reply() -> None:
    replies = iter(["a", "end"])
    dialogue = await play_script(Echo(), lambda _: next(replies), max_turns=9)  # pyright: ignore[reportArgumentType]
    assert dialogue == [user("Speak."), assistant("a"), user("You said a."), assistant("end")]


async def test_a_dialogue_that_is_cut_ends_with_the_last_reply_too() -> None:
    dialogue = await play_script(Echo(), lambda seen: f"{len(seen)}", max_turns=2)  # pyright: ignore[reportArgumentType]
    assert [message.content for message in dialogue] == ["Speak.", "1", "You said 1.", "3"]


async def test_the_env_is_closed_when_it_crashes() -> None:
    env = Echo()
    with pytest.raises(RuntimeError, match="broken"):
        await play_script(env, lambda _: "crash", max_turns=2)  # pyright: ignore[reportArgumentType]
    assert env.is_closed


def test_demonstrations_play_the_train_tasks_in_order() -> None:
    world = World()
    dialogues = play_demonstrations(
        world,  # pyright: ignore[reportArgumentType]
        lambda task: lambda seen: task.data["words"][sum(message.role == "assistant" for message in seen)],
        count=2,
        seed=0,
    )
    assert [[m.content for m in d if m.role == "assistant"] for d in dialogues] == [["a", "end"], ["end"]]
