"""A run on a local Ray cluster of two nodes, whose learner, samplers, env workers and second node are killed while it
trains.

    make campaign NAME=ray_kills ARGS="--kills 20 --samplers 2 --env-workers 2 --calm-seeds 4"

Most kills come within one and a half steps after a step has ended; a quarter of them comes at once, and so may meet
processes that are just being started again. Prints one line of JSON: what was killed in which step, how the run ended,
which attempts are missing or there twice beside a run that nobody touched, and how far its weights and its reward at
the end are from that run's; `--calm-seeds` tells how far those of undisturbed runs with other seeds are. Only deaths of
env workers move the weights: an attempt that is played again draws other seeds.

The word `also` between options begins those of another run on the same cluster, whose size the first run's options say.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import turnwise as tw
from processes import processes_below
from ray_environment import ray_python
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader

TESTS = Path(__file__).parents[1]
ECHO = f"{TESTS / 'e2e' / 'echo_world.py'}:EchoWorld"
SMALL = (
    *("model=tiny", "train.tasks_per_step=2", "rollout.group_size=4", "train.learning_rate=1e-3", "eval.tasks=0"),
    *("train.save_every=1", "train.max_empty_steps=1000", "run.dialogues=0", "rollout.deterministic=true"),
)
HANG_S = 600.0
"""Only a hang takes so long."""
VICTIMS = {"learner": "ray::LearnerActor", "sampler": "ray::SamplerActor", "env": "ray::EnvWorkerActor"}
KINDS = (*VICTIMS, "node")
AT_ONCE = 0.25
"""Of the kills, how many do not wait for a step."""
CLIENT_PORT = 10001
LAST = 10
"""Steps at the end whose reward is compared."""
QUICK = {
    "RAY_raylet_start_wait_time_s": "180",  # a busy machine takes long
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",  # a lost node is missed after seconds
    "RAY_prestart_worker_first_driver": "0",
}
"""Settings of Ray with which a small cluster on a busy machine loses little time."""


class TwoNodes:
    """Two nodes on this machine, without dashboards. A node's CPUs are how many learners have room there."""

    def __init__(self, num_cpus: int, *, head_cpus: int, replaces: bool, is_client: bool) -> None:
        for name, value in QUICK.items():
            os.environ.setdefault(name, value)
        utils = importlib.import_module("ray.cluster_utils")
        self._node = {"num_cpus": num_cpus, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
        self._replaces = replaces
        port = {"ray_client_server_port": CLIENT_PORT} if is_client else {}
        head = {**self._node, "num_cpus": head_cpus, "include_dashboard": False, **port}
        self.cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        self.address = f"ray://127.0.0.1:{CLIENT_PORT}" if is_client else self.cluster.address
        self._second = self.cluster.add_node(wait=False, **self._node)
        self.cluster.wait_for_nodes(timeout=180)

    def lose_node(self) -> None:
        """Kill the second node with every actor on it; waits for the node if it is being replaced."""
        while self._second is None:
            time.sleep(0.1)
        actors = processes_below(self._second.all_processes["raylet"][0].process.pid)
        self.cluster.remove_node(self._second, allow_graceful=False)
        self._second = None
        for pid in actors:  # some live on without their raylet, which those of a lost machine do not
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def replace_node(self) -> None:
        """Start another node in place of a lost one, if the campaign goes on. Ray wants the main thread for it."""
        if self._second is None and self._replaces:
            self._second = self.cluster.add_node(wait=False, **self._node)

    def shutdown(self) -> None:
        importlib.import_module("ray").shutdown()
        self.cluster.shutdown()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a finished run wrote down."""

    weights: np.ndarray
    reward: float
    """The mean of what was played in the last steps."""
    attempts: Sequence[tuple[int, str, int]]
    """Step, task and number of every attempt that did not fail."""
    drawn: Mapping[tuple[int, str, int], tuple[tuple[int, ...], ...]]
    """Its tokens, turn by turn."""
    num_failed: int

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        with RunReader(directory) as run:
            place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
            rewards = [value for _, value in run.metric("rollout/reward_mean")]
            rows = run.attempts(phase="train")
            played = [run.attempt(row.id) for row in rows if row.outcome != "failed"]
        names = [(one.row.step, one.row.task_id, one.row.attempt) for one in played]
        drawn = [tuple(tuple(turn.sampled_ids) for turn in one.trajectory.turns) for one in played]
        tensors: dict[str, np.ndarray] = {}
        for file in place.glob("*.safetensors"):
            tensors |= load_file(file) if file.name != "optimizer.safetensors" else {}
        return cls(
            weights=np.concatenate([tensors[name].ravel() for name in sorted(tensors)]),
            reward=float(np.mean(rewards[-LAST:])),
            attempts=names,
            drawn=dict(zip(names, drawn, strict=True)),
            num_failed=len(rows) - len(played),
        )

    def distance(self, other: RunRecord) -> float:
        """Of the weights, relative to the other's."""
        return float(np.linalg.norm(self.weights - other.weights) / np.linalg.norm(other.weights))


def compare(rough: RunRecord, calm: Sequence[RunRecord]) -> dict[str, Any]:
    """A disturbed run beside one that nobody touched, and beside others that differ from that one by their seeds."""
    own, expected = set(rough.attempts), set(calm[0].attempts)
    return {
        "relative_error": rough.distance(calm[0]),
        "other_seeds": [one.distance(calm[0]) for one in calm[1:]],
        "attempts": len(rough.attempts),
        "attempts_lost": len(expected - own),
        "attempts_doubled": len(rough.attempts) - len(own) + len(own - expected),
        "attempts_with_other_tokens": sum(rough.drawn[name] != calm[0].drawn[name] for name in own & expected),
        "failed_tries": rough.num_failed,
        "reward_at_the_end": rough.reward,
        "undisturbed": [one.reward for one in calm],
    }


def find(title: str) -> list[int]:
    """Processes of this campaign's actors, by the title that Ray gives them."""
    found: list[int] = []
    for pid in processes_below(os.getpid()):
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()) else []
    return found


@dataclass(slots=True)
class _EndedSteps:
    """Steps that have ended, for a thread that waits for the next one."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    num_steps: int = 0
    is_held: bool = False
    ended_s: list[float] = field(default_factory=list)

    def step_s(self) -> float:
        """Seconds of an ordinary step."""
        passed = np.diff(self.ended_s[-21:])
        return float(statistics.median(passed)) if len(passed) else 0.5


class Killer(tw.Observer):
    """Kills actors at random moments after the first step; `node` removes the second node.

    The run waits for it two steps before its end, so that every kill falls into the run, however fast the run is.
    """

    def __init__(self, kinds: Sequence[str], nodes: TwoNodes, seed: int) -> None:
        self.killed: list[tuple[str, int]] = []
        """What was killed, and how many steps had ended then."""
        self.messages: list[str] = []
        """What the run told its observers."""
        self._kinds, self._nodes, self._random = kinds, nodes, random.Random(seed)
        self._progress = _EndedSteps()
        self._is_done = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def message(self, text: str) -> None:
        self.messages.append(text)
        print(text, file=sys.stderr, flush=True)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        progress = self._progress
        with progress.changed:
            progress.ended_s.append(time.monotonic())
            progress.num_steps, progress.is_held = step, step >= num_steps - 2
            progress.changed.notify_all()
        ends_s = time.monotonic() + HANG_S
        self._nodes.replace_node()
        while progress.is_held and not self._is_done.wait(0.5):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"only {self.killed} of {self._kinds} were killed in {HANG_S} s")
            self._nodes.replace_node()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._kill_all()
        except Exception as error:  # noqa: BLE001 - the run raises it
            self._error = error
        self._is_done.set()

    def _kill_all(self) -> None:
        for number, kind in enumerate(self._kinds):
            if number == 0 or self._random.random() > AT_ONCE:
                self._wait_for_a_step()
                time.sleep(self._random.uniform(0.0, 1.5) * self._progress.step_s())
            step = self._progress.num_steps
            if kind == "node":
                self._nodes.lose_node()
            else:
                os.kill(self._random.choice(_find_alive(VICTIMS[kind])), signal.SIGKILL)
            self.killed.append((kind, step))
            print(f"killed a {kind} after step {step}", file=sys.stderr, flush=True)

    def _wait_for_a_step(self) -> None:
        progress = self._progress
        with progress.changed:
            before = progress.num_steps
            progress.changed.wait_for(lambda: progress.num_steps > before or progress.is_held)


def _find_alive(title: str) -> list[int]:
    """Actors of a kind; waits until there is one."""
    while not (pids := find(title)):
        time.sleep(0.1)
    return pids


class Warnings(logging.Handler):
    """Keeps what the run warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("turnwise").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", default="learner", help=f"a number, or kinds: {','.join(KINDS)}")
    parser.add_argument("--steps", type=int, default=0, help="default: three for each kill, and three more")
    parser.add_argument("--env-workers", type=int, default=0)
    parser.add_argument("--samplers", type=int, default=0, help="samplers of their own")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--min-learners", type=int, default=0)
    parser.add_argument("--shard", action="store_true", help="the learners hold the weights in parts")
    parser.add_argument("--full", action="store_true", help="all weights are trained")
    parser.add_argument("--client", action="store_true", help="the run is a Ray client (ray://)")
    parser.add_argument("--cpus", type=int, default=2, help="of each node")
    parser.add_argument("--head-cpus", type=int, help="of the node that is never lost, if it has others")
    parser.add_argument("--calm-seeds", type=int, default=0, help="undisturbed runs with other seeds, for the noise")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def choose_kinds(args: argparse.Namespace) -> list[str]:
    """So many kills, as many of each kind as of the others, in a random order."""
    if not args.kills.isdigit():
        return args.kills.split(",")
    is_there = {"learner": args.learners > 1, "sampler": args.samplers, "env": args.env_workers, "node": True}
    there = [kind for kind in KINDS if is_there[kind]]
    chosen = [there[number % len(there)] for number in range(int(args.kills))]
    random.Random(args.seed).shuffle(chosen)
    return chosen


def cluster_options(args: argparse.Namespace, num_kills: int) -> list[str]:
    found = [f"cluster.learners={args.learners}"]
    found += [f"cluster.max_restarts={2 * num_kills + 2}"] if num_kills and args.learners > 1 else []
    found += [f"cluster.env_workers={args.env_workers}", "rollout.max_retries=20"] if args.env_workers else []
    found += ["cluster.placement=separate", f"cluster.samplers={args.samplers}"] if args.samplers else []
    found += [f"cluster.min_learners={args.min_learners}"] if args.min_learners else []
    return found + (["cluster.shard=true"] if args.shard else [])


def make_nodes(args: argparse.Namespace) -> TwoNodes:
    head = args.cpus if args.head_cpus is None else args.head_cpus
    return TwoNodes(args.cpus, head_cpus=head, replaces=args.kills.isdigit(), is_client=args.client)


def run_campaign(args: argparse.Namespace, nodes: TwoNodes, place: Path) -> dict[str, Any]:
    kinds, started_s = choose_kinds(args), time.monotonic()
    num_steps = args.steps or 3 * len(kinds) + 3
    options = [*SMALL, f"train.steps={num_steps}", f"model.train={'full' if args.full else 'lora'}"]
    calm: list[RunRecord] = []
    for seed in range(1 + args.calm_seeds):
        directory = place / f"calm-{seed}"
        tw.train(ECHO, directory=directory, overrides=[*options, f"train.seed={seed}"], observer=tw.Observer())
        calm.append(RunRecord.read(directory))
    rough, warnings = place / "rough", Warnings()
    killer = Killer(kinds, nodes, args.seed)
    options += ["train.seed=0", *cluster_options(args, len(kinds)), f"cluster.address={nodes.address}"]
    calm_s, started_s = time.monotonic() - started_s, time.monotonic()
    run = tw.train(ECHO, directory=rough, overrides=options, observer=killer)
    return {
        "state": run.state,
        "killed": [kind for kind, _ in killer.killed],
        "killed_after_step": [step for _, step in killer.killed],
        "steps": len(run.metrics["step"]),
        **compare(RunRecord.read(rough), calm),
        "seconds": round(time.monotonic() - started_s, 1),
        "seconds_undisturbed": round(calm_s, 1),
        "warnings": warnings.said,
        "messages": killer.messages,
    }


def main() -> int:
    if importlib.util.find_spec("ray") is None:
        paths = {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
        python = str(ray_python())
        os.execve(python, [python, "-m", "campaigns.ray_kills", *sys.argv[1:]], {**os.environ, **paths})
    words = " ".join(sys.argv[1:])
    runs = [parse(given.split()) for given in words.split(" also ")]
    faulthandler.dump_traceback_later(HANG_S, repeat=True)
    nodes = make_nodes(runs[0])
    for args in runs:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(run_campaign(args, nodes, Path(place))), flush=True)
    nodes.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
