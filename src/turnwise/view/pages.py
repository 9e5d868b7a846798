"""Every question that the page asks, by its address: the server answers them, and the export writes answers down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.runtime.suggest import did_you_mean
from turnwise.view.attempts import FACETS, PAGE, AttemptFilter, AttemptLists
from turnwise.view.index import IndexWorker
from turnwise.view.one_attempt import attempt_json, group_json
from turnwise.view.one_run import findings, run_json
from turnwise.view.runs import UNREADABLE, Json, RunFolder, curve, revision, seeds_curve

Query = Mapping[str, str]


class Pages:
    """Answers the page's questions about the runs of one folder."""

    def __init__(self, place: Path) -> None:
        self.folder = RunFolder(place)
        self.worker = IndexWorker()
        self.lists = AttemptLists(self.worker)
        self._findings: dict[Path, tuple[str, list[Json]]] = {}
        self.answers: Mapping[str, Callable[[Query], Json]] = {
            "runs": self.runs,
            "curves": self.curves,
            "differences": self.differences,
            "revisions": self.revisions,
            "run": self.run,
            "findings": self.findings,
            "attempts": self.attempts,
            "groups": self.groups,
            "facets": self.facets,
            "attempt": self.attempt,
            "group": self.group,
        }

    def close(self) -> None:
        self.worker.close()

    def directory(self, name: str) -> Path:
        places = self.folder.directories()
        if name not in places:
            raise ConfigError(f"no run {name!r} below {self.folder.shown_place}{did_you_mean(name, list(places))}")
        return places[name]

    def runs(self, _query: Query) -> Json:
        return {"place": self.folder.shown_place, "runs": self.folder.summaries()}

    def revisions(self, _query: Query) -> Json:
        """A text for each run that changes when the run does."""
        return {"revisions": self.folder.revisions()}

    def differences(self, query: Query) -> Json:
        return self.folder.differences(_names(query))

    def curves(self, query: Query) -> Json:
        """One metric of several runs; runs of one group also as mean and interval between seeds."""
        metric, names = query.get("metric", "eval/success"), _names(query)
        curves: dict[str, Json] = {}
        metrics: set[str] = set()
        for name in names:
            try:
                with RunReader(self.directory(name)) as run:
                    curves[name] = curve(run, metric)
                    metrics.update(run.metric_names())
            except UNREADABLE:
                continue  # the list of runs says that it is damaged
        groups: dict[str, list[str]] = {}
        for one in self.folder.summaries():
            if one["name"] in curves:
                groups.setdefault(one["group"], []).append(one["name"])
        drawn = [
            {"group": group, "runs": members, **self._group_curve([curves[name] for name in members])}
            for group, members in groups.items()
        ]
        return {"metric": metric, "curves": curves, "groups": drawn, "metrics": sorted(metrics)}

    @staticmethod
    def _group_curve(curves: list[Json]) -> Json:
        return curves[0] if len(curves) == 1 else seeds_curve(curves)

    def run(self, query: Query) -> Json:
        name = query.get("run", "")
        summary = next((one for one in self.folder.summaries() if one["name"] == name), None)
        directory = self.directory(name)
        if summary is None or summary["state"] == "damaged":
            return {"summary": summary}
        with RunReader(directory) as run:
            return {"summary": summary, **run_json(run, self.folder.config(run))}

    def findings(self, query: Query) -> Json:
        """The doctor reads many attempts, so it is asked once the rest of the page is there."""
        directory = self.directory(query.get("run", ""))
        key = revision(directory)
        if self._findings.get(directory, ("", []))[0] != key:
            with RunReader(directory) as run:
                self._findings[directory] = (key, findings(run))
        return {"findings": self._findings[directory][1]}

    def attempts(self, query: Query) -> Json:
        runs, members = self._chosen_runs(query)
        return self.lists.page(
            runs,
            _filter(query, members),
            query.get("order", "newest"),
            _whole(query, "first", 0),
            _whole(query, "size", PAGE),
        )

    def groups(self, query: Query) -> Json:
        runs, members = self._chosen_runs(query)
        return self.lists.groups(runs, _filter(query, members), _whole(query, "first", 0), _whole(query, "size", PAGE))

    def facets(self, query: Query) -> Json:
        return self.lists.facets(*self._chosen_runs(query))

    def attempt(self, query: Query) -> Json:
        with RunReader(self.directory(query.get("run", ""))) as run:
            config = self.folder.config(run)
            model = (config.get("model") or {}).get("name") or ""
            return attempt_json(run, _whole(query, "id", 0), model)

    def group(self, query: Query) -> Json:
        with self.worker.index(self.directory(query.get("run", ""))).opened() as database:
            return group_json(database, _whole(query, "id", 0))

    def _chosen_runs(self, query: Query) -> tuple[dict[str, Path], dict[str, str]]:
        """The run that is asked for, or all readable runs, of one world if it is named; and of those that mix worlds,
        the member that is meant."""
        name, world = query.get("run", ""), query.get("world", "")
        if name and not world:
            return {name: self.directory(name)}, {}
        found = [one for one in self.folder.summaries() if one["state"] != "damaged" and name in ("", one["name"])]
        if name and not found:
            return {name: self.directory(name)}, {}
        chosen = [one for one in found if not world or world in (one["world"], *one["worlds"])]
        members = {one["name"]: world for one in chosen if world and one["world"] != world}
        return {one["name"]: Path(one["directory"]) for one in chosen}, members


def _names(query: Query) -> list[str]:
    return [name for name in query.get("runs", "").split(",") if name]


def _filter(query: Query, members: Mapping[str, str]) -> AttemptFilter:
    values: dict[str, Any] = {name: query.get(name, "").strip() for name in (*FACETS, "task", "success", "text")}
    values |= {name: _number(query, name, int) for name in ("step_from", "step_to")}
    values |= {name: _number(query, name, float) for name in ("reward_from", "reward_to")}
    return AttemptFilter(**values, members=members)


def _number(query: Query, name: str, kind: type[int] | type[float]) -> float | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}; expected a number") from None


def _whole(query: Query, name: str, default: int) -> int:
    found = _number(query, name, int)
    return default if found is None else max(0, int(found))
