"""Small programming problems, composed of steps that have a text, Python code and a function.

    easy     Write solve(n). It returns n times 4, plus 3.
    medium   Write solve(numbers). It returns the sum of the numbers that are above 5.
    hard     Write solve(numbers). Take the numbers that are even, square each, and return the largest, or 0 when there
             are none.

The text of a problem describes its solution, so a model that knows a little Python can find it. The problem's name
seeds its tests, so the same problem always has the same tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.envs.splits import random_for

Level = Literal["easy", "medium", "hard", "mixed"]

LEVELS = ("easy", "medium", "hard")
NUM_VISIBLE, NUM_HIDDEN = 2, 6

_MAX_DRAWS = 200


@dataclass(frozen=True, slots=True)
class CodeStep:
    """One operation on a value."""

    words: str
    code: str
    """An expression with `{}` in place of the value."""
    apply: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedProblem:
    """A problem, its tests, and one solution."""

    key: str
    """A stable name of the problem."""
    question: str
    entry_point: str
    visible: tuple[tuple[str, str], ...]
    """Calls, each with the repr of the expected value."""
    hidden: tuple[tuple[str, str], ...]
    solution: str


def draw_problem(rng: random.Random, level: Level) -> GeneratedProblem:
    """Draw a problem of a level. `mixed` draws each level equally often."""
    level = rng.choice(LEVELS) if level == "mixed" else level
    if level == "easy":
        return _number_problem(rng) if rng.random() < 0.6 else _text_problem(rng)
    return _list_problem(rng, is_hard=level == "hard")


def _number_step(rng: random.Random) -> CodeStep:
    k = rng.randint(2, 9)
    return rng.choice(
        (
            CodeStep(f"plus {k}", f"{{}} + {k}", lambda n: n + k),
            CodeStep(f"minus {k}", f"{{}} - {k}", lambda n: n - k),
            CodeStep(f"times {k}", f"{{}} * {k}", lambda n: n * k),
            CodeStep("squared", "{} ** 2", lambda n: n**2),
            CodeStep(f"modulo {k}", f"{{}} % {k}", lambda n: n % k),
        )
    )


def _text_step(rng: random.Random) -> CodeStep:
    k, letter = rng.randint(2, 4), rng.choice("aeiorst")
    return rng.choice(
        (
            CodeStep("text backwards", "{}[::-1]", lambda t: t[::-1]),
            CodeStep("text in capitals", "{}.upper()", str.upper),
            CodeStep(f"the first {k} letters of text", f"{{}}[:{k}]", lambda t: t[:k]),
            CodeStep(f"the last {k} letters of text", f"{{}}[-{k}:]", lambda t: t[-k:]),
            CodeStep(f"text without every {letter}", f'{{}}.replace("{letter}", "")', lambda t: t.replace(letter, "")),
            CodeStep(f"how often {letter} is in text", f'{{}}.count("{letter}")', lambda t: t.count(letter)),
            CodeStep(f"text {k} times in a row", f"{{}} * {k}", lambda t: t * k),
            CodeStep(f"whether text ends with {letter}", f'{{}}.endswith("{letter}")', lambda t: t.endswith(letter)),
        )
    )


def _filter_step(rng: random.Random) -> CodeStep:
    k = rng.randint(1, 9)
    return rng.choice(
        (
            CodeStep("even", "{} % 2 == 0", lambda n: n % 2 == 0),
            CodeStep("odd", "{} % 2 == 1", lambda n: n % 2 == 1),
            CodeStep(f"above {k}", f"{{}} > {k}", lambda n: n > k),
            CodeStep(f"below {k}", f"{{}} < {k}", lambda n: n < k),
            CodeStep(f"not {k}", f"{{}} != {k}", lambda n: n != k),
            CodeStep(f"multiples of {k + 1}", f"{{}} % {k + 1} == 0", lambda n: n % (k + 1) == 0),
        )
    )


def _map_step(rng: random.Random) -> CodeStep:
    k = rng.randint(2, 9)
    return rng.choice(
        (
            CodeStep(f"add {k} to each", f"{{}} + {k}", lambda n: n + k),
            CodeStep(f"multiply each by {k}", f"{{}} * {k}", lambda n: n * k),
            CodeStep("square each", "{} ** 2", lambda n: n**2),
            CodeStep("negate each", "-{}", lambda n: -n),
        )
    )


_REDUCTIONS = (
    CodeStep("the sum", "sum({})", sum),
    CodeStep("how many there are", "len({})", len),
    CodeStep("the largest, or 0 when there are none", "max({}, default=0)", lambda v: max(v, default=0)),
    CodeStep("the smallest, or 0 when there are none", "min({}, default=0)", lambda v: min(v, default=0)),
    CodeStep("them as a sorted list", "sorted({})", sorted),
    CodeStep("them as a list, last one first", "{}[::-1]", lambda v: v[::-1]),
)


def _number_problem(rng: random.Random) -> GeneratedProblem:
    first, second = _number_step(rng), _number_step(rng)
    steps = [first] if rng.random() < 0.3 else [first, second]
    words = ", ".join(step.words for step in steps)
    expression = "n"
    for step in steps:
        expression = step.code.format(expression if expression == "n" else f"({expression})")

    def apply(n: int) -> int:
        for step in steps:
            n = step.apply(n)
        return n

    source = f"def solve(n):\n    return {expression}\n"
    near_misses: list[Callable[[Any], Any]] = [step.apply for step in steps] if len(steps) == 2 else [lambda n: n]
    return _make("n", f"It returns n {words}.", source, apply, lambda draw: draw.randint(-20, 40), near_misses)


def _text_problem(rng: random.Random) -> GeneratedProblem:
    step = _text_step(rng)
    source = f"def solve(text):\n    return {step.code.format('text')}\n"
    return _make("text", f"It returns {step.words}.", source, step.apply, _draw_word)


def _list_problem(rng: random.Random, *, is_hard: bool) -> GeneratedProblem:
    keep, reduce = _filter_step(rng), rng.choice(_REDUCTIONS)
    change = _map_step(rng) if is_hard else CodeStep("", "{}", lambda n: n)
    values = f"[{change.code.format('n')} for n in numbers if {keep.code.format('n')}]"
    source = f"def solve(numbers):\n    return {reduce.code.format(values)}\n"
    between = f", {change.words}," if is_hard else ""
    words = f"Take the numbers that are {keep.words}{between} and return {reduce.words}."

    def apply(numbers: list[int]) -> Any:
        return reduce.apply([change.apply(n) for n in numbers if keep.apply(n)])

    def without_filter(numbers: list[int]) -> Any:
        return reduce.apply([change.apply(n) for n in numbers])

    def without_change(numbers: list[int]) -> Any:
        return reduce.apply([n for n in numbers if keep.apply(n)])

    near_misses: list[Callable[[Any], Any]] = [without_filter, without_change, lambda _: reduce.apply([])]
    return _make("numbers", words, source, apply, _draw_numbers, near_misses)


def _draw_word(rng: random.Random) -> str:
    return "".join(rng.choice("aeiorstnlm") for _ in range(rng.randint(4, 9)))


def _draw_numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-5, 15) for _ in range(rng.randint(2, 7))]


def _make(
    argument: str,
    words: str,
    solution: str,
    apply: Callable[[Any], Any],
    draw_input: Callable[[random.Random], Any],
    near_misses: Sequence[Callable[[Any], Any]] = (),
) -> GeneratedProblem:
    """Choose tests with different inputs. Shown tests have different answers; each near miss fails a hidden test."""
    rng = random_for("code", words)
    drawn = {repr(value): value for value in (draw_input(rng) for _ in range(_MAX_DRAWS))}
    inputs = list(drawn.values())
    first = inputs.pop(0)
    second = next((value for value in inputs if repr(apply(value)) != repr(apply(first))), inputs[0])
    inputs.remove(second)
    constants: list[Callable[[Any], Any]] = [lambda _, shown=shown: apply(shown) for shown in (first, second)]
    telling = [_first_that_tells(inputs, apply, near_miss) for near_miss in (*near_misses, *constants)]
    chosen = {repr(value): value for value in [*telling, *inputs] if value is not None}
    hidden = list(chosen.values())[:NUM_HIDDEN]
    tests = [(f"solve({value!r})", repr(apply(value))) for value in (first, second, *hidden)]
    return GeneratedProblem(
        key=f"{argument}: {words}",
        question=f"Write solve({argument}). {words}",
        entry_point="solve",
        visible=tuple(tests[:NUM_VISIBLE]),
        hidden=tuple(tests[NUM_VISIBLE:]),
        solution=solution,
    )


def _first_that_tells(inputs: Sequence[Any], apply: Callable[[Any], Any], near_miss: Callable[[Any], Any]) -> Any:
    """An input on which a near miss is wrong. None if it is as good as the solution."""
    return next((value for value in inputs if repr(near_miss(value)) != repr(apply(value))), None)


def problem_levels() -> Sequence[str]:
    return (*LEVELS, "mixed")
