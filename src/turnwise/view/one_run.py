"""One run for the page: how it stands, its metrics by area, what was found, its plan, certificate and config."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from turnwise.rollout.certify import Certificate
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import Event
from turnwise.training.steer import SETTINGS
from turnwise.view.runs import Json, evaluation_json, finite, thinned
from turnwise.watch.catalogue import CATALOGUE, find_metric
from turnwise.watch.status import is_training, read_status

MAX_EVENTS = 200


def run_json(run: RunReader, config: Json) -> Json:
    """Everything about a run but its attempts; `config` is its config as a tree."""
    certificates = run.certificates()
    return {
        "metrics": [_metric_json(run, name) for name in run.metric_names()],
        "areas": list(dict.fromkeys(metric.name.partition("/")[0] for metric in CATALOGUE)),
        "evaluations": [evaluation_json(row) for row in run.evaluations()],
        "findings": findings(run),
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
    """What a person should know first: alarms that last, what failed, why the run ended."""
    events = run.events()
    found: list[Json] = []
    status = read_status(run.directory)
    is_alive = is_training(run.directory)
    lasting: dict[str, Event] = {}
    for event in events:
        name = str(event.detail.get("name"))
        if event.kind == "alarm":
            lasting[name] = event
        elif event.kind == "alarm_over":
            lasting.pop(name, None)
    active = set(status.alarms) if status is not None and is_alive else set(lasting)
    for name, event in lasting.items():
        if name in active:
            text = str(event.detail.get("text", name)).removeprefix("alarm: ")
            found.append({"level": "warning", "step": event.step, "title": f"alarm: {name}", "text": text})
    found += _ends(events, is_alive=is_alive)
    bad = [row.step for row in run.certificates() if not row.is_exact]
    if bad:
        text = "Trained tokens are not the sampled tokens; see the certificate below."
        found.append({"level": "error", "step": bad[0], "title": "the certificate is not exact", "text": text})
    return found


def _ends(events: Iterable[Event], *, is_alive: bool) -> list[Json]:
    """Failures, and why the run ended, of its last process."""
    found: list[Json] = []
    for event in events:
        detail = event.detail
        if event.kind == "resumed":
            found = [one for one in found if one["title"].startswith("first failure")]
        elif event.kind == "failed" and not is_alive:
            text = str(detail.get("error"))
            found.append({"level": "error", "step": event.step, "title": "the run failed", "text": text})
        elif event.kind == "first_failure":
            title = f"first failure: {detail.get('party')}"
            found.append({"level": "warning", "step": event.step, "title": title, "text": str(detail.get("detail"))})
        elif event.kind == "not_moved":
            title, text = "no step moved the weights", str(detail.get("why"))
            found.append({"level": "error", "step": event.step, "title": title, "text": text})
        elif event.kind == "solved":
            text = f"Every attempt of the last {detail.get('steps')} steps succeeded."
            found.append({"level": "good", "step": event.step, "title": "solved", "text": text})
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
