"""Fix a bug in a repo: explore it in a shell, edit, test, submit.

    system     Fix the repo. One action in a reply: ...
    user       test_ledger.SplitTest.test_split fails: AssertionError: Lists differ: [2, 3, 3] != [4, 3, 3].
               Files: ledger/accounts.py ledger/split.py
    assistant  $ grep -n return ledger/split.py
    tool       8:    return [share - 1 if place < rest else share for place in range(people)]
               23:    return payments
    assistant  edit ledger/split.py 8
               +    return [share + 1 if place < rest else share for place in range(people)]
    tool       line 8 changed.                                          format 0.1: the first edit that fits
    assistant  test
    tool       9 of 9 tests pass.
    assistant  submit                                                   outcome 1.0: shown and hidden tests pass

The shell lives through the dialogue, in a sandbox (docs/sandbox.md). The judge tests a new copy of the repo with the
policy's changes. Tests and settings of test runners are restored there, so editing them has no effect. The last turn
submits. Bugs are shipped (`swe_bugs.py`; one in five is held out, by hash), or tasks come from a file of rows in the
style of SWE-bench (`swe_tasks.py`): `path=tasks.jsonl`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.swe_bugs import Bug, apply_bug, shipped_bugs
from turnwise.envs.library.swe_tasks import (
    FILES,
    SKIPPED_FOLDERS,
    RepoTask,
    fresh_copy,
    load_repo_task,
    read_swe_rows,
    shipped_tasks,
)
from turnwise.envs.library.swe_tests import run_suite
from turnwise.envs.sandbox import Limits, Sandbox, SandboxKind, Session
from turnwise.envs.sandbox.files import FileTree
from turnwise.envs.sandbox.limits import shorten_middle
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, in_split, random_for
from turnwise.envs.tools import ParsedReply, Toolbox, ToolError, tool
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message, ToolCall

RULES = """\
Fix the repo. One action in a reply:
$ COMMAND
edit PATH LINE, then +new lines
test
submit"""

_MAX_WORK_BYTES = 32 << 20
_FENCE = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_EDIT = re.compile(r"edit[ \t]+(\S+)(?:[ \t]+([0-9]{1,6}))?[ \t]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Swe:
    """The world `swe`."""

    name: ClassVar[str] = "swe"
    difficulties: ClassVar[Levels] = ({"hint": "line"}, {"hint": "none"})

    path: Path | None = None
    """Tasks from a file in the style of SWE-bench, instead of shipped bugs."""
    protocol: Literal["text", "tool_call"] = "text"
    hint: Literal["none", "line"] = "none"
    """With `line`, the text of a shipped bug names its line, so the policy only has to find what is wrong there."""
    max_turns: int = 8
    max_tokens: int = 128
    command_s: float = 10.0
    """Time limit of one command. The tests may take twice as long."""
    observation_chars: int = 1000
    """The middle of a longer output is left out."""
    format_reward: float = 0.1
    """Reward for the first edit that can be applied."""
    packages: list[str] = field(default_factory=list[str])
    """Installed packages that the repo may import; pytest is added when the tests need it."""
    sandbox: SandboxKind = "bubblewrap"
    """`subprocess` sets limits but does not isolate."""
    _sandbox: Sandbox = field(init=False, repr=False, compare=False)
    _tasks: Sequence[Task] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.command_s <= 0 or self.observation_chars < 100:
            raise ConfigError(
                f"max_turns={self.max_turns}, command_s={self.command_s}, observation_chars={self.observation_chars}; "
                "expected at least 1 turn, more than 0 s and 100 characters"
            )
        if self.hint != "none" and self.path is not None:
            raise ConfigError(f"hint={self.hint!r} is for shipped bugs; tasks from a file say what they say")
        tasks = shipped_tasks() if self.path is None else read_swe_rows(self.path.expanduser())
        needs_pytest = self.path is not None and any(load_repo_task(task).runner == "pytest" for task in tasks)
        packages = [*self.packages, *(["pytest"] if needs_pytest and "pytest" not in self.packages else [])]
        object.__setattr__(self, "_tasks", tasks)
        limits = Limits(wall_s=self.command_s, cpu_s=max(1, round(self.command_s)), output_bytes=1 << 18)
        object.__setattr__(self, "_sandbox", Sandbox(self.sandbox, limits=limits, packages=packages))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw(in_split(self._tasks, split), count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> SweEnv:  # noqa: ARG002 - nothing is random once the task is drawn
        return SweEnv(self, self._sandbox, load_repo_task(task), self._where(task))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Find the function, or read the line that the hint names; restore the right token, test, submit.

        Tasks from a file have none. A demonstration uses a line number only after it was shown, because a model could
        only learn an unseen number by heart.
        """
        if self.path is not None or self.protocol != "text":
            return []
        player_of: Callable[[Task], ScriptedPlayer] = lambda task: _player(shipped_bugs()[task.data["bug"]], self.hint)  # noqa: E731
        return play_demonstrations(self, player_of, count, seed, concurrency=8)

    def _where(self, task: Task) -> str:
        if self.hint == "none":
            return ""
        bug = shipped_bugs()[task.data["bug"]]
        return f"Bug: {bug.path}, line {bug.line}"


def _player(bug: Bug, hint: str) -> ScriptedPlayer:
    lines = apply_bug(bug)[bug.path].decode("utf-8").split("\n")
    broken = lines[bug.line - 1]
    fixed = broken[: bug.column] + bug.old + broken[bug.column + len(bug.new) :]
    replies = [
        *([f"$ sed -n {bug.line}p {bug.path}"] if hint == "line" else _look(bug.path, lines, bug.line)),
        f"edit {bug.path} {bug.line}\n+{fixed}",
        "test",
        "submit",
    ]

    def reply(dialogue: Sequence[Message]) -> str:
        return replies[sum(message.role == "assistant" for message in dialogue)]

    return reply


def _look(path: str, lines: Sequence[str], number: int) -> list[str]:
    """Find the functions of a file, then read the one around a line, with the numbers of its lines."""
    starts = [1, *(n for n, line in enumerate(lines, start=1) if "def " in line)]
    first = max(start for start in starts if start <= number)
    last = min((start - 1 for start in starts if start > number), default=len(lines))
    return [f"$ grep -n 'def ' {path}", f"$ cat -n {path} | sed -n {first},{last}p"]


def read_action(text: str) -> ToolCall | None:
    """Read the first action of a reply in the text protocol."""
    fence = _FENCE.search(text)
    lines = text.split("\n")
    for number, line in enumerate(lines):
        stripped = line.strip()
        if line.startswith("$ "):
            commands = [each[2:] for each in lines[number:] if each.startswith("$ ")]
            return ToolCall(name="shell", arguments={"command": "\n".join(commands)})
        if stripped.startswith("```") and fence:
            return ToolCall(name="shell", arguments={"command": fence[1]})
        if edit := _EDIT.fullmatch(line):
            return ToolCall(name="edit", arguments=_read_edit(edit[1], edit[2], lines[number + 1 :]))
        if stripped.rstrip(".!") in ("test", "submit"):
            return ToolCall(name=stripped.rstrip(".!"), arguments={})
    return None


def _read_edit(path: str, line_number: str | None, lines: Sequence[str]) -> dict[str, str | int]:
    old: list[str] = []
    new: list[str] = []
    for line in lines:
        if line[:1] not in ("-", "+"):
            break
        (old if line[0] == "-" else new).append(line[1:])
    arguments: dict[str, str | int] = {"path": path, "new": "\n".join(new)}
    return arguments | ({"line": int(line_number)} if line_number else {}) | ({"old": "\n".join(old)} if old else {})


class SweEnv:
    """One repo to fix."""

    def __init__(self, world: Swe, sandbox: Sandbox, task: RepoTask, where: str) -> None:
        self._world = world
        self._where = where
        self._sandbox = sandbox
        self._task = task
        self._toolbox = Toolbox(self)
        self._session: Session | None = None
        self._turn = 0
        self._num_edits = 0
        self._said = hashlib.sha256()
        if sandbox.can_fork:  # without it, whoever branches plays the replies again
            self.fork = self._fork

    async def start(self) -> list[Message]:
        rules = RULES if self._world.protocol == "text" else f"Fix the repo.\n{self._toolbox.describe()}"
        statement = self._task.statement
        if self._where:  # only one file is named, so the list of files adds nothing
            statement = f"{statement.rpartition(FILES)[0]}{self._where}"
        return [system(rules), user(shorten_middle(statement, 4 * self._world.observation_chars))]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        self._said.update(reply.content.encode("utf-8", "replace") + b"\0")
        parsed = self._read(reply)
        is_last = self._turn >= self._world.max_turns
        if not parsed.calls:
            hint = parsed.problem or "No action found. Write $ and a command, edit, test or submit."
            return await self._judge() if is_last else EnvStep(messages=[user(hint)], is_unparsable=True)
        call, before = parsed.calls[0], self._num_edits
        if call.name == "submit":
            return as_action(await self._judge())
        answer = await self._toolbox.call(call)
        is_first_edit = before == 0 and self._num_edits == 1
        reward = {"format": self._world.format_reward} if is_first_edit else {}
        if is_last:
            return as_action(await self._judge(reward))
        return as_action(EnvStep(messages=[answer], reward=reward))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def state_key(self) -> str:
        """The whole dialogue, because the shell's state depends on all of it."""
        return f"turn {self._turn} {self._said.hexdigest()[:16]}"

    def _fork(self) -> SweEnv:
        """An env that goes on from here in a fork of the shell."""
        other = SweEnv(self._world, self._sandbox, self._task, self._where)
        other._turn, other._num_edits, other._said = self._turn, self._num_edits, self._said.copy()
        other._session = self._session.fork() if self._session is not None else None
        return other

    def _read(self, reply: Message) -> ParsedReply:
        if self._world.protocol == "tool_call" or reply.tool_calls:
            return self._toolbox.read(reply)
        action = read_action(reply.content)
        return ParsedReply(reply.content, (action,) if action else (), None)

    @property
    def _shell(self) -> Session:
        """The shell. It is opened at the first command, so that attempts without one cost nothing."""
        if self._session is None:
            self._session = self._sandbox.open(files=self._task.files)
        return self._session

    @tool(timeout_s=600)
    async def shell(self, command: str) -> str:
        """Run a command in a shell that keeps its folder and variables.

        Args:
            command: Such as grep -rn total .
        """
        try:
            result = await self._shell.run(command, self._world.command_s)
        except DataError as error:
            raise ToolError(str(error)) from error
        return result.to_text(self._world.observation_chars)

    @tool
    async def edit(self, path: str, new: str, old: str = "", line: int = 0) -> str:
        """Replace lines of a file: the one with a number, or those that read as old; neither makes a new file.

        Args:
            path: Of the file, from the top of the repo.
            new: Whole lines as they should be.
            old: Whole lines as they are now; they must stand there exactly once.
            line: Its number, from 1.
        """

        def change(files: FileTree) -> int:
            text, number = _edited(_read_text(files, path), old, new, line)
            files.write(path, text.encode("utf-8", "surrogateescape"))
            return number

        try:
            number = await self._shell.with_files(change)
        except (DataError, OSError) as error:
            raise ToolError(f"{path[:80]}: {error.strerror if isinstance(error, OSError) else error}") from error
        self._num_edits += 1
        return f"line {number} changed." if old or line else "written."

    @tool(timeout_s=600)
    async def test(self) -> str:
        """Run the tests of the repo."""
        files = await self._work()
        report = await run_suite(self._sandbox, files, self._task.shown_tests, self._task.runner, self._suite_limits())
        if report.verdict:
            return f"The tests did not come to their end: {report.verdict}."
        passed = len(report.problems) - len(report.failed)
        lines = [f"{passed} of {len(report.problems)} tests pass."]
        lines += [f"{test.removeprefix('tests.')}: {problem}" for test, problem in sorted(report.failed.items())[:3]]
        return shorten_middle("\n".join(lines), self._world.observation_chars)

    @tool
    async def submit(self) -> str:
        """Say that the repo is fixed; this is the end."""
        return ""

    async def _work(self) -> Mapping[str, bytes]:
        """The repo with the policy's changes."""
        if self._session is None:
            return self._task.files
        try:
            return await self._session.with_files(
                lambda files: files.read_all(max_bytes=_MAX_WORK_BYTES, skip_folders=SKIPPED_FOLDERS)
            )
        except DataError as error:
            raise ToolError(str(error)) from error

    def _suite_limits(self) -> Limits:
        return Limits(
            wall_s=2 * self._world.command_s,
            cpu_s=max(1, round(2 * self._world.command_s)),
            processes=32,
            file_bytes=32 << 20,
            disk_bytes=128 << 20,
        )

    async def _judge(self, reward: dict[str, float] | None = None) -> EnvStep:
        """Run shown and hidden tests in a new copy. A repo without changes is not fixed, nor is one that has become too
        large to copy."""
        try:
            files = fresh_copy(self._task, await self._work()) if self._session is not None else None
        except ToolError:
            files = None
        if files is None:
            return EnvStep(reward={**(reward or {}), "outcome": 0.0}, terminated=True, is_success=False)
        task = self._task
        report = await run_suite(self._sandbox, files, task.judged_tests, task.runner, self._suite_limits())
        fixed, kept = report.share_passed(task.fail_to_pass), report.share_passed(task.pass_to_pass)
        is_success = not report.verdict and fixed == kept == 1.0
        info = {"fail_to_pass_share": fixed, "pass_to_pass_share": kept, "edits": float(self._num_edits)}
        return EnvStep(
            reward={**(reward or {}), "outcome": float(is_success)},
            terminated=True,
            is_success=is_success,
            info=info,
        )


def _read_text(files: FileTree, path: str) -> str | None:
    """Read a file of the repo. None if there is no such file."""
    try:
        return files.read(path).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None


def _edited(text: str | None, old: str, new: str, line: int) -> tuple[str, int]:
    """Return the file after the edit, and the number of the first changed line."""
    if text is None:
        if old or line:
            raise ToolError("there is no such file")
        return f"{new}\n", 1
    lines = text.split("\n")
    if line > len(lines) or line < 0:
        raise ToolError(f"the file has {len(lines)} lines")
    wanted = old.split("\n") if old else lines[line - 1 : line]
    place = line - 1 if line else _find(lines, old)
    if lines[place : place + len(wanted)] != wanted:
        raise ToolError(f"line {line} is {lines[place]!r}")
    lines[place : place + len(wanted)] = new.split("\n") if new else []
    return "\n".join(lines), place + 1


def _find(lines: Sequence[str], old: str) -> int:
    """Find the old lines. They must occur exactly once."""
    if not old:
        raise ToolError("the file is there already; say which line to replace")
    wanted = old.split("\n")
    places = [n for n in range(len(lines) - len(wanted) + 1) if list(lines[n : n + len(wanted)]) == wanted]
    if len(places) > 1:
        raise ToolError(f"these lines stand there {len(places)} times; say which by number")
    if not places:
        near = difflib.get_close_matches(wanted[0], lines, n=1)
        raise ToolError(f"no such lines{f'; the nearest is {near[0]!r}' if near else ''}")
    return places[0]
