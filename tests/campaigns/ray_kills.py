"""A run on a local Ray cluster of two nodes, whose learner, env workers and second node are killed while it trains.

    python -m campaigns.ray_kills --kills 20          # with the interpreter of tests/ray_environment.py

Prints one line of JSON: what was killed, how the run ended, and how far its weights are from those of a run that nobody
touched. Only deaths of env workers move them: an attempt that is played again draws other seeds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import turnwise as tw
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader

ECHO = f"{Path(__file__).parents[1] / 'e2e' / 'echo_world.py'}:EchoWorld"
SMALL = (
    *("model=tiny", "train.tasks_per_step=2", "rollout.group_size=4", "train.learning_rate=1e-3", "eval.tasks=0"),
    *("train.save_every=1", "train.max_empty_steps=1000", "run.dialogues=0", "rollout.deterministic=true"),
)
HANG_S = 600.0
"""Only a hang takes so long."""
VICTIMS = {"learner": "ray::LearnerActor", "env": "ray::EnvWorkerActor"}


def start_cluster(num_cpus: int) -> Any:
    """Two nodes on this machine, without dashboards. `num_cpus` of each is how many actors have room there."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # a busy machine takes long
    cluster_utils = importlib.import_module("ray.cluster_utils")
    node = {"num_cpus": num_cpus, "object_store_memory": 100 * 2**20}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    return cluster, cluster.add_node(**node)


def weights(directory: Path) -> np.ndarray:
    with RunReader(directory) as run:
        place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
    tensors = load_file(place / "adapter_model.safetensors")
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def find(title: str) -> list[int]:
    """Processes of actors, by the title that Ray gives them."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes()
        except OSError:
            continue
        found += [int(place.name)] if line.startswith(title.encode()) else []
    return found


class Killer(tw.Observer):
    """Kills actors at random moments after the first step; `node` removes the second node, once.

    The run waits for it two steps before its end, so that every kill falls into the run, however fast the run is.
    """

    def __init__(self, kinds: Sequence[str], remove_node: Callable[[], object], seed: int) -> None:
        self.killed: list[str] = []
        self._kinds, self._remove_node, self._random = kinds, remove_node, random.Random(seed)
        self._steps = threading.Condition()
        self._num_steps, self._is_held = 0, False
        self._is_done = threading.Event()
        threading.Thread(target=self._kill_all, daemon=True).start()

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        with self._steps:
            self._num_steps, self._is_held = step, step >= num_steps - 2
            self._steps.notify_all()
        if self._is_held and not self._is_done.wait(HANG_S):
            raise TimeoutError(f"only {self.killed} of {self._kinds} were killed in {HANG_S} s")

    def _kill_all(self) -> None:
        for kind in self._kinds:
            self._wait_for_a_step()
            time.sleep(self._random.uniform(0.0, 0.5))
            if kind == "node":
                self._remove_node()
            else:
                while not (pids := find(VICTIMS[kind])):
                    time.sleep(0.05)
                os.kill(self._random.choice(pids), signal.SIGKILL)
            self.killed.append(kind)
        self._is_done.set()

    def _wait_for_a_step(self) -> None:
        with self._steps:
            before = self._num_steps
            self._steps.wait_for(lambda: self._num_steps > before or self._is_held)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", default="learner", help="a number, or kinds: learner,env,node")
    parser.add_argument("--steps", type=int, default=0, help="default: three for each kill, and three more")
    parser.add_argument("--env-workers", type=int, default=0)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--min-learners", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=2, help="of each node")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chooser = random.Random(args.seed)
    kinds = (
        args.kills.split(",") if not args.kills.isdigit() else chooser.choices(["learner", "env"], k=int(args.kills))
    )
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        calm, rough = Path(place) / "calm", Path(place) / "rough"
        steps = f"train.steps={args.steps or 3 * len(kinds) + 3}"
        tw.train(ECHO, directory=calm, overrides=[*SMALL, steps], observer=tw.Observer())
        cluster, node = start_cluster(args.cpus)
        killer = Killer(kinds, lambda: cluster.remove_node(node, allow_graceful=False), args.seed)
        options = [f"cluster.learners={args.learners}", f"cluster.max_restarts={2 * len(kinds) + 2}"]
        options += [f"cluster.env_workers={args.env_workers}", "rollout.max_retries=20"] if args.env_workers else []
        options += [f"cluster.min_learners={args.min_learners}"] if args.min_learners else []
        options += [*SMALL, steps, f"cluster.address={cluster.address}"]
        run = tw.train(ECHO, directory=rough, overrides=options, observer=killer)
        expected, found = weights(calm), weights(rough)
        report = {
            "state": run.state,
            "killed": killer.killed,
            "steps": len(run.metrics["step"]),
            "relative_error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected)),
            "seconds": round(time.monotonic() - started_s, 1),
        }
        print(json.dumps(report), flush=True)
        importlib.import_module("ray").shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
