"""The metrics of a run as a table: a row for every step, a column for every metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import OWN_COUNT
from turnwise.runtime.suggest import did_you_mean
from turnwise.watch.catalogue import CATALOGUE, find_metric

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


class UnknownMetricError(ConfigError, KeyError):
    """A metric that a run did not measure, or that there is not."""

    def __init__(self, name: object, measured: Iterable[str]) -> None:
        known = sorted(measured)
        near = did_you_mean(name, known) or did_you_mean(name, [metric.name for metric in CATALOGUE])
        state = "was not measured in this run so far" if find_metric(str(name)) is not None else "is no metric"
        super().__init__(f"{name!r} {state}{near or '.'} The run has {len(known)}; list(run.metrics) shows them")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show it in quotes


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
        if name not in self._columns:
            raise UnknownMetricError(name, self._columns)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with the step as its index."""
        try:
            pandas: Any = import_module("pandas")  # it need not be there, and has no types
        except ImportError as cause:
            raise ConfigError("to_pandas() needs pandas, which is not installed: pip install pandas") from cause

        return pandas.DataFrame(self._columns).astype({"step": int}).set_index("step")

    def __repr__(self) -> str:
        shown = [name for name in SHOWN_COLUMNS if name in self._columns]
        rows = [shown, *([f"{self[name][row]:.4g}" for name in shown] for row in range(len(self["step"])))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(shown))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, f"[{len(self['step'])} steps, {len(self)} columns]"])
