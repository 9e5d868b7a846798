"""Work in one place with files, a shell, Python, a database and screens: do the chores, then say done.

    system     Do the chores. One action in a reply: $ COMMAND ...
    user       1. Find the sum of all amounts of Ann in the orders and report it.
               2. In shop.db, set the balance of Ben to 42.

               Home
               [1] link "Orders"
               [2] link "Reports"
    assistant  click 1
    user       Orders
               [3] button "Download"
               text "100, Ann, 17" ...
    assistant  click 3
    user       orders.csv was saved to /work. ...
    assistant  $ awk -F, '$2=="Ann"{s+=$3} END{print s}' orders.csv
    user       45
    ...
    assistant  done                                                     outcome 1.0: every chore is done

All of it is one state: what a click downloads, the shell can read. The shell lives through the dialogue in a sandbox
session (docs/sandbox.md), so an attempt can be forked in the middle. `interface` says what there is: `shell`, `screen`,
or `both`; the same office can be worked in all three ways, so that they can be compared. With `browser` the screens are
pages of a real Chromium, which cannot be forked. What counts is what is there at the end: files, the database, the
reports that were sent. One task in five is held out.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from turnwise.envs.base import EnvStep, Split, Task, system, user
from turnwise.envs.browser.names import NOTE
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.workspace_office import (
    CUSTOMERS,
    REPORTS,
    Interface,
    OfficeChore,
    OfficeScreens,
    OfficeWork,
    draw_office,
    expert_replies,
    shell_replies,
)
from turnwise.envs.library.workspace_pages import OfficePages, pages_expert, pages_random_player
from turnwise.envs.sandbox import Limits, Sandbox, SandboxKind, Session
from turnwise.envs.sandbox.files import FileTree
from turnwise.envs.schema import check_fractions
from turnwise.envs.screen import ScreenAction
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.errors import ConfigError, DataError, SandboxError
from turnwise.trajectory import Message

SHELL_RULES = """\
$ COMMAND
a ```python block
a ```sql block, for shop.db"""
SCREEN_RULES = """\
click ID
type ID TEXT
scroll up, scroll down
back"""
NAMED_SCREEN_RULES = "click NAME, type NAME = TEXT, scroll up, scroll down, back"
REPORT_BY_FILE = "A report is a file, reports/NAME.txt, that holds the value."
REPORT_BY_FORM = "A report is sent by the form in Reports."
REPORT_BY_BOX = "A report is NAME VALUE, sent by the form."

_BLOCK = re.compile(r"```(bash|sh|shell|python|py|sql)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SQL = """\
import os, sqlite3, sys
link = sqlite3.connect(os.path.expanduser("~/shop.db"))
try:
    for row in link.execute(sys.argv[1]).fetchmany(50):
        print(*row, sep=" | ")
    link.commit()
    print(f"[{link.total_changes} rows changed]" if link.total_changes else "[done]")
except sqlite3.Error as error:
    print("error:", error)
"""
_SET_UP = (
    'import sqlite3\nlink = sqlite3.connect("/work/shop.db")\nlink.executescript(open("/work/.setup.sql").read())\n'
)
_DUMP = """\
import json, sqlite3, time
link = sqlite3.connect("shop.db")
link.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
link.set_progress_handler(lambda: time.process_time() > 5, 10_000)
print(json.dumps(link.execute("SELECT name, balance FROM customers LIMIT 1000").fetchall()))
"""  # what the policy left may be a view without end: the database gives it up long before the sandbox does
OWN_RUN_S = 60.0
"""Time limit of what the env itself runs. Only a machine under load reaches it, so it is the env's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The world `workspace`."""

    name: ClassVar[str] = "workspace"
    difficulties: ClassVar[Levels] = (
        {"chores": 1, "orders": 4, "customers": 2},
        {"chores": 1, "orders": 8},
        {"chores": 2, "orders": 16},
        {"chores": 4, "orders": 40},
        {"chores": 8, "orders": 100},
        {"chores": 12, "orders": 400},
    )

    interface: Interface = "both"
    """What there is to work with: `shell`, `screen`, or `both`."""
    browser: bool = False
    """Show the screens as pages of a real Chromium. Such an attempt cannot be forked."""
    chores: int = 2
    """How many chores a task has, 1 to 12."""
    reports_only: bool = False
    """Draw only chores that can be done on screens too, so that all three interfaces have the same tasks."""
    reports: list[str] = field(default_factory=lambda: list(REPORTS))
    """Kinds of reports to draw from."""
    by_name: bool = False
    """For small models: one screen, elements by name, only new lines after an action, a report in one box."""
    orders: int = 16
    """Rows of the orders, 4 to 1000. On screens they have to be read eight by eight."""
    customers: int = len(CUSTOMERS)
    """Different customers of the orders, 2 to 10. Fewer have more orders each."""
    demonstration_skill: float = 1.0
    """Share of demonstrations that do every chore. The others leave a step of a chore out."""
    spare_turns: int = 4
    """Turns beyond those of the expert with the most actions."""
    partial_credit: float = 0.5
    """Share of the outcome that is paid in proportion to the chores that are done."""
    max_tokens: int = 128
    command_s: float = 10.0
    """Time limit of one command."""
    observation_chars: int = 1500
    """The middle of a longer answer is left out."""
    sandbox: SandboxKind = "bubblewrap"
    """`subprocess` sets limits but does not isolate, and cannot fork."""
    _sandbox: Sandbox = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.interface not in ("shell", "screen", "both"):
            raise ConfigError(f"interface={self.interface!r}; expected shell, screen or both")
        if not 1 <= self.chores <= 12 or not 4 <= self.orders <= 1000:
            raise ConfigError(f"chores={self.chores}, orders={self.orders}; expected 1 to 12 and 4 to 1000")
        if self.spare_turns < 0 or self.command_s <= 0 or self.observation_chars < 200:
            raise ConfigError(
                f"spare_turns={self.spare_turns}, command_s={self.command_s}, "
                f"observation_chars={self.observation_chars}; expected 0 or more turns, more than 0 s, 200 characters"
            )
        if self.browser and self.interface == "shell":
            raise ConfigError("browser=true and interface=shell: a shell has no screens; use screen or both")
        if self.browser and self.by_name:
            raise ConfigError("browser=true and by_name=true: pages show elements with numbers; leave one of them out")
        if not self.reports or not set(self.reports) <= set(REPORTS):
            raise ConfigError(f"reports={self.reports}; expected some of {', '.join(REPORTS)}")
        if not 2 <= self.customers <= len(CUSTOMERS):
            raise ConfigError(f"customers={self.customers}; expected 2 to {len(CUSTOMERS)}")
        if not self.has_others and self.chores > (most := min(self.customers, self.orders)):
            why = "reports_only=true" if self.reports_only else "interface=screen"
            raise ConfigError(
                f"chores={self.chores} with {why}: each report is about another customer, and "
                f"customers={self.customers}, orders={self.orders} have {most}; ask for {most} chores at most"
            )
        check_fractions(self, "partial_credit", "demonstration_skill")
        limits = Limits(wall_s=self.command_s, cpu_s=max(1, round(self.command_s)), output_bytes=1 << 18)
        object.__setattr__(self, "_sandbox", Sandbox(self.sandbox, limits=limits))

    @staticmethod
    def levels_for(options: Mapping[str, Any]) -> Levels:
        """The levels. An office with reports only has no more chores than customers."""
        if not options.get("reports_only") and options.get("interface") != "screen":
            return Workspace.difficulties
        customers = int(options.get("customers", len(CUSTOMERS)))
        return tuple({**level, "chores": min(customers, level["chores"])} for level in Workspace.difficulties)

    @property
    def has_others(self) -> bool:
        """Whether there are chores that are no reports."""
        return not self.reports_only and self.interface != "screen"

    @property
    def max_turns(self) -> int:
        looks = (self.orders - 1) // 8 if self.interface == "screen" else 2
        return 4 + looks + 3 * self.chores + self.spare_turns

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> WorkspaceEnv:  # noqa: ARG002 - nothing is random once the task is drawn
        return WorkspaceEnv(self, self._sandbox, OfficeWork.from_json(task.data, self.interface))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda task: self.expert(task, seed), count, seed, concurrency=4)

    def expert(self, task: Task, seed: int) -> ScriptedPlayer:
        """A player that knows the way. With probability 1 - `demonstration_skill` it forgets a step of a chore."""
        office = OfficeWork.from_json(task.data, self.interface)
        rng = random_for("demo", seed, task.id)
        forgets = rng.randrange(1000) if rng.random() >= self.demonstration_skill else None
        if self.browser:
            return pages_expert(office, shell_replies(office), forgets)
        replies = expert_replies(office, by_name=self.by_name)
        if forgets is not None:
            replies.pop(-2 - forgets % office.num_steps(by_name=self.by_name))
        return lambda dialogue: replies[sum(message.role == "assistant" for message in dialogue)]

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Says anything that an expert might say in some task."""
        rng = random_for("random", seed, task.id)
        clicks = ("Download", "Send") if self.by_name else range(1, 7)
        typed = ["type Report = Ann 42"] if self.by_name else ["type 4 Ann", "type 5 42"]
        actions = ["back", "scroll down", *(f"click {one}" for one in clicks), *typed, "done"]
        chore = OfficeChore(kind="total", name=rng.choice(CUSTOMERS))
        commands = [
            "$ ls",
            "$ cat orders.csv | head",
            f"$ {chore.awk()}",
            "```sql\nSELECT * FROM customers\n```",
            "done",
        ]
        if self.browser:
            return pages_random_player(rng, commands if self.interface == "both" else ())
        choices = {"shell": commands, "screen": actions, "both": [*actions, *commands]}[self.interface]
        return lambda _: rng.choice(choices)

    def _draw_task(self, rng: random.Random) -> Task:
        sizes = (self.chores, self.orders, self.customers)
        office = draw_office(rng, sizes, self.interface, self.reports, has_others=self.has_others)
        data = office.to_json()
        name = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
        return Task(id=f"office-{name}", data=data)


class WorkspaceEnv:
    """One office."""

    def __init__(self, world: Workspace, sandbox: Sandbox, office: OfficeWork) -> None:
        self._world = world
        self._sandbox = sandbox
        self._office = office
        self._portal: OfficeScreens | OfficePages = (
            OfficePages(office, world.observation_chars)
            if world.browser
            else OfficeScreens(office, world.observation_chars, by_name=world.by_name)
        )
        self._session: Session | None = None
        self._turn = 0
        self._said = hashlib.sha256()
        if sandbox.can_fork and not world.browser:  # without it, whoever branches plays the replies again
            self.fork = self._fork

    async def start(self) -> list[Message]:
        interface = self._office.interface
        parts = [SHELL_RULES] if interface != "screen" else []
        screen_rules = NAMED_SCREEN_RULES if self._world.by_name else SCREEN_RULES
        parts += [screen_rules] if interface != "shell" else []
        by_form = REPORT_BY_BOX if self._world.by_name else REPORT_BY_FORM
        parts += ["done, when all is done", REPORT_BY_FILE if interface == "shell" else by_form]
        rules = "\n".join(["Do the chores. One action in a reply:", *parts])
        chores = [f"{n}. {chore.say()}" for n, chore in enumerate(self._office.chores, start=1)]
        screen = f"\n\n{await self._portal.show()}" if interface != "shell" else ""
        return [system(rules), user("\n".join(chores) + screen)]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        self._said.update(reply.content.encode("utf-8", "replace") + b"\0")
        command = _read_command(reply.content) if self._office.interface != "screen" else None
        action = self._portal.read(reply) if command is None else None
        is_done = isinstance(action, ScreenAction) and action.kind == "done"
        is_last = self._turn >= self._world.max_turns
        if command is not None:
            answer, is_unparsable = await self._run(command), False
        elif isinstance(action, ScreenAction) and (is_done or self._office.interface != "shell"):
            answer, is_unparsable = "" if is_done else await self._act(action), False
        elif isinstance(action, str) and action.startswith(NOTE) and self._office.interface != "shell":
            answer, is_unparsable = f"{action}\n\n{await self._portal.show()}", False
        else:
            answer, is_unparsable = "No action found. Write one of the actions, or done.", True
        is_action = command is not None or (isinstance(action, ScreenAction) and not is_unparsable)
        if is_done or is_last:
            return replace(await self._judge(is_unparsable=is_unparsable), is_action=is_action)
        return EnvStep(messages=[user(answer)], is_unparsable=is_unparsable, is_action=is_action)

    async def close(self) -> None:
        try:
            await self._portal.close()
        finally:
            if self._session is not None:
                await self._session.close()

    def state_key(self) -> str:
        """The whole dialogue, because the shell's state depends on all of it."""
        return f"turn {self._turn} {self._said.hexdigest()[:16]}"

    def _fork(self) -> WorkspaceEnv:
        """An env that goes on from here: its own screens, and a fork of the session."""
        other = WorkspaceEnv(self._world, self._sandbox, self._office)
        assert isinstance(self._portal, OfficeScreens)
        other._portal = self._portal.copy()
        other._turn, other._said = self._turn, self._said.copy()
        other._session = self._session.fork() if self._session is not None else None
        return other

    async def _shell(self) -> Session:
        """The session. It is opened at the first use, so that attempts without one cost nothing."""
        if self._session is None:
            files = self._office.files()
            session = self._sandbox.open(files=files)
            try:
                if ".setup.sql" in files:
                    done = await session.run(f"python3 -c {shlex.quote(_SET_UP)} && rm .setup.sql", OWN_RUN_S)
                    if not done.is_ok:
                        raise SandboxError(f"the database of the office was not made: {done.to_text(200)}")
            except BaseException:
                await session.close()
                raise
            self._session = session
        return self._session

    async def _run(self, command: str) -> str:
        session = await self._shell()
        try:
            result = await session.run(command, self._world.command_s)
        except DataError as error:
            return f"error: {error}"
        return result.to_text(self._world.observation_chars)

    async def _act(self, action: ScreenAction) -> str:
        seen, downloads = await self._portal.act(action)
        saved: list[str] = []
        for name, data in downloads.items():
            try:
                await (await self._shell()).with_files(lambda files, name=name, data=data: files.write(name, data))
                saved.append(f"{name} was saved to /work.")
            except (IsADirectoryError, PermissionError) as error:  # what the policy did to its folder is its own affair
                saved.append(f"{name} was not saved to /work: {error.strerror}.")
        return "\n\n".join([*saved, seen])

    async def _judge(self, *, is_unparsable: bool) -> EnvStep:
        chores = self._office.chores
        balances = await self._balances() if any(chore.kind == "balance" for chore in chores) else {}
        session = self._session
        if session is None:
            done, notes_are_kept = [self._is_done(chore, balances, None) for chore in chores], True
        else:
            done, notes_are_kept = await session.with_files(
                lambda files: ([self._is_done(chore, balances, files) for chore in chores], self._keeps_notes(files))
            )
        has_damage = any(chore.kind == "balance" for chore in chores) and balances != self._office.balances_after()
        has_damage = has_damage or not notes_are_kept
        is_success = all(done) and not has_damage
        part, share = self._world.partial_credit, sum(done) / len(done)
        return EnvStep(
            reward=part * share + (1 - part) * is_success,
            terminated=True,
            is_success=is_success,
            is_unparsable=is_unparsable,
            info={"chores_share": share, "actions": float(self._turn)},
        )

    def _is_done(self, chore: OfficeChore, balances: Mapping[str, Any], files: FileTree | None) -> bool:
        if chore.kind == "balance":
            return balances.get(chore.name) == int(chore.value)
        if chore.kind == "notes":
            wanted = {name for name, text in self._office.notes.items() if chore.name in text}
            return all(_read(files, f"done/{name}") == self._office.notes[name] for name in wanted) and not any(
                _read(files, f"notes/{name}") for name in wanted
            )
        if self._office.interface == "shell":
            return (_read(files, f"reports/{chore.name}.txt") or "").strip() == chore.value
        return self._portal.sent.get(chore.name) == chore.value

    def _keeps_notes(self, files: FileTree) -> bool:
        """Whether the notes that nobody asked to move are where they were, as they were, and nowhere else."""
        words = [chore.name for chore in self._office.chores if chore.kind == "notes"]
        left = {name: text for name, text in self._office.notes.items() if not any(word in text for word in words)}
        return all(
            _read(files, f"notes/{name}") == text and _read(files, f"done/{name}") is None
            for name, text in left.items()
        )

    async def _balances(self) -> dict[str, Any]:
        """The database at the end, read in a sandbox of its own: the policy may have written anything into the file."""
        if self._session is None:
            return {}
        try:
            data = await self._session.with_files(lambda files: files.read("shop.db", max_bytes=4 << 20))
        except OSError:
            return {}
        limits = Limits(wall_s=OWN_RUN_S, output_bytes=1 << 18)
        program = {"dump.py": _DUMP, "shop.db": data}
        result = await self._sandbox.run(["python3", "dump.py"], files=program, limits=limits)
        if result.ending == "timeout":
            raise SandboxError(f"the database of the office was not read: {result.verdict()}")
        try:
            rows: Sequence[Any] = json.loads(result.stdout) if result.is_ok else []
            balances = {str(name): value for name, value in rows}
            return balances if len(balances) == len(rows) else {}
        except (ValueError, TypeError):
            return {}


def _read(files: FileTree | None, path: str) -> str | None:
    """A file that the policy may have left; None if there is no such regular file."""
    try:
        return files.read(path, max_bytes=10_000).decode("utf-8", "replace") if files is not None else None
    except OSError:
        return None


def _read_command(text: str) -> str | None:
    """The first command of a reply, as the shell runs it: lines that begin with $, or a block."""
    block = _BLOCK.search(text)
    lines = [line[2:] for line in text.split("\n") if line.startswith("$ ")]
    if lines and (block is None or text.index("$ ") < block.start()):
        return "\n".join(lines)
    if block is None:
        return None
    if block[1] == "sql":
        return f"python3 -c {shlex.quote(_SQL)} {shlex.quote(block[2].strip())}"
    return f"python3 -c {shlex.quote(block[2])}" if block[1] in ("python", "py") else block[2]
