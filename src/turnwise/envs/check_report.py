"""What `check_env` found: one sentence per rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["passed", "failed", "skipped"]

_MARK_OF_STATE: dict[State, str] = {"passed": "ok  ", "failed": "FAIL", "skipped": "-   "}


class CheckFailedError(Exception):
    """A rule is broken. The message says what was found and what to do."""


class CheckSkippedError(Exception):
    """A rule does not apply. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one rule."""

    name: str
    state: State
    sentence: str

    def __str__(self) -> str:
        return f"{_MARK_OF_STATE[self.state]} {self.name:<15} {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The results of all rules, in the order in which they were checked."""

    name: str
    results: tuple[CheckResult, ...]

    @property
    def is_ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.state == "failed")

    def __str__(self) -> str:
        verdict = f"{len(self.failed)} of {len(self.results)} rules broken" if self.failed else "keeps all the rules"
        return "\n".join([*map(str, self.results), f"{self.name}: {verdict}"])

    def to_json(self) -> dict[str, Any]:
        rules = [{"rule": r.name, "state": r.state, "sentence": r.sentence} for r in self.results]
        return {"world": self.name, "is_ok": self.is_ok, "rules": rules}
