"""`turnwise status` shows what a run is doing, `turnwise stop` ends it, `turnwise steer` changes its settings."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

from turnwise.config.files import config_from_yaml
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.progress import branch_share_of
from turnwise.training.steer import SETTINGS, give_order, read_settings
from turnwise.watch.status import Status, is_training, read_status, seconds_ago
from turnwise.watch.terminal import format_duration

REFRESH_S = 1.0
STOP_WAIT_S = 60.0
SHOWN_METRICS = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("success", "rollout/success_mean", ".1%"),
    ("tokens/s", "rollout/sampled_tokens_per_s", ".0f"),
    ("staleness", "pool/staleness_mean", ".2f"),
    ("k2", "train/kl_sampler_trainer_k2", ".1e"),
    ("drift k2", "drift/k2", ".1e"),
    ("worst token", "drift/abs_max", ".1e"),
    ("ESS", "train/ess_fraction", ".2f"),
    ("length bias", "pool/length_bias", "+.1%"),
)


def run_status(path: str, *, as_json: bool, watch: bool) -> int:
    """Print what a run is doing; with `watch`, repeat every second until it ends."""
    with RunReader(path) as run:
        while True:
            is_alive, status = is_training(run.directory), read_status(run.directory)
            if as_json:
                print(json.dumps({"is_training": is_alive, **(asdict(status) if status is not None else {})}))
            else:
                print("\n".join(status_lines(run, status, is_alive=is_alive)), flush=True)
            if not watch or not is_alive:
                return 0
            time.sleep(REFRESH_S)
            print()


def status_lines(run: RunReader, status: Status | None, *, is_alive: bool) -> list[str]:
    """The status in lines for a person."""
    rows = {"run": str(run.directory), "state": _state(run, status, is_alive=is_alive)}
    steps = [step for step, _ in run.metric("time/step_s")]
    if status is not None and is_alive:
        rows["step"] = f"{status.step} of {status.num_steps}, policy version {status.version}"
        rows["memory"] = f"{status.memory_mb:.0f} MB"
        if status.pool:
            rows["pool"] = ", ".join(f"{count} {name}" for name, count in status.pool.items())
        if status.blocked_s > 1:
            rows["blocked"] = f"the event loop has been blocked for {status.blocked_s:.0f} s"
        rows |= _pending_calls(status)
    elif steps:
        rows["step"] = f"{steps[-1]} were done"
    shown = _metrics(run)
    if shown:
        rows["latest"] = shown
    share = branch_share_of(run)
    if share is not None:
        rows["branches"] = f"Var(R | prefix) / Var(R) is {share:.2f} over all steps; branching pays below about 0.25"
    alarms = status.alarms if status is not None and is_alive else ()
    if alarms:
        texts = {str(event.detail.get("name")): str(event.detail.get("text")) for event in run.events("alarm")}
        rows["alarms"] = "; ".join(texts.get(name, name) for name in alarms)
    lost = run.events("learners_changed")
    if lost:
        rows["learners"] = f"{len(lost)} warnings, the last one at step {lost[-1].step}: {lost[-1].detail.get('text')}"
    checkpoints = run.checkpoints()
    if checkpoints:
        rows["saved"] = f"after step {checkpoints[-1].step}"
    return [f"{name:<9}{text}" for name, text in rows.items()]


def run_stop(path: str, *, is_hard: bool) -> int:
    """Ask a run to stop, and wait until it has."""
    directory = _training_directory(path, "there is nothing to stop")
    give_order(directory, stop="hard" if is_hard else "graceful")
    ends_s = time.monotonic() + STOP_WAIT_S
    while is_training(directory):
        if time.monotonic() > ends_s:
            print(
                "the run was asked to stop but still works: "
                f"turnwise status {directory} shows what it waits for; --now stops it at once"
            )
            return ExitCode.FAILED
        time.sleep(0.1)
    print(f"stopped; go on with: turnwise train --resume {directory}")
    return 0


def run_steer(path: str, texts: list[str]) -> int:
    """Change a setting of a run that is training."""
    with RunReader(path) as run:
        config = config_from_yaml(run.config_yaml, str(run.directory))
    settings = read_settings(texts, config)
    if not settings:
        raise ConfigError(f"nothing to change; expected {' or '.join(f'{name}=VALUE' for name in SETTINGS)}")
    directory = _training_directory(
        path, f"give it when you resume the run: turnwise train --resume {path} {' '.join(texts)}"
    )
    give_order(directory, settings=settings)
    print("asked: " + ", ".join(f"{name}={value:g}" for name, value in settings.items()) + ", from the next step on")
    return 0


def _training_directory(path: str, otherwise: str) -> Path:
    with RunReader(path) as run:
        if not is_training(run.directory):
            raise ConfigError(f"no process is training in {run.directory} now; {otherwise}")
        return run.directory


def _state(run: RunReader, status: Status | None, *, is_alive: bool) -> str:
    if is_alive:
        if status is None:
            return "starting"
        late = seconds_ago(status)
        note = f"; no sign of life for {format_duration(late)}" if late > 5 else ""
        return f"{status.phase}, process {status.pid}{note}"
    if status is not None and status.phase in ("finished", "stopped", "failed"):
        last = next(reversed(run.events()), None)
        if status.phase == "finished" or last is None or last.kind != "failed":
            return status.phase
        return f"{status.phase}: {last.detail.get('error')}"
    return "killed, or not started; go on with: turnwise train --resume " + str(run.directory)


def _pending_calls(status: Status) -> dict[str, str]:
    rows: dict[str, str] = {}
    if status.reason:
        rows["loop"] = f"waits for {status.reason}"
    for index, call in enumerate(status.pending_calls[:5]):
        who = f" ({call.who})" if call.who else ""
        name = "waits" if index == 0 else " " * (index + 1)  # one key per line
        rows[name] = f"{call.party}: {call.what}{who}, {call.waited_s:.1f} s of at most {call.deadline_s:g} s"
    if status.num_pending_calls > len(rows) and status.num_pending_calls > 5:
        rows["  more"] = f"{status.num_pending_calls - 5} others"
    return rows


def _metrics(run: RunReader) -> str:
    parts: list[str] = []
    for label, key, form in SHOWN_METRICS:
        rows = run.metric(key)
        if rows and math.isfinite(rows[-1][1]):
            parts.append(f"{label} {rows[-1][1]:{form}}")
    return "  ".join(parts)
