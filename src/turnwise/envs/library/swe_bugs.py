"""Bugs for the repos in `swe_repos/`: one token of the code changed, so that a shown and a hidden test fail.

    python -m turnwise.envs.library.swe_bugs       # tries every change of every repo and writes swe_bugs.json

Each repo is a package with tests that the policy sees (`tests/`) and tests that it does not see (`hidden/`). A change
becomes a bug if both catch it and the test run finishes. The fix is the original token.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import keyword
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import cast

from turnwise.envs.library.swe_tests import SuiteReport, run_suite
from turnwise.envs.sandbox import Limits, Sandbox
from turnwise.errors import DataError

REPOS = Path(__file__).with_name("swe_repos")
BUGS = Path(__file__).with_name("swe_bugs.json")
HIDDEN = "tests/test_hidden.py"
HIDDEN_MODULE = "tests.test_hidden"

_TRY_LIMITS = Limits(wall_s=10.0, cpu_s=3, processes=8)
_CHANGES: Mapping[str, str] = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "+",
    "//": "*",
    "%": "//",
    "+=": "-=",
    "-=": "+=",
    "and": "or",
    "or": "and",
    "min": "max",
    "max": "min",
    "True": "False",
    "False": "True",
    "start": "end",
    "row": "column",
    "isalnum": "isalpha",
    "lower": "upper",
    "break": "continue",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One changed token, and the tests that fail because of it."""

    repo: str
    path: str
    line: int
    column: int
    old: str
    new: str
    shown_failures: tuple[tuple[str, str], ...]
    """Tests that the policy sees, each with its message."""
    hidden_failures: tuple[str, ...]

    @property
    def id(self) -> str:
        place = f"{self.repo}/{self.path}:{self.line}:{self.column}:{self.old}:{self.new}"
        return f"{self.repo}-{hashlib.sha256(place.encode('utf-8')).hexdigest()[:8]}"


@cache
def repo_names() -> tuple[str, ...]:
    return tuple(sorted(place.name for place in REPOS.iterdir() if (place / "tests").is_dir()))


@cache
def read_repo(name: str) -> Mapping[str, bytes]:
    """Read the part of a repo that the policy sees: the package and its tests, without a bug."""
    root = REPOS / name
    files = [file for folder in (name, "tests") for file in sorted((root / folder).rglob("*.py"))]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


@cache
def read_hidden(name: str) -> Mapping[str, bytes]:
    return {HIDDEN: (REPOS / name / "hidden" / "test_hidden.py").read_bytes()}


def shown_modules(name: str) -> list[str]:
    return [path.removesuffix(".py").replace("/", ".") for path in read_repo(name) if path.startswith("tests/test_")]


@cache
def shipped_bugs() -> Mapping[str, Bug]:
    """The bugs of `swe_bugs.json` by id."""
    bugs = [_bug_from_json(row) for row in json.loads(BUGS.read_text(encoding="utf-8"))]
    return {bug.id: bug for bug in bugs}


def _bug_from_json(row: Mapping[str, object]) -> Bug:
    failures = cast(Sequence[tuple[str, str]], row["shown_failures"])
    rest = {key: value for key, value in row.items() if key not in ("shown_failures", "hidden_failures")}
    return Bug(
        **rest,  # pyright: ignore[reportArgumentType]
        shown_failures=tuple((str(test), str(text)) for test, text in failures),
        hidden_failures=tuple(map(str, cast(Sequence[str], row["hidden_failures"]))),
    )


def apply_bug(bug: Bug) -> dict[str, bytes]:
    """The repo with the bug in it."""
    files = dict(read_repo(bug.repo))
    lines = files[bug.path].decode("utf-8").split("\n")
    line = lines[bug.line - 1]
    if line[bug.column : bug.column + len(bug.old)] != bug.old:
        raise DataError(f"{bug.repo}/{bug.path}:{bug.line} has no {bug.old!r} at {bug.column}; make swe_bugs.json anew")
    lines[bug.line - 1] = line[: bug.column] + bug.new + line[bug.column + len(bug.old) :]
    files[bug.path] = "\n".join(lines).encode("utf-8")
    return files


def changes_of(source: str) -> Iterator[tuple[int, int, str, str]]:
    """Every token that can be changed: line, column, the token, its replacement."""
    depth_of_def = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, column = token.start
        if token.type == tokenize.NAME and token.string == "def":
            depth_of_def = True  # do not change a signature, because the tests call it
        elif token.type == tokenize.NEWLINE:
            depth_of_def = False
        if depth_of_def or token.line.lstrip().startswith(("import ", "from ")):
            continue
        if token.type == tokenize.NUMBER and token.string.isdigit():
            yield line, column, token.string, str(int(token.string) + 1)
        elif token.type == tokenize.NAME and token.string == "not":
            yield line, column, "not ", ""
        elif token.type in (tokenize.OP, tokenize.NAME) and token.string in _CHANGES:
            is_word = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            if not is_word or token.string in ("min", "max", "start", "row", "isalnum", "lower"):
                yield line, column, token.string, _CHANGES[token.string]


async def try_bug(sandbox: Sandbox, bug: Bug) -> SuiteReport:
    """Run all tests, shown and hidden, with the bug in place."""
    files = {**apply_bug(bug), **read_hidden(bug.repo)}
    return await run_suite(sandbox, files, [*shown_modules(bug.repo), HIDDEN_MODULE], limits=_TRY_LIMITS)


def judge_bug(bug: Bug, report: SuiteReport) -> Bug | None:
    """Return the bug with its failures. None if no test catches it, or if the test run does not finish."""
    hidden = tuple(sorted(test for test in report.failed if test.startswith(HIDDEN_MODULE)))
    shown = tuple(sorted((test, text) for test, text in report.failed.items() if not test.startswith(HIDDEN_MODULE)))
    runs_wild = any(text.startswith("MemoryError") for text in report.failed.values())  # depends on the machine
    if report.verdict or runs_wild or not hidden or not shown:
        return None
    rest = {key: value for key, value in asdict(bug).items() if key not in ("shown_failures", "hidden_failures")}
    return Bug(**rest, shown_failures=shown, hidden_failures=hidden)


def candidates(repo: str) -> Iterator[Bug]:
    for path, data in read_repo(repo).items():
        if path.startswith("tests/") or path.endswith("__init__.py"):
            continue
        for line, column, old, new in changes_of(data.decode("utf-8")):
            nothing = {"shown_failures": (), "hidden_failures": ()}
            yield Bug(repo=repo, path=path, line=line, column=column, old=old, new=new, **nothing)


async def find_bugs(sandbox: Sandbox, repo: str) -> list[Bug]:
    """Find every change of one repo that the tests catch."""
    free = asyncio.Semaphore(8)

    async def judge(bug: Bug) -> Bug | None:
        async with free:
            return judge_bug(bug, await try_bug(sandbox, bug))

    judged = await asyncio.gather(*(judge(bug) for bug in candidates(repo)))
    return [bug for bug in judged if bug is not None]


def main() -> None:
    sandbox = Sandbox()
    found: list[Bug] = []
    for repo in repo_names():
        bugs = asyncio.run(find_bugs(sandbox, repo))
        print(f"{repo}: {len(bugs)} bugs of {len(list(candidates(repo)))} changes", flush=True)
        found += bugs
    BUGS.write_text("[\n" + ",\n".join(json.dumps(asdict(bug)) for bug in found) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
