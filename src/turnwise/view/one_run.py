"""One run for the page: how it stands, its metrics by area, what was found, its plan, certificate and config."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from turnwise.doctor import diagnose
from turnwise.rollout.certify import Certificate
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import Event
from turnwise.training.steer import SETTINGS
from turnwise.view.runs import UNREADABLE, Json, evaluation_json, finite, thinned
from turnwise.watch.catalogue import CATALOGUE, find_metric
from turnwise.watch.status import is_training

MAX_EVENTS = 200


def run_json(run: RunReader, config: Json) -> Json:
    """Everything about a run but its attempts; `config` is its config as a tree."""
    certificates = run.certificates()
    return {
        "metrics": [_metric_json(run, name) for name in run.metric_names()],
        "areas": list(dict.fromkeys(metric.name.partition("/")[0] for metric in CATALOGUE)),
        "evaluations": [evaluation_json(row) for row in run.evaluations()],
        "events": [_event_json(event) for event in run.events()[-MAX_EVENTS:]],
        "plan": run.meta("plan"),
        "certificates": [
            {"step": row.step, "is_exact": row.is_exact, "lines": Certificate.from_json(row.content).lines()}
            for row in certificates
        ],
        "checkpoints": [{"step": row.step, "path": row.path} for row in run.checkpoints()],
        "config": run.config_yaml,
        "settings": dict(_settings(config)),
    }


def findings(run: RunReader) -> list[Json]:
    """What a person should know first: how the run ended, and why it does not learn, as `turnwise doctor` says it."""
    found = _ends(run.events(), is_alive=is_training(run.directory))
    try:
        diagnosed = diagnose(run)
    except UNREADABLE as error:  # a config of another version of turnwise, for one
        return [*found, _finding("warning", "the doctor cannot read this run", str(error))]
    for one in diagnosed:
        fixes = [f"{fix.option}: {fix.text}" if fix.option else fix.text for fix in one.fixes]
        seen = f"{one.seen[:1].upper()}{one.seen[1:]}: {one.why}."
        found.append(_finding("warning", one.name.replace("_", " "), seen, fixes=fixes, evidence=one.evidence))
    return found


def _finding(level: str, title: str, text: str, *, fixes: Sequence[str] = (), evidence: str = "") -> Json:
    return {"level": level, "title": title, "text": text, "fixes": list(fixes), "evidence": evidence}


def _ends(events: Iterable[Event], *, is_alive: bool) -> list[Json]:
    """How the last process of the run ended, and what became of its learners."""
    found: list[Json] = []
    for event in events:
        if event.kind == "resumed":
            found = []
        elif event.kind == "failed" and not is_alive:
            found.append(_finding("error", f"the run failed at step {event.step}", str(event.detail.get("error"))))
        elif event.kind == "learners_changed":
            found.append(_finding("warning", f"learners were lost at step {event.step}", str(event.detail.get("text"))))
        elif event.kind == "solved":
            text = f"Every attempt of the last {event.detail.get('steps')} steps succeeded."
            found.append(_finding("good", f"solved at step {event.step}", text))
    return found


def _metric_json(run: RunReader, name: str) -> Json:
    row = find_metric(name)
    points = thinned([(step, value) for step, value in run.metric(name) if math.isfinite(value)])
    return {
        "name": name,
        "unit": "" if row is None else row.unit,
        "meaning": "" if row is None else row.meaning,
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
    }


def _event_json(event: Event) -> Json:
    detail = {key: finite(value) if isinstance(value, float) else value for key, value in event.detail.items()}
    return {"time": event.time, "step": event.step, "kind": event.kind, "detail": json.dumps(detail, default=str)}


def _settings(config: Json) -> Iterable[tuple[str, Any]]:
    """The settings that `steer` can change, with their values now."""
    for setting in SETTINGS:
        section, _, name = setting.partition(".")
        yield setting, (config.get(section) or {}).get(name)
