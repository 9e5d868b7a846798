"""A long form, filled in cell by cell. Most cells say what to write; a few ask for a word that was shown long before.

    system     Fill in the form. Answer with one word.
    user       The seal is red. Row 1, A: write blue.
    assistant  blue
    user       Row 1, B: write green.                         every ordinary cell shows its word
    ...
    user       Row 9, D: write the seal.                      asked at the end of a section; only memory knows it
    assistant  red
    user       The seal is now black. Row 10, A: write red.   the next section has another seal

A form has `rows` x `columns` cells and `sections` equal sections, each with a seal of its own. All ordinary cells
together pay 0.5, and so do all seals. A wrong word is told and costs its share; the form goes on. A success has all
seals right and at least `min_right` of the other cells. With 15 rows of 4 columns an attempt has 60 turns and more
tokens than `tiny` can see at once. `level` from 0 to 10 sets the size: 0 is one row, 10 has 200 cells and four
sections. One form in five is held out.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.envs.base import EnvStep, Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import content_id, draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

WORDS = ("red", "blue", "green", "black", "white", "yellow")
COLUMNS = "ABCDEFGH"
LEVELS = (
    *((1, 2, 1), (2, 3, 1), (4, 4, 1), (6, 4, 1), (9, 4, 1), (15, 4, 1)),
    *((20, 4, 1), (25, 4, 2), (30, 5, 2), (35, 5, 4), (40, 5, 4)),
)
"""(rows, columns, sections) of each level."""

_WORD = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
_SEAL = re.compile(r"The seal is (?:now )?(\w+)\.")
_ASKED = re.compile(r"write (?:the )?(\w+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """The world `workflow`."""

    name: ClassVar[str] = "workflow"
    max_tokens: ClassVar[int] = 8
    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(len(LEVELS)))

    level: int = 5
    """Size of the form, 0 to 10."""
    rows: int = 0
    """Rows; 0: as the level says."""
    columns: int = 0
    """Columns, at most 8; 0: as the level says."""
    sections: int = 0
    """Sections, each with its own seal; 0: as the level says."""
    min_right: float = 0.9
    """Share of ordinary cells that a success needs."""
    demonstration_skill: float = 1.0
    """How often a demonstration writes the right seal instead of any word, also in its summaries."""

    def __post_init__(self) -> None:
        if not 0 <= self.level < len(LEVELS):
            raise ConfigError(f"level={self.level}; expected 0 to {len(LEVELS) - 1}")
        if min(self.rows, self.columns, self.sections) < 0 or self.columns > len(COLUMNS):
            raise ConfigError(
                f"rows={self.rows}, columns={self.columns}, sections={self.sections}; expected 0 for the level's own "
                f"size, or more, and at most {len(COLUMNS)} columns"
            )
        if self.num_cells < 2 * self.shape[2]:
            raise ConfigError(f"{self.num_cells} cells for {self.shape[2]} sections; a section has 2 cells or more")
        check_fractions(self, "demonstration_skill", "min_right")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and sections."""
        rows, columns, sections = LEVELS[self.level]
        return self.rows or rows, self.columns or columns, self.sections or sections

    @property
    def num_cells(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def max_turns(self) -> int:
        return self.num_cells

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> WorkflowEnv:  # noqa: ARG002 - the form is drawn with the task
        return WorkflowEnv(task.data, self)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda task: self._player(random_for("demo", seed, task.id)), count, seed)

    def summary(self, dialogue: Sequence[Message], max_tokens: int) -> str:  # noqa: ARG002 - it is always short
        """What a script writes when its memory is full: the seal. With less skill, sometimes another word."""
        rng = random_for("summary", len(dialogue), dialogue[1].content)
        return f"The seal is {self._drawn(_last_seal(dialogue), rng)}."

    def _draw_task(self, rng: random.Random) -> Task:
        words = [rng.choice(WORDS) for _ in range(self.num_cells)]
        seals = [rng.choice(WORDS) for _ in range(self.shape[2])]
        for index, seal in enumerate(seals, start=1):  # a word that nobody sees would make two tasks of one
            words[-(-index * self.num_cells // len(seals)) - 1] = seal
        form = {"words": words, "seals": seals, "columns": self.shape[1]}
        return Task(id=f"form-{self.shape[0]}x{self.shape[1]}-{content_id(form)}", data=form)

    def _player(self, rng: random.Random) -> ScriptedPlayer:
        def reply(dialogue: Sequence[Message]) -> str:
            asked = _ASKED.findall(dialogue[-1].content)[-1]
            return self._drawn(_last_seal(dialogue), rng) if asked == "seal" else asked

        return reply

    def _drawn(self, seal: str, rng: random.Random) -> str:
        return seal if rng.random() < self.demonstration_skill else rng.choice(WORDS)


def _last_seal(dialogue: Sequence[Message]) -> str:
    said = " ".join(message.content for message in dialogue if message.role == "user")
    return _SEAL.findall(said)[-1]


class WorkflowEnv:
    """One form."""

    def __init__(self, form: Any, world: Workflow) -> None:
        self._words: Sequence[str] = form["words"]
        self._seals: Sequence[str] = form["seals"]
        self._columns = int(form["columns"])
        self._min_right = world.min_right
        self._cell = 0
        self._num_right = 0
        self._num_seals = 0

    async def start(self) -> list[Message]:
        return [system("Fill in the form. Answer with one word."), user(self._ask())]

    async def step(self, reply: Message) -> EnvStep:
        found = _WORD.findall(reply.content)
        is_right = len(found) == 1 and found[0].lower() == self._expected
        is_seal = self._is_seal(self._cell)
        paid = 0.5 / len(self._seals) if is_seal else 0.5 / (len(self._words) - len(self._seals))
        self._num_seals += is_right and is_seal
        self._num_right += is_right and not is_seal
        self._cell += 1
        reward = {"outcome": paid * is_right}
        if self._cell == len(self._words):
            return self._end(reward, is_unparsable=len(found) != 1)
        told = "" if is_right else "Wrong. "
        return EnvStep(messages=[user(f"{told}{self._ask()}")], reward=reward, is_unparsable=len(found) != 1)

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        return f"cell {self._cell} right {self._num_right} seals {self._num_seals}"

    def potential(self) -> float:
        """The share of the form that is done right."""
        return (self._num_right + self._num_seals) / len(self._words)

    def fork(self) -> WorkflowEnv:
        return copy.copy(self)  # the form is never changed

    @property
    def _expected(self) -> str:
        return self._seals[self._section(self._cell)] if self._is_seal(self._cell) else self._words[self._cell]

    def _section(self, cell: int) -> int:
        return cell * len(self._seals) // len(self._words)

    def _is_seal(self, cell: int) -> bool:
        """Whether this is the last cell of its section."""
        return cell + 1 == len(self._words) or self._section(cell + 1) != self._section(cell)

    def _ask(self) -> str:
        cell = self._cell
        is_first = cell == 0 or self._section(cell) != self._section(cell - 1)
        seal = f"The seal is {'now ' if cell else ''}{self._seals[self._section(cell)]}. " if is_first else ""
        row, column = divmod(cell, self._columns)
        asked = "the seal" if self._is_seal(cell) else self._words[cell]
        return f"{seal}Row {row + 1}, {COLUMNS[column]}: write {asked}."

    def _end(self, reward: dict[str, float], *, is_unparsable: bool) -> EnvStep:
        share = self._num_right / (len(self._words) - len(self._seals))
        return EnvStep(
            reward=reward,
            terminated=True,
            is_success=self._num_seals == len(self._seals) and share >= self._min_right,
            is_unparsable=is_unparsable,
            info={"cells_right": share, "seals_right": self._num_seals / len(self._seals)},
        )
