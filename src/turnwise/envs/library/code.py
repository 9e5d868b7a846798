"""Write a function, read the test results, fix it, submit.

    system     Write the Python function in a ```python block. Tests answer it. When they pass, say submit.
    user       Write solve(n). It returns n times 4, plus 3.
               Tests: solve(5) == 23, solve(-2) == -5
    assistant  ```python
               def solve(n):
                   return n * 4
               ```                                                      format 0.1: the first code that can be tested
    user       0 of 2 tests pass. solve(5) gave 20, expected 23.
    assistant  ```python
               def solve(n):
                   return n * 4 + 3
               ```
    user       2 of 2 tests pass. Say submit, or write it again.
    assistant  submit                                                   outcome 1.0: all hidden tests pass

Code runs in a sandbox (docs/sandbox.md). Only the last code counts: `submit`, or the last turn, runs it against the
hidden tests. With `shell` the code is also the file solution.py in a sandbox session, where `$ COMMAND` can try and
change it; a fork of the env forks the session. Problems are generated (`code_problems.py`; one in five is held out, by
hash), or come from MBPP, HumanEval or APPS files (`code_data.py`): `path=` names a file, or a folder with train.jsonl
and test.jsonl.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.code_data import json_to_test, load_problems
from turnwise.envs.library.code_problems import Level, draw_problem, problem_levels
from turnwise.envs.sandbox import Limits, Sandbox, SandboxKind, Session
from turnwise.envs.sandbox.limits import shorten_middle
from turnwise.envs.sandbox.python_tests import CallTest, PythonTest, TestsOutcome, run_python_tests
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, draw_tasks, random_for
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message

RULES = "Write the Python function in a ```python block. Tests answer it. When they pass, say submit."
SHELL_RULES = (
    "Write the Python function in a ```python block: it becomes solution.py, and tests answer it. "
    "$ COMMAND runs in a shell beside it; test runs the tests again. When they pass, say submit."
)
NO_CODE = "Write the function in a ```python block, or say submit when it is done."
SOLUTION = "solution.py"

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SUBMIT = re.compile(r"^[ \t]*submit[ \t.!]*$", re.IGNORECASE | re.MULTILINE)
_CODE_LINE = re.compile(r"^(?:def |import |from |class |@)", re.MULTILINE)
_TEST = re.compile(r"^[ \t]*test[ \t.!]*$", re.IGNORECASE | re.MULTILINE)
_MAX_CODE_CHARS = 20_000
_SHOWN_CHARS = 400


def read_reply(text: str) -> tuple[str | None, bool]:
    """Return the code in a reply, if there is any, and whether the reply says submit."""
    fences = _FENCE.findall(text)
    rest = _FENCE.sub("\n", text)
    if fences:
        return fences[-1][:_MAX_CODE_CHARS], bool(_SUBMIT.search(rest))
    code = _CODE_LINE.search(text)
    says_submit = bool(_SUBMIT.search(text))
    if code is None:
        return None, says_submit
    return _SUBMIT.sub("", text[code.start() :])[:_MAX_CODE_CHARS], says_submit


def read_commands(text: str) -> str | None:
    """The commands of a reply that begins with one: all its lines that begin with $."""
    commands = [line[2:] for line in text.split("\n") if line.startswith("$ ")]
    return "\n".join(commands) if text.lstrip().startswith("$ ") and commands else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The world `code`."""

    name: ClassVar[str] = "code"
    difficulties: ClassVar[Levels] = (
        {"level": "easy"},
        {"level": "medium"},
        {"level": "hard"},
    )

    level: Level = "easy"
    """Level of generated problems."""
    path: Path | None = None
    """Problems from a file, in the layout of MBPP, HumanEval or APPS."""
    num_visible: int = 2
    """Number of tests to show, for problems from a file."""
    max_turns: int = 4
    max_tokens: int = 96
    format_reward: float = 0.1
    """Reward for the first reply with code that can be tested."""
    partial_credit: float = 0.0
    """Share of the outcome that is paid in proportion to the hidden tests passed. The rest is paid if all pass."""
    shell: bool = False
    """Also take `$ COMMAND`, in a session where the code is the file solution.py, and `test`."""
    command_s: float = 5.0
    """With `shell`: time limit of one command."""
    observation_chars: int = 600
    """With `shell`: the middle of a longer answer is left out."""
    sandbox: SandboxKind = "bubblewrap"
    """`subprocess` sets limits but does not isolate."""
    _sandbox: Sandbox = field(init=False, repr=False, compare=False)
    _from_file: Mapping[Split, Sequence[Task]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.level not in problem_levels():
            raise ConfigError(f"level={self.level!r}; expected {', '.join(problem_levels())}")
        if self.max_turns < 1 or self.num_visible < 1:
            raise ConfigError(f"max_turns={self.max_turns}, num_visible={self.num_visible}; expected at least 1")
        if not 0 <= self.partial_credit <= 1:
            raise ConfigError(f"partial_credit={self.partial_credit}; expected 0 to 1")
        if self.command_s <= 0 or self.observation_chars < 100:
            raise ConfigError(
                f"command_s={self.command_s}, observation_chars={self.observation_chars}; "
                "expected more than 0 s, and at least 100 characters"
            )
        tasks: Mapping[Split, Sequence[Task]] = {} if self.path is None else load_problems(self.path, self.num_visible)
        object.__setattr__(self, "_from_file", tasks)
        limits = Limits(wall_s=self.command_s, cpu_s=max(1, round(self.command_s)), output_bytes=1 << 18)
        object.__setattr__(self, "_sandbox", Sandbox(self.sandbox, limits=limits))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, self.level, split, seed)
        if self._from_file:
            return draw(self._from_file[split], count, rng)
        return draw_tasks(self._draw_task, split, count, rng)

    def make_env(self, task: Task, seed: int) -> CodeEnv:  # noqa: ARG002 - nothing is random once the task is drawn
        return CodeEnv(self, self._sandbox, task.data)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The solution, then `submit`. There is no wrong first try, because it would teach mistakes."""
        if self._from_file and not all(task.data["solution"] for task in self._from_file["train"]):
            return []
        return play_demonstrations(self, lambda task: self._player(task.data["solution"]), count, seed, concurrency=8)

    def _draw_task(self, rng: random.Random) -> Task:
        problem = draw_problem(rng, self.level)
        name = hashlib.sha256(problem.key.encode("utf-8")).hexdigest()[:12]
        data = {
            "question": problem.question,
            "entry_point": problem.entry_point,
            "visible": [list(test) for test in problem.visible],
            "hidden": [list(test) for test in problem.hidden],
            "setup": "",
            "solution": problem.solution,
        }
        return Task(id=f"code-{name}", data=data)

    def _player(self, solution: str) -> ScriptedPlayer:
        code = f"```python\n{solution.strip()}\n```"

        def reply(dialogue: Sequence[Message]) -> str:
            is_written = any(message.role == "assistant" for message in dialogue)
            return "submit" if is_written else code

        return reply


class CodeEnv:
    """One problem."""

    def __init__(self, world: Code, sandbox: Sandbox, data: Mapping[str, Any]) -> None:
        self._world = world
        self._sandbox = sandbox
        self._question = str(data["question"])
        self._setup = str(data["setup"])
        self._visible = tuple(json_to_test(item) for item in data["visible"])
        self._hidden = tuple(json_to_test(item) for item in data["hidden"])
        self._turn = 0
        self._code: str | None = None
        self._session: Session | None = None
        self._said = hashlib.sha256()
        if sandbox.can_fork or not world.shell:  # without it, whoever branches plays the replies again
            self.fork = self._fork

    async def start(self) -> list[Message]:
        tests = "\n".join(str(test) for test in self._visible)
        rules = SHELL_RULES if self._world.shell else RULES
        return [system(rules), user(f"{self._question}\nTests:\n{tests}")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        self._said.update(reply.content.encode("utf-8", "replace") + b"\0")
        is_last = self._turn >= self._world.max_turns
        command = read_commands(reply.content) if self._world.shell else None
        if command is not None:
            answer = await self._command(command)
            is_judged = is_last and self._code is not None
            return as_action(await self._judge({}) if is_judged else self._answer(answer, is_last=is_last))
        code, says_submit = read_reply(reply.content)
        is_first = code is not None and self._code is None
        if code is not None:
            await self._write(code)
        reward = {"format": self._world.format_reward} if is_first and _can_be_tested(code) else {}
        if self._code is not None and (says_submit or is_last):
            return replace(await self._judge(reward), is_action=code is not None)
        says_test = self._world.shell and bool(_TEST.search(reply.content))
        if self._code is None or (code is None and not says_test):
            return self._answer(NO_CODE, is_last=is_last, is_unparsable=True)
        outcome = await self._run(self._visible)
        return as_action(EnvStep(messages=[user(describe_outcome(outcome, self._visible))], reward=reward))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def state_key(self) -> str:
        """The last code and the number of turns played; with a shell the whole dialogue, on which its state depends."""
        seen = (self._code or "").encode("utf-8", "replace") if self._session is None else self._said.digest()
        return f"turn {self._turn} {hashlib.sha256(seen).hexdigest()[:16]}"

    def _fork(self) -> CodeEnv:
        """An env that goes on from here, in a fork of the shell if there is one."""
        other = copy.copy(self)
        other._said = self._said.copy()
        other._session = self._session.fork() if self._session is not None else None
        other.fork = other._fork
        return other

    def _answer(self, text: str, *, is_last: bool, is_unparsable: bool = False) -> EnvStep:
        """Go on, or end an attempt that has no code to judge."""
        is_success = False if is_last else None
        return EnvStep(messages=[user(text)], terminated=is_last, is_success=is_success, is_unparsable=is_unparsable)

    async def _command(self, command: str) -> str:
        """Run a command in the session, which is opened by the first one, and take over what became of the code."""
        if self._session is None:
            files = {SOLUTION: self._code} if self._code is not None else {}
            self._session = self._sandbox.open(files=files)
        try:
            result = await self._session.run(command, self._world.command_s)
        except DataError as error:
            return f"error: {error}"
        with contextlib.suppress(OSError):  # no such file, or something else of that name
            data = await self._session.with_files(lambda files: files.read(SOLUTION, max_bytes=_MAX_CODE_CHARS))
            self._code = data.decode("utf-8", "replace")
        return result.to_text(self._world.observation_chars)

    async def _write(self, code: str) -> None:
        self._code = code
        if self._session is not None:
            data = code.encode("utf-8", "replace")
            with contextlib.suppress(OSError):  # the policy may have made a folder of that name; the code counts
                await self._session.with_files(lambda files: files.write(SOLUTION, data))

    async def _run(self, tests: Sequence[PythonTest]) -> TestsOutcome:
        code = f"{self._setup}\n{self._code}" if self._setup else str(self._code)
        return await run_python_tests(self._sandbox, code, tests)

    async def _judge(self, reward: dict[str, float]) -> EnvStep:
        outcome = await self._run(self._hidden)
        share = outcome.num_passed / len(self._hidden)
        is_success = outcome.num_passed == len(self._hidden)
        earned = 1.0 if is_success else self._world.partial_credit * share
        info = {"hidden_tests_passed_share": share, "turns": float(self._turn)}
        return EnvStep(reward={**reward, "outcome": earned}, terminated=True, is_success=is_success, info=info)


def _can_be_tested(code: str | None) -> bool:
    try:
        compile(code or "", "<answer>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def describe_outcome(outcome: TestsOutcome, tests: Sequence[PythonTest]) -> str:
    """The test results as text for the policy: how many pass, and the values of the first ones that fail."""
    if outcome.ending != "finished":
        return f"0 of {len(tests)} tests pass. The code was {outcome.verdict}."
    lines = [f"{outcome.num_passed} of {len(tests)} tests pass."]
    if outcome.num_passed == len(tests):
        return f"{lines[0]} Say submit, or write it again."
    for test, is_passed, error, value in zip(tests, outcome.passed, outcome.errors, outcome.values, strict=True):
        if is_passed:
            continue
        what = test.call if isinstance(test, CallTest) else str(test)
        expected = f", expected {test.expected!r}" if isinstance(test, CallTest) else ""
        gave = f"raised {error}" if error is not None else f"gave {shorten_middle(str(value), 100)}"
        lines.append(f"{shorten_middle(what, 200)} {gave}{expected}.")
    if outcome.printed.strip():
        lines.append(f"It printed: {shorten_middle(outcome.printed.strip(), 200)}")
    return shorten_middle("\n".join(lines[:4]), _SHOWN_CHARS)
