"""The tables of `docs/models.md`: the families that were compared, and those that are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from turnwise.models.refused import REFUSED

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
COLUMNS = ("forward", "prefill", "decode", "training", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The largest difference of a logprob, by what was compared."""

    forward: float
    prefill: float
    decode: float
    training: float
    peft: float

    @property
    def largest(self) -> float:
        return max(asdict(self).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """One row of the table."""

    name: str
    layers: str
    """Whose code runs the layers: `ours` or `transformers`."""
    adapted: str
    """Kinds of layers that carried an adapter."""
    moved: float
    """How far the three steps moved a logprob, at most: what `training` has to be compared with."""
    differences: Differences


def family_table(rows: Sequence[FamilyRow]) -> str:
    lines = ["| Model | Layers | Adapters on | " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---|" * len(COLUMNS)]
    for row in rows:
        numbers = [f"{value:.0e}" for value in asdict(row.differences).values()]
        lines.append(f"| `{row.name}` | {row.layers} | {row.adapted} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def refusal_table() -> str:
    """Refused families, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    lines = ["| Refused | Because it |", "|---|---|"]
    lines += [f"| {' '.join(sorted(names))} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(lines)


def replace_tables(page: str, rows: Sequence[FamilyRow]) -> str:
    """The page with new tables between its two pairs of marks: first the families, then the refusals."""
    tables = iter((family_table(rows), refusal_table()))
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{next(tables)}\n\n{END}", page, flags=re.DOTALL)
