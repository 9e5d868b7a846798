"""The world of verdicts: read an attempt, write a reason, and say whether it succeeded.

    system     You check the work of an assistant. Say why, then end with: Verdict: yes, or Verdict: no.
    user       === attempt === ... === end of attempt ===
    assistant  The world said last: You hold the red key. Verdict: no              outcome 1.0 if it did not succeed

Its tasks are labelled attempts. It is how a model learns to verify: warm-up steps on scripted reasons, then RL on
whether the verdict is right. The attempts at one task of the world below are in one split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.base import EnvStep, Split, Task, assistant, system, user
from turnwise.envs.splits import draw, random_for
from turnwise.outcomes.labelled import LabelledAttempt, read_labelled
from turnwise.trajectory import Message

RULES = "You check the work of an assistant. Say why, then end with: Verdict: yes, or Verdict: no."
BEGIN, END = "=== attempt ===", "=== end of attempt ==="
MAX_REASON_CHARS = 60
_VERDICT = re.compile(r"verdict\s*:\s*\**\s*(yes|no)\b", re.IGNORECASE)


def is_cut_text(attempt: Sequence[Message], max_chars: int) -> bool:
    """Whether `verdict_messages` leaves out the middle of an attempt."""
    return len(_text_of(attempt)) > max_chars


def verdict_messages(attempt: Sequence[Message], max_chars: int) -> list[Message]:
    """The question about an attempt. A message cannot close the marks around it; the middle of a long one is cut."""
    text = _text_of(attempt)
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return [system(RULES), user(f"{BEGIN}\n{text}\n{END}")]


def _text_of(attempt: Sequence[Message]) -> str:
    return "\n".join(f"[{one.role}] {one.content}" for one in attempt).replace("===", "= = =")


def read_verdict(reply: str) -> bool | None:
    """The last verdict of a reply; None if it has none."""
    found = _VERDICT.findall(reply)
    return found[-1].lower() == "yes" if found else None


def write_reason(attempt: Sequence[Message], label: bool) -> str:
    """A reason that quotes how the attempt ended, and the verdict: what the warm-up shows."""
    last = attempt[-1]
    who = "The assistant" if last.role == "assistant" else "The world"
    said = " ".join(last.content.split())[-MAX_REASON_CHARS:]
    return f"{who} said last: {said} Verdict: {'yes' if label else 'no'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictWorld:
    """A world whose tasks are attempts to be judged."""

    name: ClassVar[str] = "verdicts"
    max_turns: ClassVar[int] = 1

    path: Path
    """A file of labelled attempts."""
    max_chars: int = 6000
    """Longest text of an attempt."""
    max_tokens: int = 96
    _tasks: dict[Split, list[Task]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tasks: dict[Split, list[Task]] = {"train": [], "test": []}
        for one in read_labelled(self.path.expanduser()):
            tasks[one.split].append(_to_task(one))
        object.__setattr__(self, "_tasks", tasks)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw(self._tasks[split], count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> VerdictEnv:  # noqa: ARG002 - nothing is random
        return VerdictEnv(_messages(task), label=task.data["label"], max_chars=self.max_chars)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Reasons with the right verdict, as many with yes as with no where there are both."""
        labels = {label: [one for one in self._tasks["train"] if one.data["label"] == label] for label in (True, False)}
        found: list[list[Message]] = []
        rng = random_for("demo", seed)
        for index in range(count):
            own = labels[index % 2 == 0] or labels[index % 2 == 1]
            messages = _messages(task := rng.choice(own))
            reason = write_reason(messages, task.data["label"])
            found.append([*verdict_messages(messages, self.max_chars), assistant(reason)])
        return found


class VerdictEnv:
    """One attempt to be judged."""

    def __init__(self, messages: Sequence[Message], *, label: bool, max_chars: int) -> None:
        self._messages = messages
        self._label = label
        self._max_chars = max_chars

    async def start(self) -> list[Message]:
        return verdict_messages(self._messages, self._max_chars)

    async def step(self, reply: Message) -> EnvStep:
        verdict = read_verdict(reply.content)
        is_right = verdict == self._label
        info = {} if verdict is None else {"says_yes": float(verdict)}
        return EnvStep(
            reward=float(is_right), terminated=True, is_success=is_right, is_unparsable=verdict is None, info=info
        )

    async def close(self) -> None:
        pass


def _to_task(one: LabelledAttempt) -> Task:
    messages: list[dict[str, Any]] = [{"role": each.role, "content": each.content} for each in one.messages]
    key = hashlib.sha256(repr((one.world, one.task_id, messages)).encode()).hexdigest()[:16]
    data = {"world": one.world, "task_id": one.task_id, "messages": messages, "label": one.label}
    return Task(id=f"verdict-{key}", data=data)


def _messages(task: Task) -> list[Message]:
    return [Message(role=one["role"], content=one["content"]) for one in task.data["messages"]]
