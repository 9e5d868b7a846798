"""Use a tool: let the calculator work it out, then say what it said.

    system     Use the calculator. Write calc(2*3) and wait. Then write Answer: 6
    user       What is 12 * 34?
    assistant  calc(12*34)
    tool       408                                                      format +0.1 (the first call that works)
    assistant  Answer: 408                                              outcome +1.0, terminated, a success

A wrong answer costs `wrong_penalty` and ends the attempt. A right answer without a working call is worth 0 and is not a
success, because the task is to use the tool. `max_turns` turns without an answer end the attempt with 0. A reply with a
call counts as a call, whatever else it says, so the policy cannot invent the result in the same reply. A reply with
neither a call nor an answer is flagged as unparsable.

`protocol="line"` reads `calc(12*34)`, which a small model learns quickly; `protocol="tool_call"` reads
`<tool_call>{"name": "calc", "arguments": {"expression": "12*34"}}</tool_call>`. One problem in five is held out.
"""

from __future__ import annotations

import ast
import copy
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.envs.tools import ParsedReply, Toolbox, ToolError, format_tool_call, tool
from turnwise.errors import ConfigError
from turnwise.trajectory import Message, ToolCall

MAX_EXPRESSION_LENGTH = 64

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_SIGNS = "+-*"
_ALLOWED = re.compile(r"[0-9+\-*() ]+")
_LINE_CALL = re.compile(r"\bcalc\(([^\n]{0,200})\)")
_ANSWER = re.compile(r"\banswer:\s*(-?[0-9]{1,18})(?![0-9])", re.IGNORECASE)


def evaluate(expression: str) -> int:
    """Compute an expression of whole numbers, + - * and brackets from its syntax tree. No code is run."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION_LENGTH}")
    if not _ALLOWED.fullmatch(expression):
        raise ToolError("only whole numbers, + - * and brackets")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ToolError(f"cannot read {expression!r}") from error
    return _evaluate(tree.body)


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ToolError("only whole numbers, + - * and brackets")


@tool
async def calc(expression: str) -> str:
    """Work out an expression with whole numbers, + - * and brackets.

    Args:
        expression: Such as 12*34.
    """
    return str(evaluate(expression))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculator:
    """The world `calculator`."""

    name: ClassVar[str] = "calculator"
    difficulties: ClassVar[Levels] = tuple({"max_digits": count} for count in (1, 2, 3, 5, 9))

    max_digits: int = 3
    """Most digits of either operand."""
    operators: str = _SIGNS
    """Any of + - *."""
    protocol: Literal["line", "tool_call"] = "line"
    max_turns: int = 3
    format_reward: float = 0.1
    """Reward for the first call that works."""
    wrong_penalty: float = 0.5
    """Penalty for a wrong answer. If most answers are wrong, a high penalty teaches a policy not to answer."""
    demonstration_skill: float = 1.0
    """How often a demonstration computes the given problem, not another one. It always answers the result."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_digits <= 9:
            raise ConfigError(f"max_digits={self.max_digits}; expected 1 to 9")
        if not self.operators or set(self.operators) - set(_SIGNS):
            raise ConfigError(f"operators={self.operators!r}; expected some of {_SIGNS}")
        if self.max_turns < 2:
            raise ConfigError(f"max_turns={self.max_turns}; expected at least 2: one to call, one to answer")
        if self.wrong_penalty < 0:
            raise ConfigError(f"wrong_penalty={self.wrong_penalty}; expected 0 or more")
        check_fractions(self, "demonstration_skill")

    @property
    def max_tokens(self) -> int:
        return 24 if self.protocol == "line" else 64

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> CalculatorEnv:  # noqa: ARG002 - nothing is random once the task is drawn
        return CalculatorEnv(self, task.data["expression"])

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        def player(task: Task) -> ScriptedPlayer:
            rng = random_for("demo", seed, task.id)
            is_skilled = rng.random() < self.demonstration_skill
            return self._player(task.data["expression"] if is_skilled else self._draw_expression(rng))

        return play_demonstrations(self, player, count, seed)

    def _draw_expression(self, rng: random.Random) -> str:
        left, right = (rng.randrange(10 ** rng.randint(1, self.max_digits)) for _ in range(2))
        return f"{left} {rng.choice(self.operators)} {right}"

    def _draw_task(self, rng: random.Random) -> Task:
        expression = self._draw_expression(rng)
        return Task(id=f"calc-{expression.replace(' ', '')}", data={"expression": expression})

    def _player(self, expression: str) -> ScriptedPlayer:
        compact = expression.replace(" ", "")
        call = f"calc({compact})" if self.protocol == "line" else format_tool_call("calc", expression=compact)

        def reply(dialogue: Sequence[Message]) -> str:
            return f"Answer: {dialogue[-1].content}" if dialogue[-1].role == "tool" else call

        return reply


class CalculatorEnv:
    """One problem."""

    def __init__(self, world: Calculator, expression: str) -> None:
        self._world = world
        self._expression = expression
        self._target = evaluate(expression)
        self._toolbox = Toolbox(calc)
        self._turn = 0
        self._result: str | None = None  # the result of the last call that worked

    async def start(self) -> list[Message]:
        if self._world.protocol == "line":
            rules = "Use the calculator. Write calc(2*3) and wait. Then write Answer: 6"
        else:
            rules = f"{self._toolbox.describe()}\nCall calc and wait. Then write Answer: 6"
        return [system(rules), user(f"What is {self._expression}?")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        parsed = self._read(reply)
        if parsed.calls:
            return as_action(await self._run(parsed.calls))
        answers = set(_ANSWER.findall(parsed.content))
        if parsed.problem is None and len(answers) == 1:
            return self._judge(int(answers.pop()))
        hint = parsed.problem or "Write a call of calc, or Answer: and the number."
        return self._go_on([user(hint)], is_unparsable=True)

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        return f"result {self._result} turn {self._turn}"

    def fork(self) -> CalculatorEnv:
        return copy.copy(self)  # nothing else of it ever changes

    def _read(self, reply: Message) -> ParsedReply:
        if self._world.protocol == "tool_call" or reply.tool_calls:
            return self._toolbox.read(reply)
        calls = tuple(
            ToolCall(name="calc", arguments={"expression": text}) for text in _LINE_CALL.findall(reply.content)
        )
        return ParsedReply(reply.content, calls[:1], None)

    async def _run(self, calls: Sequence[ToolCall]) -> EnvStep:
        messages = await self._toolbox.call_all(calls[:1])  # only one call, because the policy is told to wait
        if messages[0].content.startswith("error:"):
            return self._go_on(messages)
        is_first, self._result = self._result is None, messages[0].content
        return self._go_on(messages, format_reward=self._world.format_reward if is_first else 0.0)

    def _judge(self, answer: int) -> EnvStep:
        is_right, used_calc = answer == self._target, self._result is not None
        outcome = (1.0 if used_calc else 0.0) if is_right else -self._world.wrong_penalty
        info = {"used_calc": float(used_calc)}
        return EnvStep(
            reward={"outcome": outcome},
            terminated=True,
            is_success=is_right and used_calc,
            info=info,
            labels={"answer": str(answer)},
        )

    def _go_on(self, messages: list[Message], *, format_reward: float = 0.0, is_unparsable: bool = False) -> EnvStep:
        is_last = self._turn >= self._world.max_turns
        return EnvStep(
            messages=messages,
            reward={"format": format_reward},
            terminated=is_last,
            is_success=False if is_last else None,
            is_unparsable=is_unparsable,
        )
