"""An asynchronous run that is killed again and again ends where runs end that nobody touched.

    make campaign NAME=train_kills ARGS="--kills 50"

`tiny` learns a guessing game, playing ahead. Runs of several seeds that nobody touches give the band of final held-out
success. Then a run of the first seed gets `kill -9` at random moments, spread over its steps, its start-ups and its
warm-up, and is resumed each time. No deal may be lost or learned from twice, no step may lack its row of metrics, and
its final success must lie in the band.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config.files import config_from_yaml
from turnwise.models.facts import read_facts
from turnwise.models.store import fetch_model, resolve_model
from turnwise.rollout.seeds import derive_seed, world_seed
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import EvaluationRow
from turnwise.training.assemble import assemble
from turnwise.watch.status import read_status

PRESET = "guess_number_tiny"
LEARNS = (
    "env.options.demonstration_skill=0.7",
    "warmup.steps=300",
    "method.entropy_coef=0",
    "eval.every=0",
    "eval.tasks=64",
    "eval.samples=4",
    "train.max_staleness=2",
    "train.save_every=1",
    "train.keep_checkpoints=2",
    "run.dialogues=0",
)
START_SHARE = 0.2
"""Of the kills, how many hit a process that has not begun to train."""
LOOK_S = 0.1
LIFE_S = 3600.0
"""How long one process may take at most; a run that is slower is a finding."""

Attempts = Counter[tuple[str, int, int]]
"""How often each (task, attempt, seed) came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has come to its end."""

    evaluations: Sequence[EvaluationRow]
    step_s: float
    """Mean seconds of a step."""
    problems: Sequence[str]

    @property
    def end(self) -> EvaluationRow:
        return self.evaluations[-1]

    def summary(self) -> dict[str, Any]:
        return {
            "held_out": {row.label: round(row.success, 3) for row in self.evaluations},
            "interval": [round(self.end.success_low, 3), round(self.end.success_high, 3)],
            "step_s": round(self.step_s, 2),
        }


def start(*arguments: str) -> subprocess.Popen[str]:
    """`turnwise train` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "turnwise.cli", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def expected_attempts(run: RunReader) -> Attempts:
    """Everything that the deck deals in `train.steps` steps, from the config alone."""
    config = config_from_yaml(run.config_yaml, "run")
    parts = assemble(config, read_facts(resolve_model("tiny").directory))
    found: Attempts = Counter()
    for step in range(config.train.steps):
        times: Counter[str] = Counter()
        first = step * config.train.tasks_per_step
        for task in (parts.tasks.item(first + place) for place in range(config.train.tasks_per_step)):
            step_seed = derive_seed(config.train.seed, "train", step)
            seed = derive_seed(step_seed, task.id, times[task.id])
            times[task.id] += 1
            for index in range(parts.rollout.group_size):
                found[task.id, index, world_seed(seed)] += 1
    return found


def learned_attempts(run: RunReader) -> Attempts:
    trajectories = [run.attempt(row.id).trajectory for row in run.attempts(phase="train")]
    return Counter((one.task_id, one.attempt, one.seed) for one in trajectories)


def finished(directory: Path, num_steps: int) -> Finished:
    """Read a run and check that every deal and every step is there exactly once."""
    problems: list[str] = []
    with RunReader(directory) as run:
        expected, found = expected_attempts(run), learned_attempts(run)
        for name, difference in (("lost", expected - found), ("doubled or unknown", found - expected)):
            if difference:
                problems.append(f"{difference.total()} attempts {name}: {list(difference)[:3]}")
        times = run.metric("time/step_s")
        if [step for step, _ in times] != list(range(1, num_steps + 1)):
            problems.append(f"{len(times)} rows of metrics for {num_steps} steps")
        staleness = max((value for _, value in run.metric("pool/staleness_max")), default=0.0)
        if staleness > 2:
            problems.append(f"a token was {staleness:g} updates old; at most 2 were allowed")
        evaluations = [row for row in run.evaluations() if row.label != "start"]
    return Finished(
        evaluations=evaluations,
        step_s=sum(value for _, value in times) / max(1, len(times)),
        problems=problems,
    )


def run_through(arguments: Sequence[str], directory: Path, num_steps: int) -> Finished:
    """A run that nobody touches; one that is there already and has come to its end is read."""
    if not has_ended(directory):
        process = start(*arguments)
        out, _ = process.communicate(timeout=LIFE_S)
        assert process.returncode == 0, out
    return finished(directory, num_steps)


def has_ended(directory: Path) -> bool:
    if not is_run(directory):
        return False
    with RunReader(directory) as run:
        return any(row.label == "end" for row in run.evaluations())


class Killer:
    """Kills one run at moments that are drawn from a seed, until it may finish."""

    def __init__(self, arguments: Sequence[str], directory: Path, moments: random.Random) -> None:
        self._arguments = list(arguments)
        self._directory = directory
        self._moments = moments
        self.killed: Counter[str] = Counter()
        """How often, by what the run was doing."""
        self.problems: list[str] = []

    def kill_at_step(self, step: int, *, within_s: float) -> None:
        """Kill when `step` steps are done, or at once where they are, and some seconds on top."""
        process = self._start()
        self._wait(process, lambda: self._is_training(process) and self._num_steps_done() >= step)
        self._kill(process, within_s, "training")

    def kill_early(self, *, within_s: float) -> None:
        """Kill while the process starts up, or soon after."""
        self._kill(self._start(), within_s, "start-up")

    def kill_in_warm_up(self, *, within_s: float) -> None:
        process = self._start()
        self._wait(process, lambda: self._phase(process) == "warming up")
        self._kill(process, within_s, "warm-up")

    def let_finish(self) -> None:
        process = self._start()
        out, _ = process.communicate(timeout=LIFE_S)
        if process.returncode != 0:
            self.problems.append(f"the last resume ended with {process.returncode}: {out[-2000:]}")

    def _start(self) -> subprocess.Popen[str]:
        return start(*(["--resume", str(self._directory)] if is_run(self._directory) else self._arguments))

    def _kill(self, process: subprocess.Popen[str], within_s: float, when: str) -> None:
        try:
            out, _ = process.communicate(timeout=self._moments.uniform(0, within_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.killed[when] += 1
            return
        if process.returncode != 0:
            self.problems.append(f"a process ended by itself with {process.returncode}: {out[-2000:]}")

    def _wait(self, process: subprocess.Popen[str], is_so: Any) -> None:
        ends_s = time.monotonic() + LIFE_S
        while process.poll() is None and not is_so():
            if time.monotonic() > ends_s:
                self.problems.append(f"a process came to nothing in {LIFE_S:g} s: {read_status(self._directory)}")
                return
            time.sleep(LOOK_S)

    def _phase(self, process: subprocess.Popen[str]) -> str:
        status = read_status(self._directory)
        return "" if status is None or status.pid != process.pid else status.phase

    def _is_training(self, process: subprocess.Popen[str]) -> bool:
        return self._phase(process) == "training"

    def _num_steps_done(self) -> int:
        with RunReader(self._directory) as run:
            return max((step for step, _ in run.metric("time/step_s")), default=0)


def run_killed(
    arguments: Sequence[str],
    directory: Path,
    *,
    kills: int,
    num_steps: int,
    step_s: float,
    seed: int,
    has_warmup: bool = False,
) -> Killer:
    """One kill in the warm-up, the others spread over the run by steps, some of them before anything is trained."""
    moments = random.Random(seed)
    killer = Killer(arguments, directory, moments)
    if has_warmup:
        killer.kill_in_warm_up(within_s=5.0)
    for step in sorted(moments.randrange(num_steps) for _ in range(kills - has_warmup)):
        if moments.random() < START_SHARE:
            killer.kill_early(within_s=5.0)
        else:
            killer.kill_at_step(step, within_s=2 * step_s)
    killer.let_finish()
    return killer


def campaign(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    fetch_model("tiny")

    def arguments(name: str, seed: int) -> tuple[str, ...]:
        own = (f"train.steps={options.steps}", f"train.seed={seed}", f"run.dir={place / name}")
        return (PRESET, *LEARNS, *own)

    untouched: list[Finished] = []
    for seed in range(options.seeds):
        untouched.append(run_through(arguments(f"whole-{seed}", seed), place / f"whole-{seed}", options.steps))
        print(json.dumps({"seed": seed, **untouched[-1].summary()}), file=sys.stderr, flush=True)
    killer = run_killed(
        arguments("killed", 0),
        place / "killed",
        kills=options.kills,
        num_steps=options.steps,
        step_s=max(one.step_s for one in untouched),
        seed=options.moments,
        has_warmup=True,
    )
    killed = finished(place / "killed", options.steps)
    low, high = min(one.end.success_low for one in untouched), max(one.end.success_high for one in untouched)
    problems = [*killer.problems, *killed.problems, *(line for one in untouched for line in one.problems)]
    if killer.killed.total() != options.kills:
        problems.append(f"{killer.killed.total()} kills of {options.kills}: the run ended too early")
    if not low <= killed.end.success <= high:
        problems.append(f"final success {killed.end.success:.1%} is outside the band {low:.1%} to {high:.1%}")
    if low <= max(one.evaluations[0].success for one in (*untouched, killed)):
        problems.append("the band reaches down to the success before training, so it proves nothing")
    return {
        "campaign": "train_kills",
        "kills": killer.killed.total(),
        "kills_while": dict(killer.killed),
        "steps": options.steps,
        "band": [round(low, 3), round(high, 3)],
        "untouched": [one.summary() for one in untouched],
        "killed": killed.summary(),
        "problems": problems,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="runs that nobody touches")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--moments", type=int, default=0, help="seed of the moments")
    parser.add_argument(
        "--keep", type=Path, help="a folder to keep the runs in; untouched runs that are there are read"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        report = campaign(options.keep or Path(directory), options)
    print(json.dumps(report, indent=2))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
