"""A data set of chats as a world: `turnwise train env=chat:chats.jsonl method=sft`.

A row has `messages` in OpenAI's form (role, content, tool_calls), which most chat data on the Hugging Face hub has; or
`prompt` and `completion`, as messages or as text. The file is JSON lines, JSON or parquet.

    {"messages": [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]}

The chats are the world's demonstrations, so `method=sft` and `warmup.steps` learn them. One row in five is held out, by
hash, unless `test_rows` names a file. An evaluation plays held-out chats: the policy replies where the assistant did,
the data says the rest, and each reply that equals the data's earns its share of 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from pydantic import ValidationError

from turnwise.envs.base import EnvStep, Split, Task
from turnwise.envs.chat_api.bodies import MessageBody
from turnwise.envs.chat_api.messages import read_messages, with_call_text
from turnwise.envs.rows import Row, read_rows
from turnwise.envs.splits import draw, in_split, random_for
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message

MAX_TOKENS = 1024
"""The largest default limit of a reply."""
SPARE_TOKENS = 8
"""Tokens of a reply beside its text, such as its end."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation, which ends with an assistant's message."""

    messages: tuple[Message, ...]

    @property
    def replies(self) -> list[int]:
        """The positions of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]


class ChatWorld:
    """The chats of a file."""

    def __init__(self, rows: str, *, test_rows: str = "", max_tokens: int = 0) -> None:
        """
        Args:
            test_rows: A file of held-out chats. Empty: one row of `rows` in five is held out.
            max_tokens: Tokens of a reply. 0: as many as the longest reply of the data may need, at most 1024.
        """
        self.name = f"chat:{rows}"
        train, test = _read(rows), _read(test_rows) if test_rows else {}
        shared = sorted(set(train) & set(test))
        if shared:
            raise ConfigError(f"{len(shared)} chats are in both {rows} and {test_rows}; hold out other ones")
        self._chats = {**train, **test}
        tasks = {chat_id: Task(id=chat_id) for chat_id in self._chats}
        self._tasks: Mapping[Split, Sequence[Task]] = {
            "train": [tasks[each] for each in train] if test else in_split(tasks.values(), "train"),
            "test": [tasks[each] for each in test] if test else in_split(tasks.values(), "test"),
        }
        self.max_turns = max(len(chat.replies) for chat in self._chats.values())
        longest = max(len(m.content.encode()) for chat in self._chats.values() for m in chat.messages)
        self.max_tokens = max_tokens or min(MAX_TOKENS, longest + SPARE_TOKENS)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        if count and not self._tasks[split]:
            raise ConfigError(f"{self.name} has no {split} chat; give it more rows, or env.options.test_rows=FILE")
        return draw(self._tasks[split], count, random_for(self.name, split, seed)) if count else []

    def make_env(self, task: Task, seed: int) -> ChatEnv:  # noqa: ARG002 - the data says everything
        return ChatEnv(self._chats[task.id])

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Chats of the training split, as they are in the data."""
        return [list(self._chats[task.id].messages) for task in self.tasks("train", count, seed)]


class ChatEnv:
    """One chat, played again: the policy replies, and the data says what was said next."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._replies = chat.replies
        self._turn = 0
        self._num_equal = 0

    async def start(self) -> list[Message]:
        return list(self._chat.messages[: self._replies[0]])

    async def step(self, reply: Message) -> EnvStep:
        here = self._replies[self._turn]
        is_equal = reply.content.strip() == self._chat.messages[here].content.strip()
        self._num_equal += is_equal
        self._turn += 1
        share = is_equal / len(self._replies)
        if self._turn == len(self._replies):
            is_success = self._num_equal == len(self._replies)
            return EnvStep(reward=share, terminated=True, is_success=is_success)
        said = self._chat.messages[here + 1 : self._replies[self._turn]]
        return EnvStep(reward=share, messages=list(said))

    async def close(self) -> None:
        pass


def _read(path: str) -> dict[str, Chat]:
    """The chats of a file by an id that is made of their content."""
    found: dict[str, Chat] = {}
    for number, row in enumerate(read_rows(path), start=1):
        try:
            chat = row_to_chat(row)
        except DataError as cause:
            raise ConfigError(f"{path}, row {number}: {cause}") from cause
        text = json.dumps([[message.role, message.content] for message in chat.messages])
        found[f"chat-{hashlib.sha256(text.encode()).hexdigest()[:16]}"] = chat
    return found


def row_to_chat(row: Row) -> Chat:
    """Read one row. What follows the last reply is left out, because nobody answers it."""
    if "messages" in row:
        given = row["messages"]
    elif "prompt" in row and "completion" in row:
        given = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    else:
        raise DataError(f"columns {', '.join(map(str, row))}; expected messages, or prompt and completion")
    messages = [with_call_text(message) for message in read_messages(_bodies(given))]
    while messages and messages[-1].role != "assistant":
        messages.pop()
    for before, after in pairwise(messages):
        if before.role == after.role == "assistant":
            raise DataError("two assistant messages in a row; expected something between them that is answered")
    if len(messages) < 2 or messages[0].role == "assistant":
        raise DataError("expected a message of the user or the system, and then one of the assistant")
    return Chat(tuple(messages))


def _as_messages(value: object, role: str) -> Sequence[object]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise DataError(f"{type(value).__name__} in place of messages; expected text, or a list of messages")
    return cast(Sequence[object], value)


def _bodies(given: object) -> list[MessageBody]:
    if not isinstance(given, list):
        raise DataError(f"messages is {type(given).__name__}; expected a list of role and content")
    try:
        return [MessageBody.model_validate(_without_nulls(one)) for one in cast(list[Any], given)]
    except ValidationError as cause:
        first = cause.errors()[0]
        raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _without_nulls(value: object) -> object:
    """Parquet has every column in every message, with null where it does not apply."""
    if not isinstance(value, Mapping):
        return value
    return {key: one for key, one in cast(Mapping[str, object], value).items() if one is not None}
