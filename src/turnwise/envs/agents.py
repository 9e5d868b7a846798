"""An agent that is written with the `openai` package, as a world: `turnwise train agent.py:run`.

    def run(client, task):                                     # client: openai.OpenAI, task: a row of a file
        messages = [{"role": "user", "content": task["question"]}]
        reply = client.chat.completions.create(model="any", messages=messages).choices[0].message
        return float(reply.content.strip() == task["answer"])  # the reward

The agent is not changed for training. Its client talks to nobody: a call waits until the policy has replied, and gets
that reply in OpenAI's form. Every call is a turn. A call that goes on where an earlier one ended continues its token
ids; any other call (a rewritten history, a second conversation) starts a new datum. So training sees exactly the tokens
that were sampled. `async def run(client, task)` gets an `openai.AsyncOpenAI`.

The run decides how replies are sampled: temperature, `top_p`, `seed`, `max_tokens` and the model that the agent names
are not used. An option that would change the answer in another way is refused, as `turnwise serve` refuses it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from turnwise.envs.base import EnvStep, Split, Task
from turnwise.envs.chat_api.bodies import ChatBody, refused
from turnwise.envs.chat_api.messages import Reply, continues, read_messages, read_reply, with_call_text, with_tools
from turnwise.envs.rows import read_row_key, read_rows, what_row_asks
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.errors import AttemptFailed, ConfigError, DataError, Party, TurnwiseError
from turnwise.runtime.raised_at import describe_error
from turnwise.trajectory import Message, restarted

AgentFunction = Callable[..., Any]
"""Takes a client and a task, and returns the reward: a number, a bool (also the success), or named parts."""
CLIENT, TASK = "client", "task"
_NUM_TASKS = 2**30


def is_agent(target: object) -> bool:
    """Whether this is a function of (client, task, ...)."""
    if not inspect.isfunction(target):
        return False
    return list(inspect.signature(target).parameters)[:2] == [CLIENT, TASK]


class AgentWorld:
    """A world in which an agent's calls are the turns."""

    def __init__(
        self,
        agent: AgentFunction,
        options: Mapping[str, Any] | None = None,
        *,
        rows: Path | str | None = None,
        row_key: str = "",
        max_turns: int = 10,
        max_tokens: int = 256,
    ) -> None:
        """Args:
        options: More arguments of the agent's function.
        rows: A file of tasks (JSON lines, JSON, parquet); a row is what the agent gets. None: tasks are
            `{"seed": n}`.
        row_key: The fields of a row that identify its task, with commas between them: rows that are equal in them are
            in one split. Empty: what the row asks (`turnwise.envs.rows.what_row_asks`).
        """
        self.name = agent.__name__
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self._agent = agent
        self._options = dict(options or {})
        self._rows: dict[Split, list[Task]] | None = None
        if rows is not None:
            fields = read_row_key(row_key)
            self._rows = {"train": [], "test": []}
            for row in read_rows(rows):
                self._rows[split_of(what_row_asks(row, fields))].append(_row_to_task(row))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, split, seed)
        if self._rows is None:
            numbers = [2 * number + (split == "test") for number in rng.sample(range(_NUM_TASKS), count)]
            return [Task(id=f"{split}-{number}", data={"seed": number}) for number in numbers]
        found = self._rows[split]
        if count and not found:
            raise ConfigError(f"no row of the file is in the {split} split; give more rows, or set eval.tasks=0")
        return draw(found, count, rng) if count else []

    def make_env(self, task: Task, seed: int) -> AgentEnv:  # noqa: ARG002 - the agent has its own randomness
        return AgentEnv(self._agent, dict(task.data), self._options)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:  # noqa: ARG002 - there are none
        return []


def _row_to_task(row: Mapping[str, Any]) -> Task:
    text = json.dumps(row, sort_keys=True, default=str)
    return Task(id=uuid.uuid5(uuid.NAMESPACE_OID, text).hex[:16], data=dict(row))


@dataclass(frozen=True, slots=True, eq=False)
class _AgentCall:
    """One request of the agent, and where its answer goes."""

    body: ChatBody
    asked: tuple[Message, ...]
    answer: Future[Reply]


@dataclass(frozen=True, slots=True)
class _AgentEnd:
    """The agent has returned, or it raised."""

    value: Any
    error: BaseException | None = None


class AgentEnv:
    """One attempt: the agent runs in a thread, and each of its calls waits for the policy."""

    def __init__(self, agent: AgentFunction, task: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._agent = agent
        self._task = task
        self._options = options
        self._events: queue.SimpleQueue[_AgentCall | _AgentEnd] = queue.SimpleQueue()
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call: _AgentCall | None = None
        self._is_closed = threading.Event()

    async def start(self) -> list[Message]:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._play, name="turnwise-agent", daemon=True).start()
        event = await self._next()
        if isinstance(event, _AgentEnd):
            if event.error is not None:
                raise _blame(event.error)
            raise DataError(f"{self._agent.__name__} returned without a call of client.chat.completions.create")
        self._call = event
        return [with_call_text(message) for message in event.asked]

    async def step(self, reply: Message) -> EnvStep:
        call = self._call
        if call is None:
            raise DataError("the agent waits for no reply")
        said = read_reply(reply.content, has_tools=call.body.wants_tools)
        call.answer.set_result(said)
        event = await self._next()
        if isinstance(event, _AgentEnd):
            self._call = None
            if event.error is not None:
                raise _blame(event.error)
            return _to_step(self._agent.__name__, event.value)
        self._call = event
        if continues(event.asked, call.asked, said):
            return EnvStep(messages=[with_call_text(message) for message in event.asked[len(call.asked) + 1 :]])
        return EnvStep(messages=restarted([with_call_text(message) for message in event.asked]))

    async def close(self) -> None:
        """End the agent: a call that waits raises in its thread, and later calls are refused."""
        self._is_closed.set()
        for call in [self._call, *self._waiting()]:
            if call is not None and not call.answer.done():
                call.answer.set_exception(AttemptOverError("the attempt is over"))
        self._call = None

    def _waiting(self) -> list[_AgentCall]:
        found: list[_AgentCall] = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, _AgentCall):
                found.append(event)
        return found

    async def _next(self) -> _AgentCall | _AgentEnd:
        while self._events.empty():
            self._arrived.clear()
            if self._events.empty():
                await self._arrived.wait()
        return self._events.get()

    def _tell(self, event: _AgentCall | _AgentEnd) -> None:
        self._events.put(event)
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    def _play(self) -> None:
        from turnwise.envs.chat_api.client import make_async_client, make_client

        try:
            if inspect.iscoroutinefunction(self._agent):
                value = asyncio.run(self._agent(make_async_client(self.ask), self._task, **self._options))
            else:
                value = self._agent(make_client(self.ask), self._task, **self._options)
        except BaseException as error:  # noqa: BLE001 - it is told to the attempt, whatever it is
            self._tell(_AgentEnd(None, error))
        else:
            self._tell(_AgentEnd(value))

    def ask(self, content: bytes) -> tuple[ChatBody, Future[Reply]]:
        """Take a request of the agent; the future has the policy's reply."""
        try:
            body = ChatBody.model_validate_json(content)
        except ValidationError as cause:
            first = cause.errors()[0]
            raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        body.check()
        if (body.n or 1) > 1:
            raise refused("n", "every call is one turn of an attempt")
        if body.logprobs:
            raise refused("logprobs", "the run records them")
        asked = read_messages(body.messages)
        if body.wants_tools:
            asked = with_tools(asked, body.tools or ())
        call = _AgentCall(body, tuple(asked), Future())
        if self._is_closed.is_set():
            raise AttemptOverError("the attempt is over")
        self._tell(call)
        return body, call.answer


class AttemptOverError(TurnwiseError):
    """The attempt ended while the agent was still running: it had all its turns, or the run stops."""


def _blame(error: BaseException) -> AttemptFailed:
    failed = AttemptFailed(Party.ENV, f"the agent raised {describe_error(error)}")
    failed.__cause__ = error
    return failed


def _to_step(name: str, value: Any) -> EnvStep:
    if isinstance(value, EnvStep):
        return value
    if isinstance(value, bool):
        return EnvStep(reward=float(value), is_success=value, terminated=True)
    if isinstance(value, int | float) or (isinstance(value, Mapping) and value):
        return EnvStep(reward=cast("float | Mapping[str, float]", value), terminated=True)
    raise DataError(
        f"{name} returned {value!r:.200}; expected the reward: a number, True or False (which is the success, too), "
        "or named parts like {'outcome': 1.0}"
    )
