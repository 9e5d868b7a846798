"""A world whose attempts are played by env workers (`turnwise env serve`), over HTTP.

    turnwise env serve my_env.py:MyEnv --port 8100                              # on any number of machines
    turnwise train served:http://a:8100,http://b:8100                           # nothing of the world is imported here
    turnwise train my_env.py:MyEnv cluster.env_workers=http://a:8100            # the same, and the world is checked

A step is never played twice: calls are numbered, and a worker answers a number that it has seen with the answer that it
gave. If a worker dies, the attempt fails, the env is blamed, and the rollout plays it again elsewhere.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

from turnwise.envs.base import Env, EnvStep, Split, Task, World
from turnwise.envs.remote.wire import (
    Json,
    message_to_json,
    messages_from_json,
    step_from_json,
    task_from_json,
    task_to_json,
)
from turnwise.envs.remote.workers import (
    KEY_VARIABLE,
    EnvWorker,
    EnvWorkers,
    WorkerGone,
    WorkerRefused,
    find_workers,
    raise_failure,
)
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.trajectory import Message

TASKS_S = 120.0
"""Seconds for a worker to draw tasks or demonstrations."""
FORK_S = 60.0
UNREACHABLE_S = 30.0
"""Seconds for which an attempt that has not begun waits for a worker that can be reached."""
MAX_SENDS = 2
"""A request whose connection broke is sent once more; the worker knows its number."""
FULL, UNKNOWN = 503, 404


class RemoteWorld:
    """A world that is served at one or more addresses, all of it: tasks, demonstrations and envs."""

    def __init__(self, addresses: str, *, max_tokens: int = 0) -> None:
        """Args:
        addresses: Addresses of workers that serve the same world, separated by commas.
        max_tokens: Limit on the sampled tokens of a turn; 0 takes the served world's.
        """
        names = [address.strip() for address in addresses.split(",") if address.strip()]
        self.workers, answers = find_workers(names, os.environ.get(KEY_VARIABLE, ""))
        self.served = _same_world(self.workers, answers)
        self.name: str = self.served["name"]
        self.max_turns: int = self.served["max_turns"]
        self.max_tokens: int = max_tokens or self.served["max_tokens"]

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        answer = self._ask("/v1/tasks", {"split": split, "count": count, "seed": seed})
        return [task_from_json(task) for task in answer["tasks"]]

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        answer = self._ask("/v1/demonstrations", {"count": count, "seed": seed})
        return [messages_from_json(dialogue) for dialogue in answer["demonstrations"]]

    def make_env(self, task: Task, seed: int) -> Env:
        return RemoteEnv(self.workers, task, seed)

    def _ask(self, path: str, body: Json) -> Json:
        problem: Exception | None = None
        for worker in self.workers.workers:
            try:
                return self.workers.call_now(worker, path, body, wait_s=TASKS_S)
            except (WorkerGone, WorkerRefused) as cause:
                problem = cause
        raise ConfigError(f"no env worker answered {path}; the last: {problem}")


class WorkedWorld:
    """A world whose tasks are drawn here, and whose attempts are played by workers."""

    def __init__(self, inner: World, workers: EnvWorkers) -> None:
        self.inner = inner
        self.workers = workers
        self.name, self.max_turns, self.max_tokens = inner.name, inner.max_turns, inner.max_tokens

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:
        return self.inner.tasks(split, count, seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        return self.inner.demonstrations(count, seed)

    def make_env(self, task: Task, seed: int) -> Env:
        return RemoteEnv(self.workers, task, seed)


def worked_part(world: Any) -> RemoteWorld | WorkedWorld | None:
    """The part of a world that workers play, under wrappers such as a reward of one's own; None if there is none."""
    while not isinstance(world, RemoteWorld | WorkedWorld):
        if not hasattr(world, "inner"):
            return None
        world = world.inner
    return world


def _same_world(workers: EnvWorkers, answers: Sequence[Json]) -> Json:
    """What all workers serve. Attempts of a group go to different workers, so they must serve the same world."""
    kinds = [(answer["env"], answer["options"]) for answer in answers]
    for worker, answer, kind in zip(workers.workers, answers, kinds, strict=True):
        if kind != kinds[0]:
            raise ConfigError(
                f"env worker {worker.address} serves {answer['env']} with {answer['options']}, and "
                f"{workers.workers[0].address} serves {kinds[0][0]} with {kinds[0][1]}; expected one world"
            )
    return answers[0]


def check_served(workers: EnvWorkers, answers: Sequence[Json], name: str, options: Json) -> None:
    """Refuse workers that serve another world than the run's config names."""
    served = _same_world(workers, answers)
    if (served["env"], served["options"]) != (name, options):
        words = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        raise ConfigError(
            f"the env workers serve {served['env']} with {served['options']}, and the run plays {name} with {options}; "
            f"serve it with: turnwise env serve {words}"
        )


class RemoteEnv:
    """One attempt in a worker. It has the optional methods of the env there, once it has started."""

    def __init__(self, workers: EnvWorkers, task: Task, seed: int) -> None:
        self._workers = workers
        self._task = task
        self._seed = seed
        self._worker: EnvWorker | None = None
        self._path = f"/v1/envs/{uuid.uuid4().hex}"  # chosen here: an env whose `start` was given up can be closed
        self._methods: frozenset[str] = frozenset()
        self._state: Json = {}
        """What the env said of itself with its last answer: its key and its potential."""
        self._number = 0
        self._client: Any = None

    async def start(self) -> Sequence[Message]:
        body: Json = {"task": task_to_json(self._task), "seed": self._seed}
        give_up_s = time.monotonic() + UNREACHABLE_S
        while True:
            self._worker = await self._workers.take()
            try:
                answer = await self._send("PUT", body)
            except WorkerGone as cause:
                self._leave(str(cause))
                if not cause.is_unsent or time.monotonic() > give_up_s:
                    raise AttemptFailed(Party.ENV, f"start: {cause}") from cause
            except WorkerRefused as cause:
                self._leave(str(cause))
                if cause.status != FULL:
                    raise AttemptFailed(Party.ENV, f"start: {cause}") from cause
                give_up_s = time.monotonic() + UNREACHABLE_S
            else:
                self._methods, self._state = frozenset(answer["methods"]), answer["state"]
                return messages_from_json(answer["messages"])

    async def step(self, reply: Message) -> EnvStep:
        return step_from_json((await self._call("step", reply=message_to_json(reply)))["step"])

    async def close(self) -> None:
        worker = self._worker
        try:
            if worker is not None:
                await self._send("DELETE")
        except WorkerGone:
            pass  # the env ended with its worker
        except WorkerRefused as cause:
            if cause.status != UNKNOWN:
                raise
        finally:
            self._worker = None
            if worker is not None:
                self._workers.give_back(worker)
            client, self._client = self._client, None
            if client is not None:
                await client.aclose()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(name)
        return getattr(self, f"_{name}")

    def _state_key(self) -> str:
        return self._read("state_key")

    def _potential(self) -> float:
        return self._read("potential")

    def _read(self, name: str) -> Any:
        entry = self._state[name]
        if "failure" in entry:
            raise_failure(entry["failure"])
        return entry["value"]

    async def _reseed(self, seed: int) -> None:
        await self._call("reseed", seed=seed)

    def _fork(self) -> RemoteEnv:
        """Runs in a thread, as every `fork` does. The copy lives in the same worker, beside this one."""
        worker = self._need_worker()
        copy = RemoteEnv(self._workers, self._task, self._seed)
        body = self._numbered("fork", copy_id=copy._path.rpartition("/")[2])
        try:
            answer = self._workers.call_now(worker, self._path, body, wait_s=FORK_S)
        except (WorkerGone, WorkerRefused) as cause:
            raise AttemptFailed(Party.ENV, f"fork: {cause}") from cause
        self._workers.add_taken(worker)
        copy._worker, copy._methods, copy._state = worker, self._methods, answer["state"]
        return copy

    async def _call(self, method: str, **arguments: Any) -> Json:
        worker, body = self._need_worker(), self._numbered(method, **arguments)
        for tries_left in reversed(range(MAX_SENDS)):
            try:
                answer = await self._send("POST", body)
                self._state = answer["state"]
                return answer
            except WorkerGone as cause:
                if not tries_left:
                    self._workers.leave_out(worker, str(cause))
                    raise AttemptFailed(Party.ENV, f"{method}: {cause}") from cause
            except WorkerRefused as cause:
                lost = "; the worker was started again, or the env was idle for too long"
                detail = f"{method}: {cause}{lost if cause.status == UNKNOWN else ''}"
                raise AttemptFailed(Party.ENV, detail) from cause
        raise AssertionError("the last try raises")

    async def _send(self, verb: str, body: Json | None = None) -> Json:
        if self._client is None:
            self._client = self._workers.connect()
        return await self._workers.call(self._client, verb, self._need_worker().address, self._path, body)

    def _numbered(self, method: str, **arguments: Any) -> Json:
        self._number += 1
        return {"number": self._number, "method": method, **arguments}

    def _need_worker(self) -> EnvWorker:
        if self._worker is None:
            raise RuntimeError("this env has not started, or is closed")
        return self._worker

    def _leave(self, why: str) -> None:
        worker, self._worker = self._need_worker(), None
        self._workers.leave_out(worker, why)
        self._workers.give_back(worker)
