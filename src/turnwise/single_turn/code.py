"""Small programming tasks, rewarded by the share of tests that the model's code passes.

The code runs in a sandbox (`code_runner.py`, docs/sandbox.md). Code that is wrong, hangs or crashes scores 0; a runner
that fails scores nothing and raises, for it has not found the code wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.sandbox import Sandbox, SandboxKind
from turnwise.errors import ConfigError
from turnwise.single_turn.adapter import RLAdapter
from turnwise.single_turn.code_runner import RunLimits, Test, run_tests

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """What to write, and calls with the values they should give."""

    question: str
    tests: tuple[Test, ...]

    def __post_init__(self) -> None:
        if not self.tests:
            raise ConfigError(f"the problem {self.question!r} has no tests; expected at least one")


PROBLEMS = (
    CodeProblem(
        "Write a function add(a, b) that returns the sum of a and b.",
        (Test("add(2, 3)", 5), Test("add(-1, 1)", 0), Test("add('a', 'b')", "ab")),
    ),
    CodeProblem(
        "Write a function is_even(n) that returns True when n is even and False when it is odd.",
        (Test("is_even(4)", True), Test("is_even(7)", False), Test("is_even(0)", True)),
    ),
    CodeProblem(
        "Write a function largest(numbers) that returns the largest number of a list.",
        (Test("largest([1, 9, 3])", 9), Test("largest([-5, -2])", -2), Test("largest([4])", 4)),
    ),
    CodeProblem(
        "Write a function backwards(text) that returns text in reverse order.",
        (Test("backwards('abc')", "cba"), Test("backwards('')", ""), Test("backwards('aa')", "aa")),
    ),
    CodeProblem(
        "Write a function count_vowels(text) that returns how many of the letters a, e, i, o, u are in text.",
        (Test("count_vowels('education')", 5), Test("count_vowels('rhythm')", 0), Test("count_vowels('aaa')", 3)),
    ),
    CodeProblem(
        "Write a function absolute(n) that returns n without its sign.",
        (Test("absolute(-3)", 3), Test("absolute(8)", 8), Test("absolute(0)", 0)),
    ),
)

EXAMPLE = """\
Q: Write a function double(n) that returns two times n.
A:
def double(n):
    return 2 * n

"""
"""Stands before every question; its blank line shows where an answer ends."""


class CodeAdapter(RLAdapter[CodeProblem]):
    """Problems with tests; the reward is the share of a problem's tests that the response's code passes."""

    def __init__(
        self,
        problems: Sequence[CodeProblem] = PROBLEMS,
        limits: RunLimits | None = None,
        sandbox: SandboxKind = "bubblewrap",
    ) -> None:
        """Refuses to be made where there is no bubblewrap, unless `sandbox="subprocess"` asks for limits alone."""
        if not problems:
            raise ConfigError("problems is empty; expected at least one CodeProblem")
        self.sandbox = Sandbox(sandbox)
        self.problems = tuple(problems)
        self.limits = limits or RunLimits()

    def build_dataset(self) -> list[CodeProblem]:
        return list(self.problems)

    def make_prompt(self, sample: CodeProblem, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"{EXAMPLE}Q: {sample.question}\nA:")

    def compute_reward(self, response_text: str, sample: CodeProblem) -> float:
        outcome = run_tests(extract_code(response_text), sample.tests, self.limits, self.sandbox)
        return outcome.num_passed / len(sample.tests)


def extract_code(response_text: str) -> str:
    """The code in a response: what stands in its first fence, else everything before the model asks itself more."""
    fenced = _FENCE.search(response_text)
    return fenced.group(1) if fenced else response_text.partition("\nQ:")[0]
