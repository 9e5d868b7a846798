"""Env workers as actors of a Ray cluster: each serves its world on whatever node has room.

An actor that dies is replaced by another one, which may be on another node, at another address.
"""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from turnwise.env_service.processes import MAX_QUICK_DEATHS, QUICK_S, START_S, WatchedEnvWorkers, WorkerLife, WorkerSpec
from turnwise.envs.remote.workers import EnvWorker
from turnwise.errors import ConfigError
from turnwise.runtime.network import open_port
from turnwise.runtime.ray_cluster import RayActor, connect_ray

LOOK_S = 0.2


class EnvWorkerActor:
    """Serves a world in a thread of the actor's process."""

    def serve(self, fields: Mapping[str, Any]) -> str:
        """Start the server. Returns its address."""
        from turnwise.env_service.run_server import make_served_world, serve_env
        from turnwise.env_service.server import EnvServerOptions

        options = EnvServerOptions(**fields)
        world = make_served_world(options)
        listener = open_port("0.0.0.0", 0, backlog=512)
        threading.Thread(target=serve_env, args=(options, listener, world), daemon=True).start()
        host = importlib.import_module("ray.util").get_node_ip_address()
        return f"http://{host}:{listener.getsockname()[1]}"

    def live(self) -> None:
        """Never return: the caller notices the end of the actor by it."""
        threading.Event().wait()


class RayEnvWorkers(WatchedEnvWorkers):
    """Workers that this process places on a Ray cluster."""

    def __init__(self, spec: WorkerSpec, count: int, address: str) -> None:
        self._address = address
        self._key = secrets.token_urlsafe(32)
        self._fields = {
            "env": spec.env,
            "options": spec.options,
            "max_envs": spec.max_envs,
            "deadline_s": spec.deadline_s,
            "key": self._key,
        }
        self._actors: list[RayActor] = []
        self._deaths = [0] * count
        """Deaths in a row, each soon after the one before."""
        self._born_s = [0.0] * count
        super().__init__([EnvWorker("", spec.max_envs) for _ in range(count)], self._key)

    def life_of(self, number: int) -> tuple[WorkerLife, float]:
        return self._actors[number], self._born_s[number]

    def start(self) -> None:
        """Place the workers and wait until each has made its world."""
        ray = connect_ray(self._address)
        try:
            for worker in self.workers:
                self._actors.append(self._start_one(ray, worker))
        except OSError as cause:
            self.close()
            raise ConfigError(f"an env worker did not start on the Ray cluster {self._address}: {cause}") from cause
        except BaseException:
            self.close()
            raise
        self._deaths, self._born_s = [0] * len(self._actors), [time.monotonic()] * len(self._actors)
        self._begin_watch(lambda: self._replace_dead(ray), LOOK_S)

    def close(self) -> None:
        self._end_watch()
        for actor in self._actors:
            actor.kill()
        self._actors = []

    def _start_one(self, ray: Any, worker: EnvWorker) -> RayActor:
        actor = RayActor(ray, EnvWorkerActor, (), {"num_cpus": 0, "scheduling_strategy": "SPREAD"})
        worker.address = actor.get(actor.handle.serve.remote(self._fields), deadline_s=START_S)
        return actor

    def _replace_dead(self, ray: Any) -> None:
        for number, actor in enumerate(self._actors):
            if self.workers[number].is_given_up or not actor.is_gone:
                continue
            is_quick = time.monotonic() - self._born_s[number] < QUICK_S
            self._deaths[number] = self._deaths[number] + 1 if is_quick else 1
            self._born_s[number] = time.monotonic()
            self._replace(ray, number, is_last=self._deaths[number] >= MAX_QUICK_DEATHS)

    def _replace(self, ray: Any, number: int, *, is_last: bool) -> None:
        worker = self.workers[number]
        before = worker.address
        if is_last:
            worker.give_up(f"env worker {number} ({before}) died {MAX_QUICK_DEATHS} times in a row; given up")
            self.on_restart(worker.problem)
            return
        try:
            self._actors[number] = self._start_one(ray, worker)
        except OSError as cause:
            self.on_restart(f"env worker {number} ({before}) died, and another one does not start: {cause}")
            return
        self.num_restarts += 1
        self.on_restart(f"env worker {number} ({before}) died; another one serves at {worker.address}")
