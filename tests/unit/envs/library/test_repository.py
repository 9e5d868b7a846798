from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.repository import Repository, RepositoryEnv
from turnwise.envs.library.repository_code import CodeError, Program
from turnwise.envs.library.repository_tickets import LEVELS, NUMBERS, Ticket, open_ticket
from turnwise.errors import ConfigError
from turnwise.runtime.blocking import run_to_end

FUNCTIONS = [
    {"file": "shop", "name": "tip", "calls": "", "operator": "+", "constant": 2},
    {"file": "bank", "name": "fee", "calls": "tip", "operator": "+", "constant": 3},
]
TICKETS = [
    {"named": "fee", "broken": "fee", "operator": "-", "constant": 3, "actions": 3},
    {"rename": "tip", "to": "pay", "actions": 9},
]
BANK = "bank.py\n1 from shop import tip\n2 # fee(x) is tip(x) + 3\n3 def fee(x):\n4     return tip(x) {} 3"
RENAMING = (
    *("find tip", "open shop", "edit 1 # pay(x) is x + 2", "edit 2 def pay(x):"),
    *("open bank", "edit 1 from shop import pay", "edit 2 # fee(x) is pay(x) + 3", "edit 4 return pay(x) + 3"),
)


def make_env(tickets: list[dict[str, Any]] = TICKETS) -> RepositoryEnv:
    task = Task(id="t", data={"functions": FUNCTIONS, "tickets": tickets})
    return Repository(level=3, patience=3.0).make_env(task, seed=0)


def play(env: RepositoryEnv, *replies: str) -> list[EnvStep]:
    async def steps() -> list[EnvStep]:
        return [await env.step(assistant(reply)) for reply in replies]

    return run_to_end(steps())


def said(steps: list[EnvStep]) -> list[str]:
    return [message.content for step in steps for message in step.messages]


def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert run_to_end(env.start()) == [
        system("Work on the repo. Say open FILE, find WORD, edit LINE CODE, or test."),
        user("Files: shop, bank. Ticket 1 of 2: mend fee in bank. fee(2) is 1, not 7."),
    ]
    steps = play(env, "open bank", "edit 4 return tip(x) + 3", "test", *RENAMING, "test")
    assert said(steps)[:3] == [
        BANK.format("-"),
        BANK.format("+"),
        "All 2 tests pass. Done. Ticket 2 of 2: rename tip to pay.",
    ]
    assert said(steps)[3] == "tip: shop 1, 2; bank 1, 2, 4."
    assert [step.reward_parts["outcome"] for step in steps if step.reward_parts["outcome"]] == [0.5, 0.5]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)


def test_a_ticket_is_done_only_if_every_test_passes() -> None:
    env = make_env()
    constant = play(env, "open bank", "edit 4 return 7", "test")  # right for the number that was told, and no other
    assert said(constant)[-1] == "1 of 2 tests fail: fee. fee(5) is 7, not 10."
    elsewhere = play(env, "edit 4 return tip(x) - 3", "open shop", "edit 3 return x + 8", "test")
    assert said(elsewhere)[-1] == "1 of 2 tests fail: tip. tip(2) is 10, not 4."  # fee is right, and tip is broken


def test_a_rename_reaches_every_line_that_says_the_name() -> None:
    env = make_env(TICKETS[1:])
    *most, comment, last = RENAMING
    assert said(play(env, *most, last, "test"))[-1] == "bank.py still says tip."
    assert play(env, comment, "test")[-1].is_success


def test_a_new_ticket_starts_from_a_fresh_checkout() -> None:
    env = make_env([TICKETS[0], TICKETS[0]])
    play(env, "open bank", "edit 2 # nonsense", "edit 4 return tip(x) + 3", "test")
    assert said(play(env, "edit 4 return 1", "open bank")) == ["Open a file first.", BANK.format("-")]


def test_attempts_end_when_patience_does() -> None:
    steps = play(make_env(TICKETS[:1]), *["open bank"] * 9)
    assert [step.terminated for step in steps] == [False] * 8 + [True]
    assert steps[-1].is_success is False


@for_each(("reply", "told"), [
    ("open mill", "There is no mill.py. Files: shop, bank."),
    ("edit 1 x", "Open a file first."),
    ("open bank\nedit 9 x", "Say open FILE, find WORD, edit LINE CODE, or test."),
    ("please test", "Say open FILE, find WORD, edit LINE CODE, or test."),
    ("find pay", "pay: nowhere."),
])  # fmt: skip
def test_what_cannot_be_done_is_told_and_changes_nothing(reply: str, told: str) -> None:
    env = make_env()
    before = env.state_key().replace("turn 0", "turn 1")
    (step,) = play(env, reply)
    assert said([step]) == [told]
    assert step.is_unparsable == told.startswith("Say")
    assert env.state_key() == before


def test_lines_are_those_of_the_file_and_not_too_long() -> None:
    steps = play(make_env(), "open bank", "edit 5 x", "edit 0 x", f"edit 1 #{'a' * 80}")
    assert said(steps)[1:] == ["bank.py has lines 1 to 4."] * 2 + ["A line has at most 80 characters."]


@for_each(("code", "told"), [
    ("return __import__(x)", "bank.py has no __import__"),
    ("return open('f')", "line 4: not valid here"),
    ("import os", "line 3: only imports and functions of one number are known here"),
    ("return x.real", "line 3: only imports"),
    ("return fee(x) + 1", "a function calls itself"),
    ("return x * 99999999 * 99", "a result is too large"),
    ("return 9 * 9999999999", "line 3: only imports"),
    ("return x + 1 + 1 + 1 + 1 + 1 + 1 + 1", "line 3: only imports"),
    ("return (x", "not valid Python"),
    ("return 3x", "line 4: not valid here"),
    ("return y", "bank.py: y is not known"),
])  # fmt: skip
def test_code_that_is_not_known_here_fails_its_test_with_a_reason(code: str, told: str) -> None:
    assert told in said(play(make_env(), "open bank", f"edit 4 {code}", "test"))[-1]


def test_circles_of_imports_are_an_error() -> None:
    with pytest.raises(CodeError, match=r"shop\.py imports itself"):
        Program({"shop": "from bank import a", "bank": "from shop import b"}).call("shop", "a", 1)


def python_value(files: dict[str, str], file: str, name: str, number: int) -> int:
    """What Python itself makes of the files."""
    added: list[str] = []
    try:
        waiting = dict(files)
        while waiting:  # a file is loaded when all that it imports is
            for one, text in list(waiting.items()):
                needed = [line.split()[1] for line in text.splitlines() if line.startswith("from ")]
                if not set(needed) & set(waiting):
                    module = types.ModuleType(one)
                    sys.modules[one] = module
                    added.append(one)
                    exec(waiting.pop(one), vars(module))  # noqa: S102 - our own repo, as Python runs it
        return vars(sys.modules[file])[name](number)
    finally:
        for one in added:
            del sys.modules[one]


@for_each("level", [0, 3, 6, 10])
def test_the_interpreter_computes_what_python_computes(level: int) -> None:
    (task,) = Repository(level=level).tasks("train", 1, seed=level)
    for index in range(min(6, len(task.data["tickets"]))):
        ticket: Ticket = open_ticket(task.data, index, has_comments=LEVELS[level].has_comments)
        for one in ticket.functions.values():
            got = [Program(ticket.files).call(one["file"], one["name"], number) for number in NUMBERS]
            assert got == [python_value(dict(ticket.files), one["file"], one["name"], number) for number in NUMBERS]


@for_each("level", range(len(LEVELS)))
def test_the_script_does_every_ticket_in_the_actions_that_it_is_given(level: int) -> None:
    world = Repository(level=level, patience=1.0)
    (task,) = world.tasks("test", 1, seed=0)
    env = world.make_env(task, seed=0)
    steps: list[EnvStep] = []
    while not steps or not steps[-1].is_over:
        steps += play(env, env.demonstrate())
    assert len(steps) == sum(ticket["actions"] for ticket in task.data["tickets"])
    assert 3 <= len(steps) <= world.max_turns
    assert steps[-1].is_success
    assert steps[-1].info["tickets"] == LEVELS[level].tickets


def test_a_fork_goes_its_own_way() -> None:
    env = make_env()
    play(env, "open bank")
    twin = env.fork()
    play(twin, "edit 4 return tip(x) + 3", "test")
    assert said(play(env, "test"))[-1].startswith("1 of 2 tests fail")
    assert env.potential() == 0.0
    assert twin.potential() == 0.5


def test_a_script_of_less_skill_still_plays_the_same_for_the_same_seed() -> None:
    world = Repository(level=2, demonstration_skill=0.5)
    assert world.demonstrations(3, 0) == world.demonstrations(3, 0)
    longest = [sum(message.role == "assistant" for message in one) for one in world.demonstrations(8, 0)]
    assert max(longest) > 12  # the script alone needs 12


def test_a_summary_keeps_the_ticket_and_the_open_file() -> None:
    told = user("Files: shop, bank. Ticket 1 of 2: mend fee in bank. fee(2) is 1, not 7.")
    dialogue = [told, assistant("open bank"), user(BANK.format("-"))]
    assert Repository().summary(dialogue, 32) == "mend fee in bank. fee(2) is 1, not 7. bank is open."


@for_each("options", [{"level": 11}, {"files": 9}, {"tickets": -1}, {"patience": 0.5}, {"demonstration_skill": 2.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Repository(**options)
