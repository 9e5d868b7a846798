"""A conversation with prepared user messages and a reward for every turn.

    user       What is the capital of France?
    assistant  It is Paris.                                             outcome 1.0: keyword "Paris"
    user       On which continent is it?
    assistant  In Asia, I think.                                        outcome 0.0, terminated: half of what was there

Each turn has a user text and a way to score the reply: `keywords` (the share of them that occurs, as whole words; `a|b`
means either), `regex` (found or not), or a reference `assistant` text (overlap of words, F1). The turn's reward is its
`reward` (default 1.0) times that score. The conversation is a success if it earns `success_share` of the most that it
can earn. A reply with more than `max_words` words scores 0, so that listing everything does not pay.

`path=` loads conversations of your own, as JSON (a list) or JSON lines:

    {"turns": [{"user": "What is the capital of France?", "keywords": ["Paris"]},
               {"user": "How many people live there?", "assistant": "About 2.2 million.", "reward": 0.9}]}

`system`, `id` and `split` ("train" or "test"; by hash of the id otherwise) are optional. Without `path`, the
conversations of `dialogue_data.py` are played.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from turnwise.envs.base import EnvStep, Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.dialogue_data import make_conversations
from turnwise.envs.rows import Row, read_rows
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

_CONVERSATION_KEYS = ("id", "split", "system", "turns")
_TURN_KEYS = ("user", "assistant", "keywords", "regex", "reward")
_WORD = re.compile(r"\w+")
_SCORED_CHARACTERS = 4000
"""Longest part of a reply that is scored, because a user's regex could be slow on a very long text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueWorld:
    """The world `dialogue`."""

    name: ClassVar[str] = "dialogue"
    difficulties: ClassVar[Levels] = tuple({"success_share": share} for share in (0.5, 0.75, 1.0))

    path: Path | None = None
    """Conversations as JSON or JSON lines."""
    success_share: float = 0.75
    max_words: int = 30
    """Most words of a reply. 0 sets no limit."""
    max_tokens: int = 32
    max_turns: int = field(init=False)
    """The number of turns of the longest conversation."""
    _tasks: Mapping[Split, Sequence[Task]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.success_share <= 1:
            raise ConfigError(f"success_share={self.success_share}; expected more than 0 and at most 1")
        if self.max_words < 0:
            raise ConfigError(f"max_words={self.max_words}; expected a number of words, or 0 for no limit")
        conversations = make_conversations() if self.path is None else load_conversations(self.path)
        tasks = {split: [_to_task(c) for c in conversations if _split(c) == split] for split in ("train", "test")}
        object.__setattr__(self, "_tasks", tasks)
        object.__setattr__(self, "max_turns", max(len(conversation["turns"]) for conversation in conversations))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        if not self._tasks[split]:
            raise ConfigError(f'no {split} conversation in {self.path}; add some, or mark some with "split": "{split}"')
        return draw(self._tasks[split], count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> DialogueEnv:  # noqa: ARG002 - the user messages are fixed
        return DialogueEnv(task.data, success_share=self.success_share, max_words=self.max_words)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The reference replies. Empty if some turn of the train split has no `assistant` text."""
        if any("assistant" not in turn for task in self._tasks["train"] for turn in task.data["turns"]):
            return []
        return play_demonstrations(self, _reference_player, count, seed)


def _reference_player(task: Task) -> ScriptedPlayer:
    turns = task.data["turns"]
    return lambda dialogue: turns[sum(message.role == "assistant" for message in dialogue)]["assistant"]


class DialogueEnv:
    """One conversation."""

    def __init__(self, conversation: Mapping[str, Any], *, success_share: float, max_words: int) -> None:
        self._system: str | None = conversation.get("system")
        self._turns: Sequence[Mapping[str, Any]] = conversation["turns"]
        self._success_share = success_share
        self._max_words = max_words
        self._turn = 0
        self._earned = 0.0

    async def start(self) -> list[Message]:
        first = user(self._turns[0]["user"])
        return [first] if self._system is None else [system(self._system), first]

    async def step(self, reply: Message) -> EnvStep:
        turn = self._turns[self._turn]
        reward = turn.get("reward", 1.0) * self._score(turn, reply.content)
        self._turn += 1
        self._earned += reward
        if self._turn < len(self._turns):
            return EnvStep(messages=[user(self._turns[self._turn]["user"])], reward=reward)
        within_reach = sum(turn.get("reward", 1.0) for turn in self._turns)
        is_success = self._earned >= self._success_share * within_reach - 1e-9
        return EnvStep(reward=reward, terminated=True, is_success=is_success)

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        return f"turn {self._turn} earned {self._earned:.6g}"

    def fork(self) -> DialogueEnv:
        return copy.copy(self)  # nothing else of it ever changes

    def _score(self, turn: Mapping[str, Any], text: str) -> float:
        text = text[:_SCORED_CHARACTERS]
        if self._max_words and len(text.split()) > self._max_words:
            return 0.0
        return score_reply(turn, text)


def score_reply(turn: Mapping[str, Any], text: str) -> float:
    """Score a reply from 0 to 1 by the turn's keywords, regex or reference."""
    if "keywords" in turn:
        keywords: Sequence[str] = turn["keywords"]
        return sum(_has_keyword(text, keyword) for keyword in keywords) / len(keywords)
    if "regex" in turn:
        return float(re.search(turn["regex"], text) is not None)
    return word_overlap(text, turn["assistant"])


def word_overlap(text: str, reference: str) -> float:
    """F1 of the words of two texts, with repetitions, ignoring case."""
    ours, theirs = (Counter(_WORD.findall(t.lower())) for t in (text, reference))
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def _has_keyword(text: str, keyword: str) -> bool:
    return any(
        re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE) for word in keyword.split("|")
    )


def load_conversations(path: Path) -> list[dict[str, Any]]:
    """Read conversations from a JSON or JSON lines file, check each, and give each an id."""
    rows = read_rows(path)
    conversations = [_check_conversation(f"{path}, conversation {i}", i, row) for i, row in enumerate(rows, start=1)]
    twice = [name for name, times in Counter(row["id"] for row in conversations).items() if times > 1]
    if twice:
        raise ConfigError(f"{path}: two conversations with the id {twice[0]!r}; ids must be unique")
    return conversations


def _check_conversation(where: str, number: int, row: Row) -> dict[str, Any]:
    conversation = dict(row)
    _check_keys(where, conversation, _CONVERSATION_KEYS)
    if conversation.get("split", "train") not in ("train", "test"):
        raise ConfigError(f'{where}: split={conversation["split"]!r}; expected "train" or "test"')
    turns: Any = conversation.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f'{where} has no "turns"; expected a list with at least one')
    for index, turn in enumerate(cast(list[Any], turns), start=1):
        _check_turn(f"{where}, turn {index}", turn)
    return {"id": f"dialogue-{number}", **conversation}


def _check_turn(where: str, turn: Any) -> None:
    if not isinstance(turn, dict) or not isinstance(turn.get("user"), str):  # pyright: ignore[reportUnknownMemberType]
        raise ConfigError(f'{where}: expected an object with the text of the "user"')
    row = cast(dict[str, Any], turn)
    _check_keys(where, row, _TURN_KEYS)
    if not any(key in row for key in ("keywords", "regex", "assistant")):
        raise ConfigError(f'{where} cannot be scored; give it "keywords", a "regex" or a reference "assistant" text')
    keywords: Any = row.get("keywords", ["-"])
    if not isinstance(keywords, list) or not keywords or not all(isinstance(k, str) for k in cast(list[Any], keywords)):
        raise ConfigError(f"{where}: keywords={keywords!r:.60}; expected a list of words")
    try:
        re.compile(row.get("regex", ""))
    except (re.error, TypeError) as cause:
        raise ConfigError(f"{where}: regex={row['regex']!r}: {cause}") from cause
    if not isinstance(row.get("reward", 1.0), int | float) or not row.get("reward", 1.0) > 0:
        raise ConfigError(f"{where}: reward={row['reward']!r}; expected a positive number, the most the turn can earn")


def _check_keys(where: str, row: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in row:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}; expected {', '.join(known)}")


def _split(conversation: Mapping[str, Any]) -> Split:
    return conversation.get("split") or split_of(conversation["id"])


def _to_task(conversation: Mapping[str, Any]) -> Task:
    data = {key: conversation[key] for key in ("system", "turns") if key in conversation}
    return Task(id=conversation["id"], data=data)
