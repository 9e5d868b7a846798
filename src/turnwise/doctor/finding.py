"""One reason why a run does not learn, in words and numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WIDTH = 100
"""Characters of a printed line."""
MAX_EVIDENCE = 1200
"""Characters of evidence that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One thing to change."""

    text: str
    """What to do, as a sentence without its full stop."""
    option: str = ""
    """The option with its value, as the command line takes it: `rollout.max_tokens_per_turn=64`. Empty: no option."""

    def __str__(self) -> str:
        return f"{self.option}: {self.text}" if self.option else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason why a run does not learn."""

    name: str
    """One word for it, such as `replies_cut`; docs/doctor.md lists them."""
    seen: str
    """What is seen, with numbers."""
    why: str
    """Why this keeps the policy from learning."""
    fixes: tuple[Fix, ...]
    """What to change, the best first."""
    evidence: str = ""
    """One example: a reply, a traceback."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """The numbers that decided, by name."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The finding as lines for a terminal."""
        rows = textwrap.wrap(f"{self.name}: {self.seen}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        rows += _wrapped("why", self.why)
        for fix in self.fixes:
            rows += _wrapped("fix", str(fix))
        shown = self.evidence.splitlines()
        rows += [f"  {'seen' if index == 0 else '':<5} | {line}" for index, line in enumerate(shown)]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dumps`."""
        return {**asdict(self), "numbers": dict(self.numbers), "fixes": [asdict(fix) for fix in self.fixes]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """The finding that `to_json` wrote down."""
        plain = {name: value for name, value in values.items() if name != "fixes"}
        return cls(**plain, fixes=tuple(Fix(**fix) for fix in values["fixes"]))


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """The findings for a terminal, with an empty line between two."""
    lines: list[str] = []
    for number, finding in enumerate(findings):
        lines += [*([""] if number else []), *finding.lines()]
    return lines


def shortened(text: str) -> str:
    """Text as evidence: its beginning and its end, where the exception of a traceback is."""
    if len(text) <= MAX_EVIDENCE:
        return text
    half = MAX_EVIDENCE // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<5}", subsequent_indent=" " * 7, break_on_hyphens=False)
