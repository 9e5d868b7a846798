"""The tables of `docs/models.md`: the families that were compared, on a CPU and on a GPU, and the refused ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from turnwise.models.refused import REFUSED

ON_CPU, ON_GPU, REFUSALS = "families", "families on a GPU", "refusals"
"""The names of the page's tables; each stands between two marks."""
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
    """The code that runs the layers: `ours` or `transformers`."""
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


def replace_tables(page: str, rows: Sequence[FamilyRow], machine: str, *, is_gpu: bool) -> str:
    """The page with the families as `machine` ran them, and with the refusals; a GPU's rows leave the CPU's alone."""
    table = family_table(rows)
    table = f"Measured on one {machine}:\n\n{table}" if is_gpu else table
    page = re.sub(_block(REFUSALS), lambda _: _marked(REFUSALS, refusal_table()), page, flags=re.DOTALL)
    name = ON_GPU if is_gpu else ON_CPU
    return re.sub(_block(name), lambda _: _marked(name, table), page, flags=re.DOTALL)


def read_table(page: str, name: str) -> str:
    """What stands between the marks of a table."""
    found = re.search(_block(name), page, flags=re.DOTALL)
    assert found is not None, f"the page has no marks of {name}"
    return found[1].strip()


def _block(name: str) -> str:
    return re.escape(f"<!-- {name}: begin -->") + "(.*?)" + re.escape(f"<!-- {name}: end -->")


def _marked(name: str, text: str) -> str:
    return f"<!-- {name}: begin -->\n\n{text}\n\n<!-- {name}: end -->"
