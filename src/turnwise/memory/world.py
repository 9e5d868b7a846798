"""Any world, with a memory: it asks the policy for summaries, and serves its notes.

    step      you hold the red key, and a request            the window is full
    reply     the summary                                    the world inside does not see it
    step      you hold the red key                           repeated, because the rewritten prompt begins with it

A summary is a turn like any other: its ids are trained, its reward is 0, and methods credit it with what follows. A
reply that holds only calls of the note tools does not reach the world inside either. A reply with such calls and an
action does, without the calls. Turns of the window are replies that are no summaries.

A world may say how a good player would sum up: an optional method `summary(dialogue, max_tokens) -> str` for its
scripted dialogues. Without one, a scripted summary lists the last replies.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turnwise.envs.base import Env, EnvStep, Task, World, assistant, system
from turnwise.envs.sync import as_env
from turnwise.envs.tools import Toolbox, format_tool_call
from turnwise.envs.wrapped import EnvWrapper, WorldWrapper
from turnwise.memory.config import MemoryConfig
from turnwise.memory.dialogue import request
from turnwise.memory.notes import Notes
from turnwise.trajectory import Message

WriteSummary = Callable[[Sequence[Message], int], str]


@dataclass(frozen=True, slots=True)
class MemoryWorld(WorldWrapper):
    """A world whose attempts are played with a memory."""

    inner: World
    memory: MemoryConfig

    @property
    def max_turns(self) -> int:
        """The world's own limit, and room for the summaries; with notes, a call of a tool before each turn."""
        turns = self.inner.max_turns * (2 if self.memory.notes else 1)
        summaries = turns // (self.memory.window - self.memory.keep) if self.memory.summary_tokens else 0
        return turns + summaries

    @property
    def max_tokens(self) -> int:
        return self.inner.max_tokens

    def make_env(self, task: Task, seed: int) -> Env:
        return MemoryEnv(as_env(self.inner.make_env(task, seed)), self.memory)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """The world's own dialogues, with a scripted summary wherever the policy would be asked for one."""
        write = _script_of(self.inner)
        return [with_summaries(one, self.memory, write) for one in self.inner.demonstrations(count, seed)]


def _script_of(world: object) -> WriteSummary:
    """How the world, or the one inside its wrappers, sums up."""
    while not callable(getattr(world, "summary", None)):
        if not hasattr(world, "inner"):
            return list_replies
        world = cast(Any, world).inner
    return cast(Any, world).summary


def with_summaries(dialogue: Sequence[Message], memory: MemoryConfig, write: WriteSummary) -> list[Message]:
    """The dialogue of `MemoryEnv` in which the policy plays as in a dialogue without memory, and sums up by a script.

    Args:
        write: Takes everything that was said in the dialogue without memory, and the limit in tokens.
    """
    found = _with_tools(dialogue, memory)
    if not memory.summary_tokens:
        return found
    places = [index for index, message in enumerate(found) if message.role == "assistant"]
    full, result = 0, list(found[: places[0]] if places else found)
    for place, end in zip(places, [*places[1:], len(found)], strict=True):
        observation = found[place + 1 : end]
        result += found[place:end]
        full += 1
        if full >= memory.window and observation:
            summary = assistant(write(dialogue[:end], memory.summary_tokens))
            result += [request(memory.summary_tokens), summary, *observation]
            full = memory.keep
    return result


def list_replies(dialogue: Sequence[Message], max_tokens: int) -> str:
    """The summary of a script that knows nothing of its world: what was said last, as far as it fits."""
    words: list[str] = []
    for message in reversed(dialogue):
        said = message.content.split()
        if message.role == "assistant" and len(words) + len(said) > max_tokens // 2:
            break
        if message.role == "assistant":
            words = [*said, *words]
    return " ".join(words)


class MemoryEnv(EnvWrapper):
    """One attempt with a memory."""

    def __init__(self, inner: Env, memory: MemoryConfig) -> None:
        super().__init__(inner)
        self._memory = memory
        self._num_full = 0
        """Turns that the prompt shows in full."""
        self._asked: tuple[Message, ...] | None = None
        """What is said again once the policy has written its summary; None: it was not asked for one."""
        self._num_summaries = 0
        self._next_limit = 0
        """What the world allows the reply that it waits for (`EnvStep.max_tokens`), also after a summary or a note."""
        self._notes = Notes()

    async def start(self) -> Sequence[Message]:
        return _with_tools(await super().start(), self._memory)

    async def step(self, reply: Message) -> EnvStep:
        step = await self._answer(reply)
        counts = {"summaries": self._num_summaries} if self._memory.summary_tokens else {}
        counts |= {"notes": len(self._notes.by_name)} if self._memory.notes else {}
        return replace(step, info={**step.info, **{name: float(count) for name, count in counts.items()}})

    async def _answer(self, reply: Message) -> EnvStep:
        if self._asked is not None:
            messages, self._asked, self._num_full = self._asked, None, self._memory.keep
            self._num_summaries += 1
            return EnvStep(messages=messages, max_tokens=self._next_limit)
        self._num_full += 1
        return self._ask(await (self._take_notes(reply) if self._memory.notes else self._play(reply)))

    async def _play(self, reply: Message) -> EnvStep:
        step = await super()._play(reply)
        self._next_limit = step.max_tokens
        return step

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        is_changed = self._asked is not None or bool(self._notes.by_name)
        return self._own_key if name == "state_key" and is_changed else value

    def _own_key(self) -> str | Awaitable[str]:
        """The key of the world's state and the memory's: the same room with other notes is another state."""
        key = cast(Any, self._inner).state_key()
        own = "" if self._asked is None else "|summary"
        own += f"|{json.dumps(self._notes.by_name, sort_keys=True)}" if self._notes.by_name else ""
        return _append(key, own) if inspect.isawaitable(key) else f"{key}{own}"

    def _ask(self, step: EnvStep) -> EnvStep:
        """The same step, with a request for a summary if the window is full."""
        memory = self._memory
        if not memory.summary_tokens or self._num_full < memory.window or step.is_over:
            return step
        names = ", ".join(self._notes.by_name)
        listed = (Message(role="user", content=f"Your notes: {names}"),) if names else ()
        self._asked = (*step.messages, *listed)
        messages = (*step.messages, request(memory.summary_tokens))
        return replace(step, messages=messages, max_tokens=memory.summary_tokens)

    async def _take_notes(self, reply: Message) -> EnvStep:
        box = Toolbox(self._notes)
        parsed = box.read(reply)
        calls = [call for call in parsed.calls if call.name in box.names]
        if not calls:
            return await self._play(reply)
        answers = await box.call_all(calls)
        others = [format_tool_call(call.name, **call.arguments) for call in parsed.calls if call.name not in box.names]
        action = "\n".join([*([parsed.content] if parsed.content else []), *others])
        if not action:
            return EnvStep(messages=answers, is_action=True, max_tokens=self._next_limit)
        rest = tuple(call for call in parsed.calls if call.name not in box.names)
        step = await self._play(Message(role="assistant", content=action, tool_calls=rest))
        return replace(step, messages=(*answers, *step.messages) if not step.is_over else step.messages)

    def _wrap_fork(self, inner: Env) -> MemoryEnv:
        fork = MemoryEnv(inner, self._memory)
        fork._dialogue = list(self._dialogue)
        fork._num_full, fork._asked, fork._num_summaries = self._num_full, self._asked, self._num_summaries
        fork._next_limit = self._next_limit
        fork._notes = Notes(self._notes.by_name)
        return fork


async def _append(key: Awaitable[str], own: str) -> str:
    return f"{await key}{own}"


def _with_tools(messages: Sequence[Message], memory: MemoryConfig) -> list[Message]:
    """The messages, with the note tools described in the system message."""
    if not memory.notes:
        return list(messages)
    text = f"You forget old turns. Keep what you need in notes.\n{Toolbox(Notes()).describe()}"
    if messages and messages[0].role == "system":
        return [system(f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [system(text), *messages]
