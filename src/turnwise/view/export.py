"""Writes runs into one HTML file that needs no server: the same page, with the answers to its questions inside.

A file cannot hold every attempt of a long run, so it holds the newest groups up to a bound, and says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.envs.joint import SEPARATOR
from turnwise.errors import ConfigError
from turnwise.view.app import STATIC
from turnwise.view.attempts import MAX_PAGE, AttemptFilter
from turnwise.view.pages import Pages
from turnwise.view.runs import UNREADABLE, Json, json_ready
from turnwise.view.serve import open_pages

EXPORTED_METRICS = ("eval/success", "eval/reward", "rollout/reward_mean", "rollout/success_mean")
"""Metrics that runs can be compared in; the page of a run holds all of its own."""


def export_page(place: Path, file: Path, *, num_attempts: int) -> str:
    """Write the page; returns what was written, in words."""
    pages = open_pages(place)
    try:
        answers = _answers(pages, num_attempts)
    finally:
        pages.close()
    text = one_file(answers)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"{file} cannot be written: {cause.strerror}; choose another file") from cause
    num_runs = len(answers["answers"]["runs"][""]["runs"])
    runs = f"{num_runs} run{'' if num_runs == 1 else 's'}"
    return f"{file}: {runs}, {len(answers['attempts'])} attempts, {len(text) / 1e6:.1f} MB"


def _answers(pages: Pages, num_attempts: int) -> Json:
    runs = pages.runs({})
    names = [run["name"] for run in runs["runs"] if run["state"] != "damaged"]
    joined = {"runs": ",".join(names)}
    answers: dict[str, dict[str, Any]] = {
        "runs": {"": runs},
        "differences": {"": pages.differences(joined)},
        "curves": {metric: pages.curves({**joined, "metric": metric}) for metric in EXPORTED_METRICS},
        "run": {run["name"]: pages.run({"run": run["name"]}) for run in runs["runs"]},
        "findings": {name: pages.findings({"run": name}) for name in names},
        "attempt": {},
        "group": {},
    }
    for curves in answers["curves"].values():
        curves["metrics"] = [metric for metric in curves["metrics"] if metric in EXPORTED_METRICS]
    attempts: list[Json] = []
    num_stored = 0
    worlds = {run["name"]: run.get("worlds", []) for run in runs["runs"]}
    for name in names:
        rows = _chosen_attempts(pages, name, num_attempts)
        num_stored += pages.attempts({"run": name, "size": "1"})["total"]
        for row in rows:
            asked = {"run": name, "id": str(row["id"])}
            try:
                attempt, group = pages.attempt(asked), pages.group(asked)
            except UNREADABLE:
                continue
            kept = {one["id"] for one in rows}
            key = f"{name}/{row['id']}"
            answers["attempt"][key], answers["group"][key] = attempt, _only(group, kept)
            attempts.append({**row, "world": _world(row, worlds[name]), "text": _words(attempt)})
    note = f"this file holds {len(attempts):,} of {num_stored:,} attempts: the newest groups of each run"
    return {"answers": answers, "attempts": attempts, "note": note}


def _chosen_attempts(pages: Pages, name: str, count: int) -> list[Json]:
    """The newest attempts of a run, whole groups first: half from evaluations, the rest from training."""
    directory = pages.directory(name)
    chosen: list[Json] = []
    for phase, bound in (("eval", count // 2), ("train", count)):
        found = pages.lists.groups({name: directory}, AttemptFilter(phase=phase), 0, MAX_PAGE)["groups"]
        for group in found:
            own = group["attempts"]
            if len(chosen) + len(own) <= bound or (not chosen and bound):
                chosen += [{"run": name, "preview": "", **one} for one in own[: bound - len(chosen)]]
    pages.lists.add_previews({name: directory}, chosen)
    return chosen


def _only(group: Json, kept: set[int]) -> Json:
    """A group without the attempts that the file does not hold."""
    nodes = [{**node, "attempts": [one for one in node["attempts"] if one in kept]} for node in group["nodes"]]
    return {
        "attempts": [one for one in group["attempts"] if one["id"] in kept],
        "num_left_out": sum(one["id"] not in kept for one in group["attempts"]),
        "nodes": [node for node in nodes if node["attempts"]],
    }


def _world(row: Json, worlds: list[str]) -> str:
    """The world of an attempt; a task of a mix begins with its member's name."""
    return worlds[0] if len(worlds) == 1 else str(row["task_id"]).partition(SEPARATOR)[0]


def _words(attempt: Json) -> str:
    messages = list(attempt["start"])
    for turn in attempt["turns"]:
        messages += [turn["reply"], *turn["observation"]]
    return "\n".join(message["content"] for message in messages).lower()


def one_file(answers: Mapping[str, Any]) -> str:
    """The page with its scripts, styles, fonts and answers inside; only these scripts may run in it."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    hashes: list[str] = []

    # A deferred script may stand in the head; an inline one runs at once, so all of them go to the end of the body.
    tags: list[str] = []
    for src in re.findall(r'<script defer src="([^"]+)"></script>', page):
        text = _static(src).decode()
        hashes.append("'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'")
        tags.append(f"<script>{text}</script>")
    page = re.sub(r'<script defer src="[^"]+"></script>\n', "", page)
    page = re.sub(r'<link rel="stylesheet" href="([^"]+)">', lambda match: f"<style>{_style(match[1])}</style>", page)
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; font-src data:; img-src data:"
    )
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    # "</script>" or "<!--" inside the data would end the element early.
    data = json.dumps(json_ready(answers), allow_nan=False).replace("<", "\\u003c")
    block = f'<script type="application/json" id="answers">{data}</script>'
    return page.replace("</body>", "\n".join([block, *tags, "</body>"]), 1)


def _static(src: str) -> bytes:
    return (STATIC / src.removeprefix("static/")).read_bytes()


def _style(src: str) -> str:
    def inline(match: re.Match[str]) -> str:
        return f'url("data:font/woff2;base64,{base64.b64encode(_static(match[1])).decode()}")'

    return re.sub(r'url\("(vendor/[^"]+)"\)', inline, _static(src).decode())
