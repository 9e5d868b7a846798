"""`turnwise merge`: several trained models of one base as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnwise.commands.train import say
from turnwise.errors import ConfigError
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.merge import MergeOptions, find_parts, merge, split_weight


def run_merge(words: Sequence[str], out: str, step: str | None, options: MergeOptions) -> ExitCode:
    """Merge with the weights that the user names, and print what was written."""
    pairs = [split_weight(word) for word in words]
    weights = [weight for _, weight in pairs if weight is not None]
    if len(weights) < len(pairs):
        target = next(target for target, weight in pairs if weight is None)
        raise ConfigError(f"{target} has no weight; expected RUN=WEIGHT, such as {target}=0.5")
    place = Path(out).expanduser()
    if place.exists():
        raise ConfigError(f"{place} exists; name a new directory")
    parts = find_parts([target for target, _ in pairs], step, report=say)
    merged = merge(parts, weights, place, options)
    for part, weight in zip(parts, weights, strict=True):
        print(f"{weight:>8g}  {part.target}")
    what = "full weights" if merged.rank is None else f"an adapter of rank {merged.rank}"
    print(f"wrote {place}: {what} of {parts[0].base.name}, by {options.method}")
    print(f"use it: turnwise eval {place} --env WORLD, or turnwise sample {place}")
    return ExitCode.OK
