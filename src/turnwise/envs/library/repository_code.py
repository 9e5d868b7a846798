"""The Python that `repository` is written in, and the interpreter that runs its tests.

A file is a list of imports and of functions of one number:

    from bank import tip

    def fee(x):
        return tip(x) + 3

This is a subset of Python, and it means what Python means by it. It is read with `ast` and computed here, so that what
a policy writes never runs as code: there is nothing to isolate, and a run of all tests takes microseconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CALLS = 30
"""Calls of one test. A function that calls itself, by any way, comes to this."""
MAX_DEPTH = 6
"""How deep an expression nests. With `MAX_CALLS` this keeps the interpreter far from Python's own limit."""
MAX_NUMBER = 10**9
"""Numbers in the code and in results stay below this, so that a product of products ends soon."""

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
}


_STRANGE = re.compile(r"[^\w\s()+*,:.=-]|\b\d+[^\W\d]")
"""What no code here has: quotes, escapes, a name that begins with a digit. Python would warn about some of it."""


class CodeError(Exception):
    """The code does not run; the text says why, for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of one number, and the file that its names are looked up in."""

    file: str
    parameter: str
    value: ast.expr


@dataclass(slots=True)
class Program:
    """The files of a repo, loaded as they are imported."""

    files: Mapping[str, str]
    _loaded: dict[str, dict[str, _Function]] = field(default_factory=dict[str, dict[str, _Function]])
    _loading: list[str] = field(default_factory=list[str])

    def call(self, file: str, name: str, number: int) -> int:
        """The value of the function `name` of a file. Raises `CodeError` if it has none."""
        return self._call(self._look_up(file, name), number, [0])

    def _load(self, file: str) -> dict[str, _Function]:
        """The names of a file. Every import comes before the file that asks for it, as in Python."""
        if file in self._loaded:
            return self._loaded[file]
        if file not in self.files:
            raise CodeError(f"there is no {file}.py")
        if file in self._loading:
            raise CodeError(f"{file}.py imports itself")
        self._loading.append(file)
        try:
            names: dict[str, _Function] = {}
            for part in _parse(file, self.files[file]):
                if isinstance(part, ast.ImportFrom):
                    for one in part.names:
                        names[one.name] = self._look_up(part.module or "", one.name)
                else:
                    names[part.name] = _Function(file, part.args.args[0].arg, _returned(part))
        finally:
            self._loading.pop()
        self._loaded[file] = names
        return names

    def _look_up(self, file: str, name: str) -> _Function:
        names = self._load(file)
        if name not in names:
            raise CodeError(f"{file}.py has no {name}")
        return names[name]

    def _call(self, function: _Function, number: int, count: list[int]) -> int:
        count[0] += 1
        if count[0] > MAX_CALLS:
            raise CodeError("a function calls itself")
        return self._value(function.value, function, number, count)

    def _value(self, node: ast.expr, function: _Function, number: int, count: list[int]) -> int:
        if isinstance(node, ast.BinOp):
            left = self._value(node.left, function, number, count)
            value = _OPERATORS[type(node.op)](left, self._value(node.right, function, number, count))
            if abs(value) > MAX_NUMBER:
                raise CodeError("a result is too large")
            return value
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return node.value
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            argument = self._value(node.args[0], function, number, count)
            return self._call(self._look_up(function.file, node.func.id), argument, count)
        assert isinstance(node, ast.Name)
        if node.id != function.parameter:
            raise CodeError(f"{function.file}.py: {node.id} is not known")
        return number


@lru_cache(maxsize=4096)
def _parse(file: str, text: str) -> tuple[ast.ImportFrom | ast.FunctionDef, ...]:
    """The imports and functions of a file. Raises `CodeError` for anything else."""
    for number, line in enumerate(text.splitlines(), start=1):
        if _STRANGE.search(line.partition("#")[0]):
            raise CodeError(f"{file}.py, line {number}: not valid here")
    try:
        parts = ast.parse(text).body
    except SyntaxError as error:
        raise CodeError(f"{file}.py, line {error.lineno}: not valid Python") from None
    found: list[ast.ImportFrom | ast.FunctionDef] = []
    for part in parts:
        if not _is_import(part) and not _is_function(part):
            raise CodeError(f"{file}.py, line {part.lineno}: only imports and functions of one number are known here")
        assert isinstance(part, ast.ImportFrom | ast.FunctionDef)
        found.append(part)
    return tuple(found)


def _is_import(part: ast.stmt) -> bool:
    """`from FILE import NAME, NAME`"""
    return (
        isinstance(part, ast.ImportFrom)
        and part.level == 0
        and all(one.asname is None and one.name != "*" for one in part.names)
    )


def _is_function(part: ast.stmt) -> bool:
    """`def NAME(PARAMETER): return VALUE`, with nothing else in it."""
    if not isinstance(part, ast.FunctionDef) or part.decorator_list or part.returns or len(part.body) != 1:
        return False
    given = part.args
    plain = ast.arguments([], [ast.arg(given.args[0].arg)], None, [], [], None, []) if given.args else None
    if plain is None or ast.dump(given) != ast.dump(plain):
        return False
    last = part.body[0]
    return isinstance(last, ast.Return) and last.value is not None and _is_value(last.value, MAX_DEPTH)


def _is_value(node: ast.expr, depth: int) -> bool:
    if depth == 0:
        return False
    match node:
        case ast.Constant(value=int() as number):
            return not isinstance(number, bool) and number < MAX_NUMBER
        case ast.Name():
            return True
        case ast.Call(func=ast.Name(), args=[argument], keywords=[]):
            return _is_value(argument, depth - 1)
        case ast.BinOp(left=left, op=operator, right=right):
            return type(operator) in _OPERATORS and _is_value(left, depth - 1) and _is_value(right, depth - 1)
        case _:
            return False


def _returned(part: ast.FunctionDef) -> ast.expr:
    last = part.body[0]
    assert isinstance(last, ast.Return)
    assert last.value is not None
    return last.value
