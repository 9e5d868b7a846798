"""A run on a local Ray cluster of two nodes, whose learner, samplers, env workers and second node are killed while it
trains.

    python -m campaigns.ray_kills --kills 20 --samplers 2 --env-workers 2      # with tests/ray_environment.py's Python

Prints one line of JSON: what was killed, how the run ended, how far its weights are from those of a run that nobody
touched, whether any attempt was lost or counted twice, and the mean reward at the end beside that of undisturbed runs
with other seeds (`--calm-seeds`). Only deaths of env workers move the weights: an attempt that is played again draws
other seeds.
"""

from __future__ import annotations

import argparse
import contextlib
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

import numpy as np
from safetensors.numpy import load_file

import turnwise as tw
from processes import processes_below
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader

ECHO = f"{Path(__file__).parents[1] / 'e2e' / 'echo_world.py'}:EchoWorld"
ATTEMPTS = 8
"""Of one step: two groups of four."""
SMALL = (
    *("model=tiny", "train.tasks_per_step=2", "rollout.group_size=4", "train.learning_rate=1e-3", "eval.tasks=0"),
    *("train.save_every=1", "train.max_empty_steps=1000", "run.dialogues=0", "rollout.deterministic=true"),
)
HANG_S = 600.0
"""Only a hang takes so long."""
VICTIMS = {"learner": "ray::LearnerActor", "sampler": "ray::SamplerActor", "env": "ray::EnvWorkerActor"}
CLIENT_PORT = 10001
LAST = 10
"""Steps at the end whose reward is compared."""


class TwoNodes:
    """Two nodes on this machine, without dashboards. `num_cpus` of each is how many actors have room there."""

    def __init__(self, num_cpus: int, *, replaces: bool, is_client: bool) -> None:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # a busy machine takes long
        utils = importlib.import_module("ray.cluster_utils")
        self._node = {"num_cpus": num_cpus, "object_store_memory": 100 * 2**20}
        self._replaces = replaces
        head = {
            **self._node,
            "include_dashboard": False,
            **({"ray_client_server_port": CLIENT_PORT} if is_client else {}),
        }
        self.cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        self.address = f"ray://127.0.0.1:{CLIENT_PORT}" if is_client else self.cluster.address
        self._second = self.cluster.add_node(**self._node)

    def lose_node(self) -> None:
        """Kill the second node; another one takes its place if the campaign goes on."""
        self.cluster.remove_node(self._second, allow_graceful=False)
        if self._replaces:
            self._second = self.cluster.add_node(**self._node)

    def shutdown(self) -> None:
        importlib.import_module("ray").shutdown()
        self.cluster.shutdown()


def weights(directory: Path) -> np.ndarray:
    with RunReader(directory) as run:
        place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
    tensors = load_file(place / "adapter_model.safetensors")
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def last_reward(directory: Path) -> float:
    """The mean reward of what was played in the last steps."""
    with RunReader(directory) as run:
        rewards = [value for _, value in run.metric("rollout/reward_mean")]
    return float(np.mean(rewards[-LAST:]))


def count_lost_and_doubled(directory: Path, steps: int) -> tuple[int, int]:
    """Attempts of a training step that are missing from the run's record, and those that are there twice."""
    with RunReader(directory) as run:
        rows = [row for row in run.attempts(phase="train") if row.outcome != "failed"]
    seen = [(row.step, row.task_id, row.attempt) for row in rows]
    return steps * ATTEMPTS - len(set(seen)), len(seen) - len(set(seen))


def find(title: str) -> list[int]:
    """Processes of this campaign's actors, by the title that Ray gives them."""
    found: list[int] = []
    for pid in processes_below(os.getpid()):
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()) else []
    return found


class Killer(tw.Observer):
    """Kills actors at random moments after the first step; `node` removes the second node.

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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", default="learner", help="a number, or kinds: learner,sampler,env,node")
    parser.add_argument("--steps", type=int, default=0, help="default: three for each kill, and three more")
    parser.add_argument("--env-workers", type=int, default=0)
    parser.add_argument("--samplers", type=int, default=0, help="samplers of their own")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--min-learners", type=int, default=0)
    parser.add_argument("--shard", action="store_true", help="the learners hold the weights in parts")
    parser.add_argument("--client", action="store_true", help="the run is a Ray client (ray://)")
    parser.add_argument("--cpus", type=int, default=2, help="of each node")
    parser.add_argument("--calm-seeds", type=int, default=0, help="undisturbed runs with other seeds, for the noise")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def choose_kinds(args: argparse.Namespace) -> list[str]:
    if not args.kills.isdigit():
        return args.kills.split(",")
    there = [("learner", args.learners > 1), ("sampler", args.samplers), ("env", args.env_workers), ("node", True)]
    return random.Random(args.seed).choices([kind for kind, is_there in there if is_there], k=int(args.kills))


def cluster_options(args: argparse.Namespace, num_kills: int) -> list[str]:
    found = [f"cluster.learners={args.learners}", f"cluster.max_restarts={2 * num_kills + 2}"]
    found += [f"cluster.env_workers={args.env_workers}", "rollout.max_retries=20"] if args.env_workers else []
    found += ["cluster.placement=separate", f"cluster.samplers={args.samplers}"] if args.samplers else []
    found += [f"cluster.min_learners={args.min_learners}"] if args.min_learners else []
    return found + (["cluster.shard=true"] if args.shard else [])


def main() -> int:
    args = parse()
    kinds, started_s = choose_kinds(args), time.monotonic()
    num_steps = args.steps or 3 * len(kinds) + 3
    options = [*SMALL, f"train.steps={num_steps}"]
    with tempfile.TemporaryDirectory() as place:
        calm = [Path(place) / f"calm-{seed}" for seed in range(1 + args.calm_seeds)]
        for seed, directory in enumerate(calm):
            overrides = [*options, f"train.seed={seed}"] if seed else options
            tw.train(ECHO, directory=directory, overrides=overrides, observer=tw.Observer())
        nodes, rough = TwoNodes(args.cpus, replaces=args.kills.isdigit(), is_client=args.client), Path(place) / "rough"
        killer = Killer(kinds, nodes.lose_node, args.seed)
        options += [*cluster_options(args, len(kinds)), f"cluster.address={nodes.address}"]
        run = tw.train(ECHO, directory=rough, overrides=options, observer=killer)
        expected, found = weights(calm[0]), weights(rough)
        lost, doubled = count_lost_and_doubled(rough, num_steps)
        report = {
            "state": run.state,
            "killed": killer.killed,
            "steps": len(run.metrics["step"]),
            "relative_error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected)),
            "attempts_lost": lost,
            "attempts_doubled": doubled,
            "reward_at_the_end": last_reward(rough),
            "undisturbed": [last_reward(directory) for directory in calm],
            "seconds": round(time.monotonic() - started_s, 1),
        }
        print(json.dumps(report), flush=True)
        nodes.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
