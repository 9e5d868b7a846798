"""Repos and tickets for `repository`, drawn from a random generator. All JSON.

A repo is a list of functions in the order in which they were written: each calls at most one earlier function, of its
own file or of an earlier one. A ticket starts from a fresh checkout of everything that was merged before it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
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
_OPERATORS = ("+", "-", "*")

Function = Mapping[str, Any]
"""file, name, calls (another function's name; empty: none), operator, constant."""


@dataclass(frozen=True, slots=True)
class Size:
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


LEVELS: tuple[Size, ...] = (
    Size(1, 1, 1, depth=0, renames=0.0, has_comments=True),
    Size(1, 2, 2, depth=0, renames=0.0, has_comments=True),
    Size(2, 2, 4, depth=0, renames=0.0, has_comments=True),
    Size(2, 2, 6, depth=1, renames=0.2, has_comments=True),
    Size(3, 2, 13, depth=1, renames=0.25, has_comments=True),
    Size(4, 2, 20, depth=2, renames=0.25, has_comments=True),
    Size(5, 3, 24, depth=3, renames=0.3, has_comments=True),
    Size(5, 3, 26, depth=3, renames=0.3, has_comments=False),
    Size(6, 3, 30, depth=4, renames=0.35, has_comments=False),
    Size(7, 4, 36, depth=5, renames=0.35, has_comments=False),
    Size(8, 4, 44, depth=6, renames=0.4, has_comments=False),
)
"""From one line to change in one file, to six files that call each other and say nothing about themselves."""


def draw_repo(size: Size, rng: random.Random) -> dict[str, Any]:
    """A repo and its tickets, as JSON values."""
    names = rng.sample(NAMES, size.files * size.functions)
    functions: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        file = FILES[index // size.functions]
        near = [one["name"] for one in functions[-2 * size.functions :]]
        short = [one for one in near if len(call_chain(functions, one)) <= size.depth + 1]
        calls = rng.choice(short) if short and rng.random() < 0.8 else ""
        functions.append({"file": file, "name": name, "calls": calls, **_draw_step(rng)})
    repo: dict[str, Any] = {"functions": functions, "tickets": []}
    for _ in range(size.tickets):
        repo["tickets"].append(_draw_ticket(repo, size, rng))
    return repo


def _draw_step(rng: random.Random) -> dict[str, Any]:
    return {"operator": rng.choice(_OPERATORS), "constant": rng.randint(2, 9)}


def _draw_ticket(repo: Mapping[str, Any], size: Size, rng: random.Random) -> dict[str, Any]:
    functions = merged(repo, len(repo["tickets"]))
    if rng.random() < size.renames:
        taken = {one["name"] for one in functions}
        return {"rename": rng.choice(functions)["name"], "to": rng.choice([one for one in NAMES if one not in taken])}
    named = rng.choice(functions)["name"]
    place = rng.choice(call_chain(functions, named)[: size.depth + 1])
    broken = next(one for one in functions if one["name"] == place)
    right = {"operator": broken["operator"], "constant": broken["constant"]}
    while True:
        wrong = _draw_step(rng)
        if sum(wrong[key] != right[key] for key in right) == 1 and _shows(functions, named, broken["name"], wrong):
            return {"named": named, "broken": broken["name"], **wrong}


def _shows(functions: Sequence[Function], named: str, broken: str, wrong: Mapping[str, Any]) -> bool:
    """Whether the first test of `named` sees the change: 2 + 2 is 2 * 2."""
    change = [{**one, **wrong} if one["name"] == broken else one for one in functions]
    files = [write_files(state, has_comments=False) for state in (functions, change)]
    file = next(one["file"] for one in functions if one["name"] == named)
    return len({Program(texts).call(file, named, NUMBERS[0]) for texts in files}) == 2


def merged(repo: Mapping[str, Any], count: int) -> list[Function]:
    """The functions after the first `count` tickets. Mended ones are as they were; renamed ones are not."""
    functions: list[Function] = list(repo["functions"])
    for ticket in repo["tickets"][:count]:
        if "rename" in ticket:
            functions = [_renamed(one, ticket["rename"], ticket["to"]) for one in functions]
    return functions


def _renamed(function: Function, old: str, new: str) -> Function:
    return {**function, **{key: new for key in ("name", "calls") if function[key] == old}}


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

    def judge(self, files: Mapping[str, str]) -> Verdict:
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
        return Verdict(tuple(failing), reason)

    @property
    def way(self) -> list[str]:
        """The files to read one after the other to find the broken function, beginning with the one that is told."""
        chain = call_chain(list(self.functions.values()), self.named)
        return list(dict.fromkeys(self.functions[name]["file"] for name in chain[: chain.index(self.broken) + 1]))

    @property
    def num_actions(self) -> int:
        """Actions of the script: open what is needed, edit, test; a rename is looked for first."""
        if self.broken:
            return len(self.way) + 2
        left = places(self.files, self.old)
        return len(left) + sum(map(len, left.values())) + 2


@dataclass(frozen=True, slots=True)
class Verdict:
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
    right = Program(write_files(after, has_comments=False))
    order = sorted(after, key=lambda one: one["name"] != named)
    tests = [(one["file"], one["name"], [right.call(one["file"], one["name"], n) for n in NUMBERS]) for one in order]
    functions = {one["name"]: one for one in before}
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
