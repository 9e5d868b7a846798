"""Search the weights of a merge: a grid of weights is measured on one half of the held-out tasks, and what is chosen on
the other half. So the final table has no task in it that the weights were chosen by."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.config import Config
from turnwise.config.files import override_config
from turnwise.errors import ConfigError
from turnwise.runlog.schema import EvaluationRow
from turnwise.training.merge import MergeOptions, MergePart, merge
from turnwise.training.policy import PolicySampler
from turnwise.training.setup import Report, read_config

SEARCH_TASKS, FINAL_TASKS = slice(0, None, 2), slice(1, None, 2)
DEFAULT_TASKS = 64
"""Tasks for the table if `eval.tasks` is 0."""
Rows = Mapping[str, EvaluationRow]
"""One evaluation for each world, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWeights:
    """What a search chose, and how good it is on tasks that it was not chosen by."""

    weights: tuple[float, ...]
    searched: Mapping[tuple[float, ...], float]
    """The mean over worlds of success (or reward, where a world does not judge success), by weights."""
    table: Mapping[str, Rows]
    """The base model, every part and the merge, on the other tasks."""


def weight_grid(num_parts: int, num_points: int) -> list[tuple[float, ...]]:
    """All weights that sum to 1, in steps of 1 / (num_points - 1)."""
    if num_points < 2:
        raise ConfigError(f"--search {num_points}; expected 2 or more weights from 0 to 1")
    steps = num_points - 1
    counts = (one for one in itertools.product(range(steps + 1), repeat=num_parts) if sum(one) == steps)
    return [tuple(count / steps for count in one) for one in counts]


def search_weights(
    parts: Sequence[MergePart], grid: Sequence[tuple[float, ...]], worlds: Sequence[str], report: Report
) -> FoundWeights:
    """Merge with each of the weights, play the first tasks, and measure the best and its parts on the others."""
    if parts[0].is_full:
        raise ConfigError("--search is for adapters; expected runs with model.train=lora")
    configs = {world: _config_for(world, parts) for world in worlds}
    searched: dict[tuple[float, ...], float] = {}
    with tempfile.TemporaryDirectory(prefix="turnwise-merge-") as scratch:
        for index, weights in enumerate(dict.fromkeys(grid)):
            merged = merge(parts, weights, Path(scratch) / str(index), MergeOptions()).directory
            searched[weights] = _score(_play(merged, configs, SEARCH_TASKS))
            report(f"weights {', '.join(f'{one:g}' for one in weights)}: {searched[weights]:.4g}")
        chosen = max(searched, key=lambda weights: searched[weights])
        final = merge(parts, chosen, Path(scratch) / "chosen", MergeOptions()).directory
        places = {"base": None, **{part.target: part.directory for part in parts}, "merged": final}
        table = {name: _play(place, configs, FINAL_TASKS) for name, place in places.items()}
    return FoundWeights(weights=chosen, searched=searched, table=table)


def _config_for(world: str, parts: Sequence[MergePart]) -> Config:
    """The world as the part that was trained in it plays it, with twice the tasks: half to search, half to report."""
    own = next((part.config for part in parts if part.config.env.name == world), None)
    config = own or read_config(world, [f"model={parts[0].base}"])
    if not config.eval.tasks:
        config = override_config(config, [f"eval.tasks={DEFAULT_TASKS}"])
    return override_config(config, [f"eval.tasks={2 * config.eval.tasks}"])


def _play(place: Path | None, configs: Mapping[str, Config], tasks: slice) -> dict[str, EvaluationRow]:
    rows: dict[str, EvaluationRow] = {}
    for world, config in configs.items():
        with PolicySampler(config, checkpoint=None if place is None else str(place)) as policy:
            rows[world] = policy.evaluate(tasks=tasks).row
    return rows


def _score(rows: Rows) -> float:
    values = [row.reward if math.isnan(row.success) else row.success for row in rows.values()]
    return sum(values) / len(values)
