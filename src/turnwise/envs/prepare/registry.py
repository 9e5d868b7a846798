"""The data sets that `turnwise data prepare` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnwise.envs.prepare.databases import prepare_bird, prepare_chinook, prepare_spider
from turnwise.envs.prepare.folder import Preparation, whole_folder
from turnwise.envs.prepare.questions import prepare_gsm8k, prepare_hotpotqa, prepare_nq
from turnwise.envs.prepare.repositories import prepare_swe
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean

Preparer = Callable[[Preparation], str]
"""Writes the folder, and returns the command that uses it, with {target} for the folder."""

DATA_SETS: Mapping[str, Preparer] = {
    "bird": prepare_bird,
    "chinook": prepare_chinook,
    "gsm8k": prepare_gsm8k,
    "hotpotqa": prepare_hotpotqa,
    "nq": prepare_nq,
    "spider": prepare_spider,
    "swe": prepare_swe,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """What was written."""

    target: Path
    rows: Mapping[str, int]
    dropped: Mapping[str, int]
    num_sources: int
    command: str
    """A command that uses it."""


def prepare_data(name: str, source: Path, target: Path) -> PreparedData:
    """Read a data set as published and write the folder that its world reads, with a manifest."""
    if name not in DATA_SETS:
        raise ConfigError(f"no data set {name!r}{did_you_mean(name, DATA_SETS)}; expected {', '.join(DATA_SETS)}")
    source, target = source.expanduser(), target.expanduser()
    if not source.is_dir():
        raise ConfigError(f"--from {source} is not a folder; expected the files of {name} as published")
    if target.resolve() == source.resolve():
        raise ConfigError(f"--to is the folder of the source, {source}; name another one")
    with whole_folder(target, name) as fresh:
        work = Preparation(name, source, fresh)
        command = DATA_SETS[name](work)
        manifest = work.write_manifest()
    return PreparedData(
        target=target,
        rows=manifest["rows"],
        dropped=manifest["dropped"],
        num_sources=len(manifest["sources"]),
        command=command.format(target=target),
    )
