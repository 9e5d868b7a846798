"""A repo of small Python files, with tickets that mend or rename functions over several files. 3 to over 200 actions.

    system     Work on the repo. Say open FILE, find WORD, edit LINE CODE, or test.
    user       Files: shop, bank. Ticket 1 of 2: mend fee in bank. fee(2) is 1, not 7.
    assistant  open bank
    user       bank.py
               1 from shop import tip
               2 # fee(x) is tip(x) + 3
               3 def fee(x):
               4     return tip(x) - 3
    assistant  edit 4 return tip(x) + 3
    user       bank.py ...                                          the file as it is now
    assistant  test
    user       All 2 tests pass. Done. Ticket 2 of 2: rename tip to pay.

A ticket mends a function that is broken, or that calls a broken one of another file, or it renames a function wherever
a line says it. A `test` that passes ends a ticket, which pays 1 / num_tickets (`pays="end"`: 1 for the last one, and
nothing before); the next one starts from a fresh checkout in which everything before it is merged. A ticket is told
once. An attempt has `patience` times the actions of the script; then it ends without success. `level` from 0 to 10 sets
the repo: from 4 on an attempt has 50 actions or more, and from 7 on no comment says what a function should be.

The files are Python, and are computed by `repository_code`: no code of the policy runs. Everything follows from the
task. One repo in five is held out.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, as_action, env_answer, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.repository_tickets import (
    FILES,
    LEVELS,
    RepoSize,
    draw_repo,
    expression,
    open_ticket,
    places,
    way_to,
)
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import play_demonstrations
from turnwise.envs.splits import content_id, draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

MAX_CODE = 80
"""Characters of a line that is written."""
_ACTION = re.compile(r"(open) (\w+)(?:\.py)?|(find) (\w+)|(edit) (\d+) (\S.*)|(test)")
_RULES = "Say open FILE, find WORD, edit LINE CODE, or test."
_TICKET = re.compile(r"Ticket \d+ of \d+: (.*)$")
_OPENED = re.compile(r"^(\w+)\.py$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """The world `repository`."""

    name: ClassVar[str] = "repository"
    max_tokens: ClassVar[int] = 32
    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(len(LEVELS)))

    level: int = 3
    """Size of the repo and kind of the tickets, 0 to 10."""
    files: int = 0
    """Files, 1 to 8; 0: as the level says."""
    tickets: int = 0
    """Tickets; 0: as the level says."""
    patience: float = 1.5
    """Actions of an attempt, as a multiple of those that the script needs."""
    pays: Literal["ticket", "end"] = "ticket"
    """`ticket` pays for every ticket, `end` for the last one only."""
    demonstration_skill: float = 1.0
    """How often a demonstration does the right thing instead of opening any file."""

    def __post_init__(self) -> None:
        if not 0 <= self.level < len(LEVELS):
            raise ConfigError(f"level={self.level}; expected 0 to {len(LEVELS) - 1}")
        if not 0 <= self.files <= len(FILES):
            raise ConfigError(f"files={self.files}; expected 1 to {len(FILES)}, or 0 for the level's own number")
        if self.tickets < 0:
            raise ConfigError(f"tickets={self.tickets}; expected 1 or more, or 0 for the level's own number")
        if self.patience < 1:
            raise ConfigError(f"patience={self.patience}; expected at least 1: the script needs its own actions")
        check_fractions(self, "demonstration_skill")

    @property
    def size(self) -> RepoSize:
        size = LEVELS[self.level]
        return replace(size, files=self.files or size.files, tickets=self.tickets or size.tickets)

    @property
    def max_turns(self) -> int:
        """Enough for any repo of this size: a rename touches every line that calls the function, in three files."""
        size = self.size
        longest = max(size.depth + 3, 9 + 4 * size.functions if size.renames else 0)
        return round(self.patience * longest * size.tickets)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> RepositoryEnv:
        return RepositoryEnv(task.data, self, seed)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda _: None, count, seed)

    def summary(self, dialogue: Sequence[Message], max_tokens: int) -> str:
        """What a script writes when its memory is full: the ticket, and the file that is open."""
        said = [message.content for message in dialogue if message.role == "user"]
        ticket = [found[1] for text in said if (found := _TICKET.search(text))][-1]
        opened = [name for text in said for name in _OPENED.findall(text)]
        words = f"{ticket} {opened[-1]} is open." if opened else ticket
        return " ".join(words.split()[: max(1, max_tokens // 2)])

    def _draw_task(self, rng: random.Random) -> Task:
        repo = draw_repo(self.size, rng)
        return Task(id=f"repo-{self.level}-{content_id(repo)}", data=repo)


class RepositoryEnv:
    """One attempt at the tickets of a repo."""

    def __init__(self, repo: Mapping[str, Any], world: Repository, seed: int) -> None:
        self._repo = repo
        self._has_comments = world.size.has_comments
        self._skill = world.demonstration_skill
        self._pays_tickets = world.pays == "ticket"
        self._max_turns = round(world.patience * sum(ticket["actions"] for ticket in repo["tickets"]))
        self._rng = random_for("demo", seed, content_id(repo))
        self._index = 0
        self._turn = 0
        self._num_refused = 0
        self._begin()

    def _begin(self) -> None:
        """A fresh checkout for the ticket that is due."""
        self._ticket = open_ticket(self._repo, self._index, has_comments=self._has_comments)
        self._files = self._ticket.files
        self._open = ""
        self._seen: tuple[str, ...] = ()
        """Files that were opened since this ticket began."""
        self._has_searched = False

    async def start(self) -> list[Message]:
        files = ", ".join(self._files)
        return [system(f"Work on the repo. {_RULES}"), user(f"Files: {files}. {self._ticket.text}")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        found = _ACTION.fullmatch(reply.content.strip())
        if found is None:
            return self._answer(_RULES, is_unparsable=True)
        return as_action(self._carry_out([part for part in found.groups() if part is not None]))

    def _carry_out(self, action: Sequence[str]) -> EnvStep:
        match action:
            case ["open", file]:
                return self._open_file(file)
            case ["find", word]:
                return self._find(word)
            case ["edit", line, code]:
                return self._edit(int(line), code)
            case _:
                return self._test()

    async def close(self) -> None:
        pass

    def demonstrate(self) -> str:
        """What somebody does who reads the files along the calls, up to the broken one."""
        if self._rng.random() >= self._skill:
            return f"open {self._rng.choice(list(self._files))}"
        if not self._ticket.judge(self._files).reason:
            return "test"
        return self._demonstrate_mending() if self._ticket.broken else self._demonstrate_rename()

    def state_key(self) -> str:
        changed = {file: text for file, text in self._files.items() if text != self._ticket.files[file]}
        return f"ticket {self._index} in {self._open or 'no file'} changed {content_id(changed)} turn {self._turn}"

    def potential(self) -> float:
        """The share of the tickets that are done; one whose tests would pass counts as half."""
        count = len(self._repo["tickets"])
        is_right = self._index < count and not self._ticket.judge(self._files).reason
        return (self._index + 0.5 * is_right) / count

    def fork(self) -> RepositoryEnv:
        twin = copy.copy(self)  # files and ticket are never changed in place
        twin._rng = copy.copy(self._rng)
        return twin

    def _demonstrate_mending(self) -> str:
        functions, broken = self._ticket.functions, self._ticket.functions[self._ticket.broken]
        way = way_to(list(functions.values()), self._ticket.named, self._ticket.broken)
        unread = [file for file in way if file not in self._seen]
        if unread or self._open != broken["file"]:
            return f"open {unread[0] if unread else broken['file']}"
        head = f"def {broken['name']}(x):"
        return f"edit {self._files[self._open].splitlines().index(head) + 2} return {expression(broken)}"

    def _demonstrate_rename(self) -> str:
        old, new = self._ticket.old, self._ticket.named
        if not self._has_searched:
            return f"find {old}"
        left = places(self._files, old)
        if self._open not in left:
            return f"open {next(iter(left))}"
        number = left[self._open][0]
        line = self._files[self._open].splitlines()[number - 1].strip()
        return f"edit {number} " + re.sub(rf"\b{old}\b", new, line)

    def _open_file(self, file: str) -> EnvStep:
        if file not in self._files:
            return self._refuse(f"There is no {file}.py. Files: {', '.join(self._files)}.")
        self._open = file
        self._seen = (*self._seen, file)
        return self._answer(self._show())

    def _find(self, word: str) -> EnvStep:
        self._has_searched = True
        found = [f"{file} {', '.join(map(str, lines))}" for file, lines in places(self._files, word).items()]
        return self._answer(f"{word}: {'; '.join(found) or 'nowhere'}.")

    def _edit(self, number: int, code: str) -> EnvStep:
        if not self._open:
            return self._refuse("Open a file first.")
        lines = self._files[self._open].splitlines()
        if not 1 <= number <= len(lines):
            return self._refuse(f"{self._open}.py has lines 1 to {len(lines)}.")
        if len(code) > MAX_CODE:
            return self._refuse(f"A line has at most {MAX_CODE} characters.")
        old = lines[number - 1]
        lines[number - 1] = old[: len(old) - len(old.lstrip())] + code
        self._files = {**self._files, self._open: "\n".join(lines)}
        return self._answer(self._show())

    def _test(self) -> EnvStep:
        verdict, count = self._ticket.judge(self._files), len(self._ticket.tests)
        if verdict.reason:
            failing = f"{len(verdict.failing)} of {count} tests fail: {', '.join(verdict.failing)}. "
            return self._answer(f"{failing if verdict.failing else ''}{verdict.reason}")
        self._index += 1
        num_tickets = len(self._repo["tickets"])
        is_last = self._index == num_tickets
        paid = 1.0 / num_tickets if self._pays_tickets else float(is_last)
        if is_last:
            return EnvStep(reward=paid, terminated=True, is_success=True, info=self._info())
        self._begin()
        return self._answer(f"All {count} tests pass. Done. {self._ticket.text}", outcome=paid)

    def _refuse(self, text: str) -> EnvStep:
        self._num_refused += 1
        return self._answer(text)

    def _answer(self, text: str, *, outcome: float = 0.0, is_unparsable: bool = False) -> EnvStep:
        is_last = self._turn >= self._max_turns
        return env_answer(text, self._info(), is_last=is_last, reward=outcome, is_unparsable=is_unparsable)

    def _info(self) -> dict[str, float]:
        return {"tickets": float(self._index), "refused": float(self._num_refused)}

    def _show(self) -> str:
        lines = self._files[self._open].splitlines()
        return "\n".join([f"{self._open}.py", *(f"{number} {line}" for number, line in enumerate(lines, start=1))])
