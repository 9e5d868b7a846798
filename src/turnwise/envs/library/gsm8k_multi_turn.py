"""Word problems in up to five turns, with a reward for every turn.

    system     Solve the problem. End with #### and the number.
    user       Ben has 5 pears and buys 3 bags with 4 pears in each. How many pears does Ben have now?
    assistant  5 + 3 + 4 = 12. #### 12                                  format 0.04: well formed, but not right
    user       Check your steps and solve it again. End with #### and the number.
    assistant  3 * 4 = 12. 5 + 12 = 17. #### 17                         outcome 1.0, terminated, a success

A turn is worth 1.0 if its `#### number` is right, 0.2 / max_turns if it has a wrong one, and 0 otherwise. The env
always answers with the same text, which tells nothing about the solution; before the last turn it asks for the number
only. The last `####` of a reply counts. After `max_turns` the attempt ends without success.

Problems come from templates (`gsm_problems.py`; one in five is held out, by hash), or from GSM8K as published:
`path=` names `train.jsonl`/`test.jsonl`, the Hugging Face parquet files, or a folder that holds either pair. A folder
keeps its own two splits; a single file is split by hash.
"""

from __future__ import annotations

import copy
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

from turnwise.envs.base import EnvStep, Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.gsm_problems import MAX_STEPS, draw_problem
from turnwise.envs.rows import read_rows
from turnwise.envs.scripted import play_demonstrations
from turnwise.envs.splits import draw, draw_tasks, in_split, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

RULES = "Solve the problem. End with #### and the number."
TRY_AGAIN = "Check your steps and solve it again. End with #### and the number."
LAST_TURN = "This is the last turn. Write only #### and the number."

WELL_FORMED_SHARE = 0.2

_ANSWER = re.compile(r"####\s*\$?(-?[0-9][0-9,]{0,20}(?:\.[0-9]{1,9})?)")
_NOTE = re.compile(r"<<[^>\n]*>>")


def read_answer(text: str) -> Decimal | None:
    """The number after the last `####`. None if there is none."""
    found = _ANSWER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kMultiTurn:
    """The world `gsm8k_multi_turn`."""

    name: ClassVar[str] = "gsm8k_multi_turn"
    difficulties: ClassVar[Levels] = tuple({"max_steps": count} for count in range(1, MAX_STEPS + 1))

    max_turns: int = 5
    max_steps: int = MAX_STEPS
    """Most steps of a generated problem: 1 to 3."""
    path: Path | None = None
    """GSM8K's own files instead of generated problems."""
    max_tokens: int = 96
    _from_file: Mapping[Split, Sequence[Task]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"max_turns={self.max_turns}; expected at least 1")
        if not 1 <= self.max_steps <= MAX_STEPS:
            raise ConfigError(f"max_steps={self.max_steps}; expected 1 to {MAX_STEPS}")
        tasks: Mapping[Split, Sequence[Task]] = {} if self.path is None else load_gsm8k(self.path)
        object.__setattr__(self, "_from_file", tasks)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, split, seed)
        if self._from_file:
            return draw(self._from_file[split], count, rng)
        return draw_tasks(self._draw_task, split, count, rng)

    def make_env(self, task: Task, seed: int) -> Gsm8kMultiTurnEnv:  # noqa: ARG002 - the env has no randomness
        return Gsm8kMultiTurnEnv(task.data["question"], task.data["solution"], self.max_turns)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The solution in the first turn, without GSM8K's `<<3*4=12>>` notes. A wrong one would teach mistakes."""
        return play_demonstrations(self, lambda task: lambda _: _NOTE.sub("", task.data["solution"]), count, seed)

    def _draw_task(self, rng: random.Random) -> Task:
        problem = draw_problem(rng, self.max_steps)
        return _make_task(problem.question, problem.solution)


class Gsm8kMultiTurnEnv:
    """One problem."""

    def __init__(self, question: str, solution: str, max_turns: int) -> None:
        self._question = question
        self._target = read_answer(solution)
        self._max_turns = max_turns
        self._turn = 0

    async def start(self) -> list[Message]:
        rules = LAST_TURN if self._max_turns == 1 else RULES
        return [system(rules), user(self._question)]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        answer = read_answer(reply.content)
        info, labels = {"turns": self._turn}, {} if answer is None else {"answer": format(answer.normalize(), "f")}
        if answer is not None and answer == self._target:
            return EnvStep(reward={"outcome": 1.0}, terminated=True, is_success=True, info=info, labels=labels)
        reward = {"format": WELL_FORMED_SHARE / self._max_turns if answer is not None else 0.0}
        if self._turn >= self._max_turns:
            return EnvStep(reward=reward, terminated=True, is_success=False, info=info, labels=labels)
        return EnvStep(messages=[user(LAST_TURN if self._turn == self._max_turns - 1 else TRY_AGAIN)], reward=reward)

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        """The number of turns played, which is the whole state."""
        return f"turn {self._turn}"

    def fork(self) -> Gsm8kMultiTurnEnv:
        return copy.copy(self)  # nothing else of it ever changes


def load_gsm8k(path: Path) -> Mapping[Split, Sequence[Task]]:
    """Load both splits from a folder, or divide one file."""
    path = path.expanduser()
    if path.is_file():
        tasks = _read_file(path)
        return {"train": in_split(tasks, "train"), "test": in_split(tasks, "test")}
    if not path.is_dir():
        raise ConfigError(f"path={path} does not exist; expected GSM8K's jsonl or parquet file, or their folder")
    train, test = _read_file(_find(path, "train")), _read_file(_find(path, "test"))
    seen = {task.id for task in train}
    return {"train": train, "test": [task for task in test if task.id not in seen]}


def _find(folder: Path, split: Split) -> Path:
    """Find `train.jsonl` or `train-00000-of-00001.parquet`, here or in the folder `main`, as on the hub."""
    for place in (folder, folder / "main"):
        found = [*sorted(place.glob(f"{split}.jsonl")), *sorted(place.glob(f"{split}*.parquet"))]
        if found:
            return found[0]
    raise ConfigError(f"no {split}.jsonl and no {split}*.parquet in {folder}; expected GSM8K's files as published")


def _read_file(path: Path) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, row in enumerate(read_rows(path), start=1):
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str) or read_answer(solution) is None:
            raise ConfigError(f"{path}, row {number}: expected a question and an answer that ends with `#### number`")
        task = _make_task(question, solution)
        tasks[task.id] = task
    return list(tasks.values())


def _make_task(question: str, solution: str) -> Task:
    name = hashlib.sha256(question.encode("utf-8")).hexdigest()[:16]
    return Task(id=f"gsm-{name}", data={"question": question, "solution": solution})
