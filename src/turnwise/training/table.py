"""The metrics of a run as a table: a row for every step, a column for every metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import OWN_COUNT

SHOWN_COLUMNS = (
    "step",
    "rollout/reward_mean",
    "rollout/success_mean",
    "eval/success",
    "train/loss",
    "train/grad_norm",
    "time/step_s",
)
"""What the text of a table shows; the rest is there all the same."""


class MetricTable(Mapping[str, list[float]]):
    """Columns by metric name, all of one length; nan where a metric was not measured in a step."""

    def __init__(self, columns: Mapping[str, list[float]]) -> None:
        self._columns = dict(columns)

    @classmethod
    def read(cls, run: RunReader) -> MetricTable:
        """All metrics whose step is a step of training; those of a warm-up count otherwise (`Run.metric`)."""
        names = [name for name in run.metric_names() if name.partition("/")[0] not in OWN_COUNT]
        by_name = {name: dict(run.metric(name)) for name in names}
        steps = sorted({step for values in by_name.values() for step in values})
        columns = {name: [values.get(step, math.nan) for step in steps] for name, values in by_name.items()}
        return cls({"step": [float(step) for step in steps], **columns})

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with the step as its index."""
        import pandas

        return pandas.DataFrame(self._columns).astype({"step": int}).set_index("step")

    def __repr__(self) -> str:
        shown = [name for name in SHOWN_COLUMNS if name in self._columns]
        rows = [shown, *([f"{self[name][row]:.4g}" for name in shown] for row in range(len(self["step"])))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(shown))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, f"[{len(self['step'])} steps, {len(self)} columns]"])
