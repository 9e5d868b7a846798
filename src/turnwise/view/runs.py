"""The runs below a directory: which there are, how each stands, and how their curves and configs compare."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from turnwise.errors import TurnwiseError
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import DATABASE, EvaluationRow
from turnwise.watch.intervals import mean_interval
from turnwise.watch.status import Status, is_training, read_status, seconds_ago

MAX_DEPTH = 4
"""How far below the given directory runs are looked for."""
MAX_POINTS = 400
"""Curves with more points are drawn from means of neighbouring steps."""
HELD_OUT = ("eval/success", "eval/reward")
"""Metrics that evaluations measure with an interval."""
PLACE_OF_ITS_OWN = ("run.name", "run.dir", "run.loggers", "run.project")
SEED_OF_ITS_OWN = ("train.seed", *PLACE_OF_ITS_OWN)
"""Options in which runs of one group may differ."""
UNREADABLE = (TurnwiseError, sqlite3.Error, OSError, ValueError, KeyError, TypeError)
"""What reading a damaged run may raise."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Json = dict[str, Any]


class RunFolder:
    """The runs below a directory, by the names under which the page shows them."""

    def __init__(self, place: Path) -> None:
        self.shown_place = str(place)
        """The path as the user wrote it."""
        self.place = place.expanduser().absolute()
        self._configs: dict[str, Json] = {}
        self._over: dict[Path, Json] = {}
        """Summaries of runs that no process trains; good for as long as their revision is the same."""

    def directories(self) -> dict[str, Path]:
        """Name to directory of every run that is there now."""
        if self.place.name == DATABASE:
            return {self.place.parent.name: self.place.parent}
        if is_run(self.place):
            return {self.place.name: self.place}
        return {place.relative_to(self.place).as_posix(): place for place in _runs_below(self.place)}

    def summaries(self) -> list[Json]:
        """How each run stands, and its held-out curve. A run that cannot be read says why."""
        found = [self._summary(name, place) for name, place in sorted(self.directories().items())]
        groups = _group_names(found)
        return [{**one, "group": groups.get(one["name"], one["name"])} for one in found]

    def revisions(self) -> dict[str, str]:
        """For each run a text that changes when there is something new to read."""
        return {name: revision(place) for name, place in self.directories().items()}

    def differences(self, names: Sequence[str]) -> Json:
        """The options in which groups of runs differ: a row for each option, a cell for each group.

        `partial` holds the options that only some runs have: those of another method, or of a newer turnwise.
        """
        places = self.directories()
        groups: dict[str, list[Json]] = {}
        for one in self.summaries():
            if one["name"] in names and one["state"] != "damaged":
                groups.setdefault(one["group"], []).append(self._flat_config(places[one["name"]]))
        keys = dict.fromkeys(key for members in groups.values() for tree in members for key in tree)
        rows: list[Json] = []
        partial: list[Json] = []
        for key in keys:
            texts = {group: _texts([tree.get(key) for tree in members]) for group, members in groups.items()}
            if key in PLACE_OF_ITS_OWN or len({text for own in texts.values() for text in own}) == 1:
                continue
            cells = ["" if "" in own else ", ".join(own) for own in texts.values()]
            (partial if "" in cells else rows).append({"option": key, "values": cells})
        num_same = len(keys) - len(rows) - len(partial)
        return {"groups": list(groups), "rows": rows, "partial": partial, "num_same": num_same}

    def config(self, run: RunReader) -> Json:
        """A stored config as a tree, as it was written: also one of another version of turnwise."""
        text = run.config_yaml
        if text not in self._configs:
            tree = yaml.load(text, Loader=_LOADER)
            self._configs[text] = tree if isinstance(tree, dict) else {}
        return self._configs[text]

    def _flat_config(self, place: Path) -> Json:
        try:
            with RunReader(place) as run:
                return dict(_flatten(self.config(run)))
        except (*UNREADABLE, yaml.YAMLError):
            return {}

    def _summary(self, name: str, place: Path) -> Json:
        known = {"name": name, "directory": str(place), "revision": revision(place)}
        if place in self._over and self._over[place]["revision"] == known["revision"]:
            return self._over[place]
        try:
            with RunReader(place) as run:
                summary = {**known, **self._standing(run)}
            if not summary["is_alive"]:
                self._over[place] = summary
            return summary
        except (*UNREADABLE, yaml.YAMLError) as error:
            return {**known, "state": "damaged", "error": str(error), "evaluations": []}

    def _standing(self, run: RunReader) -> Json:
        config = self.config(run)
        flat = dict(_flatten(config))
        status, is_alive = read_status(run.directory), is_training(run.directory)
        rewards = run.metric("rollout/reward_mean")
        step_s = [value for _, value in run.metric("time/step_s") if math.isfinite(value)]
        done = rewards[-1][0] if rewards else 0
        num_steps = int(flat.get("train.steps") or 0)
        evaluations = run.evaluations()
        return {
            **run_state(status, is_alive=is_alive),
            "world": flat.get("env.name", ""),
            "worlds": list((config.get("env") or {}).get("mix") or {}) or [flat.get("env.name", "")],
            "model": flat.get("model.alias") or flat.get("model.name", ""),
            "method": flat.get("method.name", ""),
            "seed": flat.get("train.seed"),
            "step": max(done, status.step if status is not None and is_alive else 0),
            "num_steps": num_steps,
            "left_s": _mean(step_s[-10:]) * max(0, num_steps - done) if is_alive and step_s else None,
            "reward": finite(rewards[-1][1]) if rewards else None,
            "evaluations": [evaluation_json(row) for row in evaluations],
            "key": hashlib.blake2b(
                repr({key: value for key, value in flat.items() if key not in SEED_OF_ITS_OWN}).encode(), digest_size=8
            ).hexdigest(),
        }


def run_state(status: Status | None, *, is_alive: bool) -> Json:
    """What a run is doing, for a person."""
    if not is_alive:
        phase = status.phase if status is not None else ""
        ended = phase if phase in ("finished", "failed", "stopped") else "killed"
        return {"state": ended, "is_alive": False}
    if status is None:
        return {"state": "starting", "is_alive": True}
    return {
        "state": "running",
        "is_alive": True,
        "phase": status.phase,
        "pid": status.pid,
        "alarms": list(status.alarms),
        "reason": status.reason,
        "pool": status.pool,
        "memory_mb": status.memory_mb,
        "silent_s": round(seconds_ago(status), 1),
    }


def revision(place: Path) -> str:
    """A text that changes when a run writes something."""
    parts: list[str] = []
    for name in (DATABASE, f"{DATABASE}-wal"):
        try:
            stat = (place / name).stat()
            parts.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}")
        except OSError:
            parts.append("-")
    return "/".join([*parts, "live" if is_training(place) else "over"])


def evaluation_json(row: EvaluationRow) -> Json:
    return {name: finite(value) if isinstance(value, float) else value for name, value in asdict(row).items()}


def finite(value: float | None) -> float | None:
    """JSON has no nan; what was not measured is null."""
    return None if value is None or not math.isfinite(value) else value


def json_ready(value: Any) -> Any:
    """An answer without nan and infinities, which a world may give as rewards or metrics, and which JSON lacks."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {key: json_ready(one) for key, one in value.items()}
    return [json_ready(one) for one in value] if isinstance(value, list | tuple) else value


def curve(run: RunReader, metric: str) -> Json:
    """One metric of one run over steps; held-out metrics with their interval."""
    if metric in HELD_OUT:
        word = metric.partition("/")[2]
        latest = {row.step: row for row in run.evaluations() if math.isfinite(getattr(row, word))}
        rows = [latest[step] for step in sorted(latest)]
        names = {"y": word, "low": f"{word}_low", "high": f"{word}_high"}
        columns = {key: [finite(getattr(row, name)) for row in rows] for key, name in names.items()}
        return {"x": [row.step for row in rows], **columns}
    points = thinned([(step, value) for step, value in run.metric(metric) if math.isfinite(value)])
    return {"x": [step for step, _ in points], "y": [value for _, value in points]}


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MAX_POINTS` points: the means of neighbours, each at the last of its steps."""
    width = math.ceil(len(points) / MAX_POINTS)
    if width <= 1:
        return list(points)
    parts = [points[at : at + width] for at in range(0, len(points), width)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def seeds_curve(curves: Sequence[Json]) -> Json:
    """Mean and 95 % interval between seeds, at the steps that at least two of them measured."""
    values: dict[int, list[float]] = {}
    for one in curves:
        for step, value in zip(one["x"], one["y"], strict=True):
            values.setdefault(step, []).append(value)
    steps = sorted(step for step, known in values.items() if len(known) >= min(2, len(curves)))
    found = [mean_interval([[value] for value in values[step]]) for step in steps]
    columns = {"y": "value", "low": "low", "high": "high"}
    return {"x": steps, **{key: [finite(getattr(one, name)) for one in found] for key, name in columns.items()}}


def _runs_below(top: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(top):
        if DATABASE in files:
            yield Path(place)
            folders.clear()
            continue
        depth = len(Path(place).relative_to(top).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < MAX_DEPTH else []


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _texts(values: Sequence[Any]) -> list[str]:
    """The different values of a group's runs, in order; an empty text for a run without the option."""
    return list(dict.fromkeys(_cell(value) for value in values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _group_names(runs: Sequence[Json]) -> dict[str, str]:
    """Run name to the name of its group: runs whose configs differ in their seed only."""
    members: dict[str, list[str]] = {}
    for one in runs:
        if one["state"] != "damaged":
            members.setdefault(one["key"], []).append(one["name"])
    names: dict[str, str] = {}
    for group in members.values():
        shared = os.path.commonprefix(group)  # noqa: RUF071 - letters are meant, not folders
        common = re.sub(r"([-_./ ]+(s|seed))?[-_./ ]*$", "", shared) if len(group) > 1 else group[0]
        names |= dict.fromkeys(group, common if common and common not in names.values() else group[0])
    return names
