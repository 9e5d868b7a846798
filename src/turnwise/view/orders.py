"""The buttons of the page: stop, steer and resume a run, by the functions that the commands use."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from turnwise.config.files import config_from_yaml
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.training.run import Run
from turnwise.training.steer import read_settings
from turnwise.watch.status import is_training

RESUME_LOG = "resume.log"
"""What a run prints that was resumed from the page."""
START_S = 30.0
"""A resumed run holds its lock after this long, or ended with an error."""
LOG_TAIL = 2000


def stop_run(directory: Path, *, now: bool) -> str:
    Run.open(directory).stop(now=now)
    return "asked to stop now, at its last checkpoint" if now else "asked to stop after this step"


def steer_run(directory: Path, text: str) -> str:
    """`text` is a setting such as `train.steps=100`, as `turnwise steer` takes it."""
    with RunReader(directory) as run:
        settings = read_settings([text], config_from_yaml(run.config_yaml, str(directory)))
    for name, value in settings.items():
        Run.open(directory).steer(name, value)
    return "asked: " + ", ".join(f"{name}={value:g}" for name, value in settings.items()) + ", from the next step on"


def resume_run(directory: Path, overrides: list[str]) -> str:
    """Start `turnwise train --resume` as a process of its own, which lives on when the page is closed."""
    if is_training(directory):
        raise ConfigError(f"a process is training in {directory} already")
    command = [sys.executable, "-m", "turnwise.cli", "train", "--resume", str(directory), *overrides]
    log = directory / RESUME_LOG
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
            if process.returncode:
                raise ConfigError(f"the run did not start: {said}")
            return f"the run is over already: {said.splitlines()[-1] if said else 'nothing is left to do'}"
        if is_training(directory):
            return f"process {process.pid} goes on with it; it prints to {log}"
        time.sleep(0.1)
    raise ConfigError(f"process {process.pid} does not train after {START_S:.0f} s; look into {log}")
