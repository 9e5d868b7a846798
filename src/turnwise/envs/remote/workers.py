"""The env workers of a run, seen from the run: which one takes the next attempt, and one HTTP call to it.

A worker has places. An attempt takes the worker with the most free ones. A worker that cannot be reached is left out
for a moment, and an attempt that has not begun goes to another one. An attempt that has begun lives in its worker, and
dies with it: the env is blamed, and the rollout plays the attempt again.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.remote.wire import PROTOCOL, Json
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.runtime.network import tls_context

KEY_VARIABLE = "TURNWISE_ENV_KEY"
"""The environment variable with the key that workers ask for, and that a run sends."""
DOWN_S = 0.5
"""Seconds for which a worker that could not be reached gets no new attempt."""
LOOK_S = 0.005
"""Seconds between two looks for a free place."""
PROBE_S = 20.0
CONNECT_S = 5.0
NO_LIMIT_S = 3600.0
"""Deadline here of calls that the rollout itself ends in time."""


class WorkerGone(ConnectionError):  # noqa: N818
    """A worker could not be reached, or went away before it answered."""

    def __init__(self, address: str, why: str, *, is_unsent: bool) -> None:
        super().__init__(f"env worker {address}: {why}")
        self.is_unsent = is_unsent
        """The worker has not seen the request, so that it can go to another one."""


class WorkerRefused(ConnectionError):  # noqa: N818
    """A worker answered, but not with what was asked for."""

    def __init__(self, address: str, status: int, detail: str) -> None:
        super().__init__(f"env worker {address} answered {status}: {detail}")
        self.status = status


@dataclass(slots=True, eq=False)
class EnvWorker:
    """One worker, as the run sees it."""

    address: str
    num_places: int
    num_taken: int = 0
    down_until_s: float = 0.0
    problem: str = ""
    is_given_up: bool = False
    """It died too often, and is not started again; `problem` says how."""

    def give_up(self, why: str) -> None:
        self.num_places, self.problem, self.is_given_up = 0, why, True

    @property
    def num_free(self) -> int:
        return 0 if time.monotonic() < self.down_until_s else self.num_places - self.num_taken


class EnvWorkers:
    """Workers at fixed addresses. Attempts may come from several event loops."""

    def __init__(self, workers: Sequence[EnvWorker], key: str = "") -> None:
        self.workers = list(workers)
        self._lock = threading.Lock()
        self._httpx = import_peer("httpx2", extra="served")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def num_places(self) -> int:
        """Attempts that can be played at the same time."""
        return sum(worker.num_places for worker in self.workers)

    async def take(self) -> EnvWorker:
        """Take a place, waiting until one is free. The caller's deadline ends the wait.

        Raises `AttemptFailed` if all workers were given up: no place will ever be free.
        """
        while True:
            with self._lock:
                if all(worker.is_given_up for worker in self.workers):
                    raise AttemptFailed(
                        Party.ENV, f"all {len(self.workers)} env workers were given up. {self.workers[-1].problem}"
                    )
                best = max(self.workers, key=lambda worker: worker.num_free)
                if best.num_free > 0:
                    best.num_taken += 1
                    return best
            await asyncio.sleep(LOOK_S)

    def give_back(self, worker: EnvWorker) -> None:
        with self._lock:
            worker.num_taken -= 1

    def leave_out(self, worker: EnvWorker, why: str, for_s: float = DOWN_S) -> None:
        """Give it no attempt for a moment."""
        if not worker.is_given_up:
            worker.down_until_s, worker.problem = time.monotonic() + for_s, why

    def add_taken(self, worker: EnvWorker) -> None:
        """Count a place that a fork takes beside its original."""
        with self._lock:
            worker.num_taken += 1

    def connect(self) -> Any:
        """A client with one connection, for one attempt. Whoever asks for it closes it, in the same event loop."""
        httpx = self._httpx
        return httpx.AsyncClient(
            timeout=httpx.Timeout(NO_LIMIT_S, connect=CONNECT_S),
            headers=self._headers,
            verify=tls_context(),
            trust_env=False,  # the user named the addresses; no proxy stands between
        )

    async def call(self, client: Any, method: str, address: str, path: str, body: Json | None = None) -> Json:
        """One request. Raises `WorkerGone`, `WorkerRefused`, or what the worker blames on a party."""
        httpx = self._httpx
        try:
            response = await client.request(method, f"{address}{path}", json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as cause:
            raise WorkerGone(address, f"cannot be reached ({cause})", is_unsent=True) from cause
        except httpx.HTTPError as cause:
            why = f"went away during the call ({type(cause).__name__})"
            raise WorkerGone(address, why, is_unsent=False) from cause
        return read_answer(address, response.status_code, response.content)

    def call_now(self, worker: EnvWorker, path: str, body: Json, *, wait_s: float) -> Json:
        """`call` for code outside an event loop."""
        return request_now(worker.address, "POST", path, body, headers=self._headers, wait_s=wait_s)


def request_now(
    address: str, method: str, path: str, body: Json | None, *, headers: dict[str, str], wait_s: float
) -> Json:
    """One request from a thread that may wait."""
    httpx = import_peer("httpx2", extra="served")
    try:
        with httpx.Client(timeout=wait_s, verify=tls_context(), trust_env=False, headers=headers) as client:
            response = client.request(method, f"{address}{path}", json=body)
    except httpx.HTTPError as cause:
        raise WorkerGone(address, f"{type(cause).__name__}: {cause}", is_unsent=False) from cause
    return read_answer(address, response.status_code, response.content)


def read_answer(address: str, status: int, content: bytes) -> Json:
    """The body of an answer. A failure that the worker blames on a party is raised with that party's name."""
    try:
        answer: Any = json.loads(content)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise WorkerRefused(address, status, f"{content[:120]!r}; expected JSON. Is this `turnwise env serve`?")
    fields = cast(Json, answer)
    if status == 200:
        return fields
    if "failure" in fields:
        raise_failure(fields["failure"])
    raise WorkerRefused(address, status, str(fields.get("detail", ""))[:300])


class RemoteFailure(Exception):  # noqa: N818
    """What an env raised in its worker; its text is the traceback there."""


def raise_failure(failure: dict[str, Any]) -> None:
    cause = RemoteFailure(str(failure.get("traceback") or failure["detail"]))
    raise AttemptFailed(Party(failure["party"]), str(failure["detail"]), failure.get("facts")) from cause


def find_workers(addresses: Sequence[str], key: str) -> tuple[EnvWorkers, list[Json]]:
    """Ask every address what it serves. Returns the workers, and their answers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    workers: list[EnvWorker] = []
    answers: list[Json] = []
    for address in dict.fromkeys(address.rstrip("/") for address in addresses):
        if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
            raise ConfigError(f"{address!r} is not an address of an env worker; expected http://HOST:PORT")
        try:
            answer = request_now(address, "GET", "/v1/world", None, headers=headers, wait_s=PROBE_S)
        except (WorkerGone, WorkerRefused) as cause:
            hint = f"; set {KEY_VARIABLE}" if getattr(cause, "status", 0) == 401 else "; start it: turnwise env serve"
            raise ConfigError(f"{cause}{hint}") from cause
        if answer.get("protocol") != PROTOCOL:
            raise ConfigError(
                f"env worker {address} speaks protocol {answer.get('protocol')}, and this turnwise {PROTOCOL}; install "
                "the same version on both sides"
            )
        workers.append(EnvWorker(address, int(answer["max_envs"])))
        answers.append(answer)
    if not workers:
        raise ConfigError("no address of an env worker; expected http://HOST:PORT[,http://HOST:PORT...]")
    return EnvWorkers(workers, key), answers
