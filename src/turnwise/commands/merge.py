"""`turnwise merge`: several trained models of one base as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.commands.train import say
from turnwise.errors import ConfigError
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.merge import MergeOptions, find_parts, merge, split_weight
from turnwise.training.merge_search import FoundWeights, search_weights, weight_grid
from turnwise.watch.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """A search over weights; `points` is 0 where the user names them."""

    points: int = 0
    worlds: tuple[str, ...] = ()

    def check(self) -> None:
        if bool(self.points) != bool(self.worlds):
            raise ConfigError("--search N and --env NAME belong together: the worlds to search the weights by")


def run_merge(
    words: Sequence[str], out: str, step: str | None, options: MergeOptions, search: SearchOptions
) -> ExitCode:
    """Merge with the weights that the user names or that a search finds, and print what was written."""
    search.check()
    if search.points and options.method != "sum":
        raise ConfigError(f"--search is for adapters, which --method sum merges; {options.method} is for full weights")
    pairs = [split_weight(word) for word in words]
    weights = tuple(weight for _, weight in pairs if weight is not None)
    if len(weights) < len(pairs) and not (search.points and not weights):
        target = next(target for target, weight in pairs if weight is None)
        raise ConfigError(f"{target} has no weight; expected RUN=WEIGHT, such as {target}=0.5")
    place = Path(out).expanduser()
    if place.exists():
        raise ConfigError(f"{place} exists; name a new directory")
    parts = find_parts([target for target, _ in pairs], step, report=say)
    if search.points:
        named = [weights] if weights else []
        found = search_weights(parts, [*named, *weight_grid(len(parts), search.points)], search.worlds, say)
        weights = found.weights
        print("\n".join(_table_lines(found)))
    merged = merge(parts, weights, place, options)
    for part, weight in zip(parts, weights, strict=True):
        print(f"{weight:>8g}  {part.target}")
    what = "full weights" if merged.rank is None else f"an adapter of rank {merged.rank}"
    print(f"wrote {place}: {what} of {parts[0].base.name}, by {options.method}")
    print(f"use it: turnwise eval {place} --env WORLD, or turnwise sample {place}")
    return ExitCode.OK


def _table_lines(found: FoundWeights) -> list[str]:
    """A line per world and model, of tasks that the search did not play."""
    lines = ["held-out tasks that the weights were not chosen by:"]
    for world in next(iter(found.table.values())):
        for name, rows in found.table.items():
            row = rows[world]
            success = Interval(row.success, row.success_low, row.success_high).percent()
            lines.append(f"  {world:<20} {name:<28} success {success}, reward {row.reward:.3f}, {row.num_tasks} tasks")
    return lines
