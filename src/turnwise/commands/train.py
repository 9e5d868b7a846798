"""`turnwise train`: print the plan, train, print the report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from turnwise.config.files import left_out
from turnwise.envs.config import MIX
from turnwise.errors import ConfigError
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.run import Run
from turnwise.training.session import ENGINE_PARTIES
from turnwise.training.setup import Setup, read_config, set_up_new, set_up_resume
from turnwise.watch.terminal import format_duration, open_view
from turnwise.watch.watchdog import StalledError


def run_train(
    name: str | None, overrides: Sequence[str], *, only_plan: bool, resume: str | None, with_time: bool = True
) -> ExitCode:
    """Run the command. `with_time`: a plan that is printed alone says how long the run takes."""
    if not only_plan and not with_time:
        raise ConfigError("--no-time is read with --plan only: a run measures nothing before it starts; leave it out")
    setup = _set_up(name, overrides) if resume is None else set_up_resume(Path(resume), overrides, report=say)
    print("\n".join(setup.plan_lines()), flush=True)
    if only_plan and with_time:
        from turnwise.training.plan_time import time_lines

        print("\n".join(time_lines(setup, say)), flush=True)
    if only_plan:
        return ExitCode.OK
    started_s = time.monotonic()
    try:
        run = Run.start(setup, observer=open_view(setup.config.train.steps), on_stuck=end_process)
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:  # a second Ctrl-C: nobody has told the user yet
            raise
        return ExitCode.INTERRUPTED
    except StalledError as error:
        if error.party in ENGINE_PARTIES:  # its thread would keep the process alive
            end_process(error)
        raise
    if run.state == "stopped":
        return ExitCode.INTERRUPTED
    print(f"done in {format_duration(time.monotonic() - started_s)}")
    print(run.report())
    return ExitCode.OK


def _set_up(name: str | None, overrides: Sequence[str]) -> Setup:
    name = name or _named_world(overrides)
    if name is None:
        raise ConfigError("nothing to train; expected turnwise train NAME|FILE, env=WORLD, or --resume RUN")
    return set_up_new(read_config(name, overrides), notes=left_out(name, overrides), report=say)


def _named_world(overrides: Sequence[str]) -> str | None:
    """The world of `env=NAME`, or a mix, if no preset, file or world was given."""
    pairs = [text.partition("=") for text in overrides]
    if any(key.strip() == "env.mix" or key.startswith("env.mix.") for key, _, _ in pairs):
        return MIX
    return next((value for key, _, value in reversed(pairs) if key in ("env", "env.name") and value), None)


def end_process(error: StalledError) -> NoReturn:
    """End this process at once: a party that does not answer cannot be closed either."""
    say(f"turnwise: {error}")
    sys.stdout.flush()
    os._exit(ExitCode.STALLED)


def say(line: str) -> None:
    """Print a message on stderr; stdout is for results that a script may read."""
    print(line, file=sys.stderr, flush=True)
