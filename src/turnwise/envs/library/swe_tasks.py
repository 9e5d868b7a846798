"""Tasks of `swe`: the repo for the policy, the text of the task, and the tests that judge the result.

A task comes from a shipped bug (`swe_bugs.py`) or from a row in the style of SWE-bench, with the repo on disk:

    {"instance_id": "x-1", "repo": "repos/x.tar.gz", "base_commit": "", "problem_statement": "...",
     "test_patch": "diff --git ...", "FAIL_TO_PASS": ["tests/test_x.py::test_y"], "PASS_TO_PASS": [...]}

`repo` is a folder, a tar or zip archive, or a git repository (then `base_commit` picks the state). Its path is relative
to the file.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, cast

from turnwise.envs.base import Task
from turnwise.envs.library.swe_bugs import (
    HIDDEN_MODULE,
    Bug,
    apply_bug,
    read_hidden,
    shipped_bugs,
    shown_modules,
)
from turnwise.envs.library.swe_patch import apply_patch, patched_paths
from turnwise.envs.library.swe_tests import Runner
from turnwise.envs.rows import read_rows
from turnwise.errors import ConfigError, DataError

MAX_REPO_BYTES = 64 << 20
SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".pytest_cache", ".hg", ".svn", "node_modules"})

FILES = "Files: "
"""The start of the last line of a shipped bug's text."""

_GIT_S = 60.0
_SHOWN_CHARS = 60
_TEST_FILE = re.compile(r"^(test_.*|.*_test|tests?)\.py$")
_RUNNER_FILES = {"conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"} | {
    f"{name}customize.py" for name in ("site", "user")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoTask:
    """A task, ready to be played."""

    name: str
    files: Mapping[str, bytes]
    """The files that the policy gets."""
    hidden: Mapping[str, bytes]
    """Test files that the policy does not see, and the original versions of those that it sees."""
    statement: str
    shown_tests: tuple[str, ...]
    """Modules or files that the action `test` runs."""
    judged_tests: tuple[str, ...]
    """Modules or files that are run at the end."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    runner: Runner


def fresh_copy(task: RepoTask, work: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the repo with the policy's changes to everything except tests, and with the original tests."""
    kept = {path: data for path, data in task.files.items() if is_protected(path)}
    restored = {**kept, **task.hidden}
    folders = {str(parent) for path in restored for parent in PurePosixPath(path).parents}  # no file replaces them
    changed = {path: data for path, data in work.items() if not is_protected(path) and path not in folders}
    return {**changed, **restored}


def is_protected(path: str) -> bool:
    """Whether a path is a test or a setting of a test runner. Changes to these are undone."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    in_tests = any(part in ("tests", "test", "testing") for part in parts[:-1])
    return in_tests or name in _RUNNER_FILES or name.endswith(".pth") or bool(_TEST_FILE.match(name))


def bug_to_task(bug: Bug) -> Task:
    return Task(id=f"swe-{bug.id}", data={"bug": bug.id})


def load_repo_task(task: Task) -> RepoTask:
    """Load everything that a task needs, from its data."""
    if "bug" in task.data:
        return _bug_task(shipped_bugs()[task.data["bug"]])
    return _row_task(json.dumps(dict(task.data), sort_keys=True))


def _bug_task(bug: Bug) -> RepoTask:
    files, hidden = apply_bug(bug), read_hidden(bug.repo)
    modules = shown_modules(bug.repo)
    failing = {test for test, _ in bug.shown_failures} | set(bug.hidden_failures)
    known = [test for path in (*files, *hidden) for test in _unittest_ids(path, {**files, **hidden}[path])]
    test, problem = bug.shown_failures[0]
    others = len(bug.shown_failures) - 1
    more = f" ({others} more fail.)" if others else ""
    paths = " ".join(path for path in files if not path.endswith("__init__.py") and not is_protected(path))
    return RepoTask(
        name=bug.id,
        files=files,
        hidden=hidden,
        statement=f"{test.removeprefix('tests.')} fails: {problem[:_SHOWN_CHARS]}.{more}\n{FILES}{paths}",
        shown_tests=tuple(modules),
        judged_tests=(*modules, HIDDEN_MODULE),
        fail_to_pass=tuple(sorted(failing)),
        pass_to_pass=tuple(test for test in known if test not in failing),
        runner="unittest",
    )


def _unittest_ids(path: str, data: bytes) -> list[str]:
    """The ids (`tests.test_x.Class.test_y`) of all tests that a file defines."""
    if not is_protected(path):
        return []
    module = path.removesuffix(".py").replace("/", ".")
    classes = [node for node in ast.parse(data).body if isinstance(node, ast.ClassDef)]
    return [
        f"{module}.{each.name}.{node.name}"
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]


def read_swe_rows(path: Path) -> list[Task]:
    """Read tasks from a file of rows. A missing repo or test is a `ConfigError` now, not in the middle of a run."""
    tasks: dict[str, Task] = {}
    for number, row in enumerate(read_rows(path), start=1):
        try:
            data: dict[str, Any] = {
                "instance_id": str(row["instance_id"]),
                "repo": str((path.parent / str(row["repo"])).resolve()),
                "base_commit": str(row.get("base_commit") or ""),
                "problem_statement": str(row["problem_statement"]),
                "test_patch": str(row.get("test_patch") or ""),
                "FAIL_TO_PASS": _test_list(row["FAIL_TO_PASS"]),
                "PASS_TO_PASS": _test_list(row.get("PASS_TO_PASS") or []),
            }
            task = Task(id=data["instance_id"], data=data)
            load_repo_task(task)
        except KeyError as error:
            raise ConfigError(f"{path}, row {number} has no {error}; expected SWE-bench's columns") from error
        except (ConfigError, DataError) as error:
            raise ConfigError(f"{path}, row {number}: {error}") from error
        tasks[task.id] = task
    return list(tasks.values())


def _test_list(value: Any) -> list[str]:
    """Read a list, or a list written as JSON text, as in SWE-bench."""
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{value!r:.60} is not a list of tests") from error
    if not isinstance(tests, list):
        raise ConfigError(f"{value!r:.60} is not a list of tests")
    return [str(test) for test in cast(list[object], tests)]


@lru_cache(maxsize=32)
def _row_task(text: str) -> RepoTask:
    row = json.loads(text)
    base = read_repo_files(Path(row["repo"]), row["base_commit"])
    fail, keep = tuple(row["FAIL_TO_PASS"]), tuple(row["PASS_TO_PASS"])
    if not fail:
        raise ConfigError("FAIL_TO_PASS is empty; nothing would have to be fixed")
    patched = apply_patch(base, row["test_patch"])
    hidden = {path: patched[path] for path in patched_paths(row["test_patch"])}
    runner: Runner = "pytest" if any("::" in test or test.endswith(".py") for test in (*fail, *keep)) else "unittest"
    targets = tuple(sorted({_target(test, runner) for test in (*fail, *keep)}))
    shown = tuple(target for target in targets if _path_of(target) in base)
    return RepoTask(
        name=row["instance_id"],
        files=base,
        hidden=hidden,
        statement=row["problem_statement"].strip(),
        shown_tests=shown,
        judged_tests=targets,
        fail_to_pass=fail,
        pass_to_pass=keep,
        runner=runner,
    )


def _target(test: str, runner: Runner) -> str:
    """The file or module to run for a test."""
    return test.partition("::")[0] if runner == "pytest" else test.rsplit(".", 2)[0]


def _path_of(target: str) -> str:
    return target if target.endswith(".py") else f"{target.replace('.', '/')}.py"


def read_repo_files(place: Path, commit: str) -> dict[str, bytes]:
    """Read the files of a folder, an archive, or a commit."""
    if place.is_dir() and commit:
        command = ["git", "-C", str(place), "archive", "--format=tar", commit]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False)
        if done.returncode:
            raise ConfigError(f"git archive of {commit} in {place} failed: {done.stderr.decode()[-200:].strip()}")
        return _without_top(_read_tar(done.stdout), is_stripped=False)
    if place.is_dir():
        return _read_folder(place)
    if not place.is_file():
        raise ConfigError(f"repo={place} does not exist; expected a folder, a tar or zip archive")
    data = place.read_bytes()
    if zipfile.is_zipfile(place):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        return _without_top(files, is_stripped=True)
    try:
        return _without_top(_read_tar(data), is_stripped=True)
    except tarfile.TarError as error:
        raise ConfigError(f"repo={place} is neither a tar nor a zip archive ({error})") from error


def _read_folder(root: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root)
        if file.is_file() and not file.is_symlink() and not SKIPPED_FOLDERS & set(path.parts[:-1]):
            files[path.as_posix()] = file.read_bytes()
    return _checked(files)


def _read_tar(data: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                files[member.name] = content.read()
    return files


def _without_top(files: Mapping[str, bytes], *, is_stripped: bool) -> dict[str, bytes]:
    """Remove the top folder from all paths, because archives often hold one folder with everything in it."""
    names = {name.removeprefix("./"): data for name, data in files.items()}
    tops = {PurePosixPath(name).parts[0] for name in names}
    if is_stripped and len(tops) == 1 and all("/" in name for name in names):
        names = {name.partition("/")[2]: data for name, data in names.items()}
    return _checked({n: d for n, d in names.items() if not SKIPPED_FOLDERS & set(PurePosixPath(n).parts[:-1])})


def _checked(files: dict[str, bytes]) -> dict[str, bytes]:
    total = sum(map(len, files.values()))
    if not files or total > MAX_REPO_BYTES:
        raise ConfigError(f"the repo has {len(files)} files with {total} bytes; expected some, up to {MAX_REPO_BYTES}")
    return files


def shipped_tasks() -> Sequence[Task]:
    return [bug_to_task(bug) for bug in shipped_bugs().values()]
