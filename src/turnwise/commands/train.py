"""`turnwise train`: print the plan, train, print the report."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from turnwise.config.files import left_out
from turnwise.engine.config import ClusterConfig
from turnwise.envs.config import MIX
from turnwise.errors import ConfigError
from turnwise.runtime.exit_codes import ExitCode
from turnwise.runtime.torchrun import TorchrunWorld, leading, read_world
from turnwise.training.run import Run
from turnwise.training.session import ENGINE_PARTIES
from turnwise.training.setup import Setup, read_config, set_up_new, set_up_resume
from turnwise.watch.terminal import format_duration, open_view
from turnwise.watch.watchdog import StalledError

_LEARNERS = "cluster.learners"
_OF_LOST_LEARNERS = ("cluster.max_restarts", "cluster.min_learners")


def run_train(
    name: str | None, overrides: Sequence[str], *, only_plan: bool, resume: str | None, with_time: bool = True
) -> ExitCode:
    """Run the command. `with_time`: a plan that is printed alone says how long the run takes."""
    if not only_plan and not with_time:
        raise ConfigError("--no-time is read with --plan only: a run measures nothing before it starts; leave it out")
    world = read_world()
    if world is not None and world.rank:
        from turnwise.engine.learners.torchrun import serve_leader

        serve_leader(world)
        return ExitCode.OK
    if world is not None:
        overrides = _with_learners(name, overrides, world, is_new=resume is None)
    setup = _set_up(name, overrides) if resume is None else set_up_resume(Path(resume), overrides, report=say)
    if world is not None:
        _check_under_torchrun(setup.config.cluster)
    with leading():
        code = _plan_and_run(setup, only_plan=only_plan, with_time=with_time)
    if world is not None:
        from turnwise.engine.learners.torchrun import release_others

        release_others(world)
    return code


def _plan_and_run(setup: Setup, *, only_plan: bool, with_time: bool) -> ExitCode:
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


def _with_learners(name: str | None, overrides: Sequence[str], world: TorchrunWorld, *, is_new: bool) -> Sequence[str]:
    """The options with as many learners as torchrun has started; another number is refused, and what to do without a
    rank, which torchrun decides."""
    for option in _OF_LOST_LEARNERS:
        if any(text.startswith(f"{option}=") for text in overrides):
            raise ConfigError(
                f"{option} is not read under torchrun: it ends all processes if one dies; leave the option out, and "
                "resume the run"
            )
    given = [text.partition("=")[2] for text in overrides if text.startswith(f"{_LEARNERS}=")]
    if not given and is_new:
        with contextlib.suppress(ConfigError):  # what is wrong without the options may be right with them
            count = read_config(name or _named_world(overrides) or "", []).cluster.learners
            given = [str(count)] if count > 1 else []
    if given and given[-1] != str(world.size):
        raise ConfigError(
            f"{_LEARNERS}={given[-1]}, and torchrun has started {world.size} processes; leave the option out, or start "
            "torchrun with as many"
        )
    return [*overrides, f"{_LEARNERS}={world.size}"]


def _check_under_torchrun(cluster: ClusterConfig) -> None:
    if cluster.uses_ray:
        raise ConfigError(
            f"cluster.address={cluster.address} under torchrun: torchrun has started the learners, and a Ray cluster "
            "would start others; leave one of them out"
        )
    if cluster.samples_too(1):
        raise ConfigError(
            f"cluster.samplers={cluster.samplers} under torchrun: its processes only train; set cluster.placement="
            "separate, or start without torchrun"
        )


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
