"""Repos and tickets for `repository`, drawn from a random generator. All JSON.

A repo is a list of functions in the order in which they were written: each calls at most one earlier function, of its
own file or of an earlier one. A ticket starts from a fresh checkout of everything that was merged before it.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.library.repository_code import CodeError, Program

FILES = ("shop", "bank", "mail", "farm", "port", "mill", "club", "camp")
NAMES = (
    *("fee", "tip", "cut", "pay", "due", "net", "lot", "cap", "top", "low", "mid", "far", "old", "big", "sum", "rate"),
    *("cost", "debt", "gain", "loss", "rent", "toll", "levy", "fine", "bill", "duty", "loan", "bond", "wage", "sale"),
    *("bid", "ask", "mark", "peak", "base", "rise", "drop", "half", "step", "turn"),
)
NUMBERS = (2, 5, 7)
"""What every function is tested with."""
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Function = Mapping[str, Any]
"""file, name, calls (another function's name; empty: none), operator, constant."""


@dataclass(frozen=True, slots=True)
class RepoSize:
    """How big a repo is, and what its tickets are like."""

    files: int
    functions: int
    """Functions of each file."""
    tickets: int
    depth: int
    """Most calls between the function that a ticket names and the one that is broken."""
    renames: float
    """Share of tickets that rename a function, and the others mend one."""
    has_comments: bool
    """A comment above each function says what it is. Else only the numbers of the tests do."""


LEVELS: tuple[RepoSize, ...] = (
    RepoSize(1, 1, 1, depth=0, renames=0.0, has_comments=True),
    RepoSize(1, 2, 2, depth=0, renames=0.0, has_comments=True),
    RepoSize(2, 2, 4, depth=0, renames=0.0, has_comments=True),
    RepoSize(2, 2, 6, depth=1, renames=0.2, has_comments=True),
    RepoSize(3, 2, 13, depth=1, renames=0.25, has_comments=True),
    RepoSize(4, 2, 20, depth=2, renames=0.25, has_comments=True),
    RepoSize(5, 3, 24, depth=3, renames=0.3, has_comments=True),
    RepoSize(5, 3, 26, depth=3, renames=0.3, has_comments=False),
    RepoSize(6, 3, 30, depth=4, renames=0.35, has_comments=False),
    RepoSize(7, 4, 36, depth=5, renames=0.35, has_comments=False),
    RepoSize(8, 4, 44, depth=6, renames=0.4, has_comments=False),
)
"""From one line to change in one file, to six files that call each other and say nothing about themselves."""


def draw_repo(size: RepoSize, rng: random.Random) -> dict[str, Any]:
    """A repo and its tickets, as JSON values."""
    names = rng.sample(NAMES, size.files * size.functions)
    functions: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        file = FILES[index // size.functions]
        near = [one["name"] for one in functions[-2 * size.functions :]]
        short = [one for one in near if len(call_chain(functions, one)) <= size.depth + 1]
        calls = rng.choice(short) if short and rng.random() < 0.8 else ""
        functions.append({"file": file, "name": name, "calls": calls, **_draw_step(rng)})
    tickets: list[dict[str, Any]] = []
    now: list[Function] = list(functions)
    for _ in range(size.tickets):
        ticket = _draw_ticket(now, size, rng)
        tickets.append({**ticket, "actions": _num_actions(now, ticket, has_comments=size.has_comments)})
        now = _after(now, ticket)
    return {"functions": functions, "tickets": tickets}


def _draw_step(rng: random.Random) -> dict[str, Any]:
    return {"operator": rng.choice(tuple(_OPERATORS)), "constant": rng.randint(2, 9)}


def _draw_ticket(functions: Sequence[Function], size: RepoSize, rng: random.Random) -> dict[str, Any]:
    if rng.random() < size.renames:
        taken = {one["name"] for one in functions}
        return {"rename": rng.choice(functions)["name"], "to": rng.choice([one for one in NAMES if one not in taken])}
    named = rng.choice(functions)["name"]
    broken = rng.choice(call_chain(functions, named)[: size.depth + 1])
    by_name = {one["name"]: one for one in functions}
    while True:
        wrong = _draw_step(rng)
        change = {**by_name, broken: {**by_name[broken], **wrong}}
        is_one_change = sum(wrong[key] != by_name[broken][key] for key in wrong) == 1
        if is_one_change and _value(by_name, named, NUMBERS[0]) != _value(change, named, NUMBERS[0]):  # 2 + 2 is 2 * 2
            return {"named": named, "broken": broken, **wrong}


def _value(by_name: Mapping[str, Function], name: str, number: int) -> int:
    """What a function should give."""
    one = by_name[name]
    inner = _value(by_name, one["calls"], number) if one["calls"] else number
    return _OPERATORS[one["operator"]](inner, one["constant"])


def _num_actions(functions: Sequence[Function], ticket: Mapping[str, Any], *, has_comments: bool) -> int:
    """Actions of the script: open what is needed, edit, test; what is renamed is looked for first."""
    if "broken" in ticket:
        return len(way_to(functions, ticket["named"], ticket["broken"])) + 2
    old = ticket["rename"]
    home = next(one["file"] for one in functions if one["name"] == old)
    callers = [one["file"] for one in functions if one["calls"] == old]
    num_lines = (1 + len(callers)) * (1 + has_comments) + len(set(callers) - {home})  # one import in each other file
    return len({home, *callers}) + num_lines + 2


def way_to(functions: Sequence[Function], named: str, broken: str) -> list[str]:
    """The files to read one after the other to find the broken function, beginning with the one that is told."""
    home = {one["name"]: one["file"] for one in functions}
    chain = call_chain(functions, named)
    return list(dict.fromkeys(home[name] for name in chain[: chain.index(broken) + 1]))


def merged(repo: Mapping[str, Any], count: int) -> list[Function]:
    """The functions after the first `count` tickets. Mended ones are as they were; renamed ones are not."""
    functions: list[Function] = list(repo["functions"])
    for ticket in repo["tickets"][:count]:
        functions = _after(functions, ticket)
    return functions


def _after(functions: list[Function], ticket: Mapping[str, Any]) -> list[Function]:
    if "rename" not in ticket:
        return functions
    old, new = ticket["rename"], ticket["to"]
    return [{**one, **{key: new for key in ("name", "calls") if one[key] == old}} for one in functions]


def write_files(
    functions: Sequence[Function], *, has_comments: bool, broken: str = "", wrong: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The text of each file: imports, then functions."""
    home = {one["name"]: one["file"] for one in functions}
    files: dict[str, list[Function]] = {}
    for one in functions:
        files.setdefault(one["file"], []).append(one)
    texts: dict[str, str] = {}
    for file, own in files.items():
        used = dict.fromkeys(one["calls"] for one in own if one["calls"] and home[one["calls"]] != file)
        lines = [f"from {home[name]} import {name}" for name in used]
        for one in own:
            code = {**one, **(wrong or {})} if one["name"] == broken else one
            lines += [f"# {one['name']}(x) is {expression(one)}"] if has_comments else []
            lines += [f"def {one['name']}(x):", f"    return {expression(code)}"]
        texts[file] = "\n".join(lines)
    return texts


def expression(function: Function) -> str:
    inner = f"{function['calls']}(x)" if function["calls"] else "x"
    return f"{inner} {function['operator']} {function['constant']}"


def call_chain(functions: Sequence[Function], name: str) -> list[str]:
    """The function, what it calls, what that calls, and so on."""
    calls = {one["name"]: one["calls"] for one in functions}
    found = [name]
    while calls[found[-1]]:
        found.append(calls[found[-1]])
    return found


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket as work begins: what is told, the files, and what its tests will ask."""

    text: str
    files: Mapping[str, str]
    functions: Mapping[str, Function]
    """By name, as they are before the ticket is done."""
    named: str
    """The function whose tests come first."""
    broken: str
    """The function to mend; empty: the ticket renames one."""
    old: str
    """The name to replace; empty: the ticket mends a function."""
    tests: Sequence[tuple[str, str, Sequence[int]]]
    """File, name and right values at `NUMBERS` of every function."""

    def judge(self, files: Mapping[str, str]) -> TicketVerdict:
        """Run all tests. A renamed function must also be named nowhere."""
        program = Program(files)
        failing: dict[str, str] = {}
        for file, name, wanted in self.tests:
            reason = _failure(program, file, name, wanted)
            if reason:
                failing[name] = reason
        reason = next(iter(failing.values()), "")
        left = places(files, self.old) if self.old else {}
        if left and not reason:
            reason = f"{next(iter(left))}.py still says {self.old}."
        return TicketVerdict(tuple(failing), reason)


@dataclass(frozen=True, slots=True)
class TicketVerdict:
    """What the tests of a ticket say."""

    failing: tuple[str, ...]
    """Names of the functions whose tests fail."""
    reason: str
    """Why the first of them fails, as it is told; empty: all is well."""


def open_ticket(repo: Mapping[str, Any], index: int, *, has_comments: bool) -> Ticket:
    """Ticket `index`, on a fresh checkout of everything that was merged before."""
    data, before, after = repo["tickets"][index], merged(repo, index), merged(repo, index + 1)
    named, broken, old = data.get("named") or data["to"], data.get("broken", ""), data.get("rename", "")
    wrong = {key: data[key] for key in ("operator", "constant") if key in data}
    files = write_files(before, has_comments=has_comments, broken=broken, wrong=wrong)
    right, functions = ({one["name"]: one for one in state} for state in (after, before))
    order = sorted(after, key=lambda one: one["name"] != named)
    tests = [(one["file"], one["name"], [_value(right, one["name"], number) for number in NUMBERS]) for one in order]
    head = f"Ticket {index + 1} of {len(repo['tickets'])}:"
    text = f"{head} rename {old} to {named}."
    if broken:
        file, name, wanted = tests[0]
        text = f"{head} mend {name} in {file}. {_failure(Program(files), file, name, wanted)}"
    return Ticket(text, files, functions, named, broken, old, tests)


def _failure(program: Program, file: str, name: str, wanted: Sequence[int]) -> str:
    """Why a function's test fails; empty if it passes."""
    for number, value in zip(NUMBERS, wanted, strict=True):
        try:
            got = program.call(file, name, number)
        except CodeError as error:
            return f"{error}."
        if got != value:
            return f"{name}({number}) is {got}, not {value}."
    return ""


def places(files: Mapping[str, str], word: str) -> dict[str, list[int]]:
    """The lines of each file that have the word, from 1 on."""
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    found = {
        file: [number for number, line in enumerate(text.splitlines(), start=1) if pattern.search(line)]
        for file, text in files.items()
    }
    return {file: lines for file, lines in found.items() if lines}
