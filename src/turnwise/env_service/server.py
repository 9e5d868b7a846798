"""Worlds over HTTP: the application of `turnwise env serve`.

    GET    /v1/world           what is served, and how many envs fit
    POST   /v1/tasks           {"split": "train", "count": 8, "seed": 0}
    POST   /v1/demonstrations  {"count": 8, "seed": 0}
    PUT    /v1/envs/ID         {"task": {...}, "seed": 0}: make an env and start it; the caller chooses ID
    POST   /v1/envs/ID         {"number": 1, "method": "step", "reply": {...}}; or reseed, fork
    DELETE /v1/envs/ID         close it
    GET    /health

A call has the deadline of the server, and is made by the code that plays envs in a run (`rollout.call.EnvCalls`), so
blame is the same: an answer with status 500 has `failure`, with the party, the detail and the traceback of the env's
own code. Calls of an env are numbered. A number that comes again gets the answer that it got, so that a caller whose
connection broke may send a request again. Every answer has `state`: the env's `state_key` and `potential` now, if it
has them, so that they take no request of their own. An env that nobody calls for `idle_s` is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, JsonValue

from turnwise.envs.base import Split, World
from turnwise.envs.remote.wire import (
    PROTOCOL,
    Json,
    message_from_json,
    message_to_json,
    step_to_json,
    task_from_json,
    task_to_json,
)
from turnwise.errors import AttemptFailed, ConfigError
from turnwise.rollout.call import EnvCalls
from turnwise.rollout.limits import Clock, RolloutLimits
from turnwise.rollout.stats import failure_of

MAX_TASKS = 1_000_000
SWEEP_S = 1.0
"""Seconds between two looks for idle envs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvServerOptions:
    """What a server needs to know beside its world."""

    env: str
    """The world's name, as `turnwise train` takes it."""
    options: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    max_envs: int = 64
    deadline_s: float = 60.0
    """Most seconds of one call of an env."""
    idle_s: float = 600.0
    key: str = ""
    """What callers must send; empty: nothing."""

    def __post_init__(self) -> None:
        if self.max_envs < 1:
            raise ConfigError(f"max_envs={self.max_envs}; expected at least 1")
        for name in ("deadline_s", "idle_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name):g}; expected more than 0 seconds")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TasksBody(_Body):
    split: Split
    count: int
    seed: int


class DemonstrationsBody(_Body):
    count: int
    seed: int


class StartBody(_Body):
    task: dict[str, Any]
    seed: int


class CallBody(_Body):
    number: int
    method: Literal["step", "reseed", "fork"]
    reply: dict[str, Any] | None = None
    seed: int | None = None
    copy_id: str | None = None


@dataclass(slots=True, eq=False)
class _Session:
    """One env, from `PUT` to `DELETE`."""

    calls: EnvCalls
    number: int = 0
    """The number of the last call."""
    answer: asyncio.Task[Json] | None = None
    """The answer to the last call; a task, because the caller may go away and ask again while it runs."""
    used_s: float = field(default_factory=time.monotonic)

    @property
    def is_busy(self) -> bool:
        return self.answer is not None and not self.answer.done()


class EnvSessions:
    """The envs of one server."""

    def __init__(self, world: World, options: EnvServerOptions) -> None:
        self.world = world
        self.options = options
        self._limits = RolloutLimits(step_deadline_s=options.deadline_s, attempt_deadline_s=1e9)
        self._sessions: dict[str, _Session] = {}
        self.num_started = self.num_failed = self.num_expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    async def start(self, name: str, body: StartBody) -> Json:
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= self.options.max_envs:
                raise HTTPException(503, f"all {self.options.max_envs} places are taken")
            task = task_from_json(body.task)
            calls = EnvCalls(lambda: self.world.make_env(task, body.seed), self._limits, Clock(1e9))
            session = self._sessions[name] = _Session(calls)
            self.num_started += 1
            session.answer = asyncio.create_task(self._begin(session))
        try:
            return await self._answer(session)
        except AttemptFailed:
            await self.close(name)
            raise

    async def _begin(self, session: _Session) -> Json:
        messages = await session.calls.start()
        return {
            "messages": [message_to_json(message) for message in messages],
            "methods": list(session.calls.optional_methods),
            "state": await _state(session.calls),
        }

    async def call(self, name: str, body: CallBody) -> Json:
        session = self._find(name)
        if body.number == session.number + 1:
            if session.is_busy:
                raise HTTPException(409, f"call {session.number} of this env is still running")
            session.number = body.number
            session.answer = asyncio.create_task(self._run(session, body))
        elif body.number != session.number:
            raise HTTPException(409, f"call {body.number} came after call {session.number}")
        return await self._answer(session)

    async def _run(self, session: _Session, body: CallBody) -> Json:
        calls = session.calls
        match body.method:
            case "step":
                step = await calls.step(message_from_json(body.reply or {}))
                return {"step": step_to_json(step), "state": await _state(calls)}
            case "reseed":
                await calls.reseed(int(body.seed or 0))
            case "fork":
                if not body.copy_id or body.copy_id in self._sessions:
                    raise HTTPException(422, "copy_id: expected a new id for the copy")
                self._sessions[body.copy_id] = _Session(await calls.fork())
        return {"state": await _state(calls)}

    async def _answer(self, session: _Session) -> Json:
        """Wait for the answer of the last call. A caller that goes away does not end the call."""
        assert session.answer is not None, "there was a call"
        try:
            return await asyncio.shield(session.answer)
        except AttemptFailed:
            self.num_failed += 1
            raise
        finally:
            session.used_s = time.monotonic()

    async def close(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            raise HTTPException(404, f"no env {name}")
        if session.answer is not None:
            session.answer.cancel()
            await asyncio.wait({session.answer})
            if not session.answer.cancelled():
                session.answer.exception()  # its caller was told, or is gone
        await session.calls.close()

    async def sweep(self) -> None:
        """Close envs that nobody calls any more, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            late_s = time.monotonic() - self.options.idle_s
            for name in [name for name, one in self._sessions.items() if one.used_s < late_s and not one.is_busy]:
                self.num_expired += 1
                await self.close(name)

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(name) for name in list(self._sessions)))

    def _find(self, name: str) -> _Session:
        if name not in self._sessions:
            raise HTTPException(404, f"no env {name}")
        return self._sessions[name]


async def _state(calls: EnvCalls) -> Json:
    """What the env says of itself. A failure counts only if the caller asks for the value."""
    state: Json = {}
    for name, read in (("state_key", calls.state_key), ("potential", calls.potential)):
        if name in calls.optional_methods:
            try:
                state[name] = {"value": await read()}
            except AttemptFailed as error:
                state[name] = {"failure": _failure_to_json(error)}
    return state


def make_env_app(world: World, options: EnvServerOptions) -> FastAPI:
    """Make the application. It closes its envs when it shuts down."""
    sessions = EnvSessions(world, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        sweeping = asyncio.create_task(sessions.sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await sessions.close_all()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(AttemptFailed, _tell_failure)
    app.add_exception_handler(RequestValidationError, _tell_refusal)
    _add_key_check(app, options.key)
    _add_world_routes(app, sessions)
    _add_env_routes(app, sessions)
    return app


def _add_key_check(app: FastAPI, key: str) -> None:
    if not key:
        return

    @app.middleware("http")
    async def check_key(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            return JSONResponse({"detail": "the key is missing or wrong"}, 401)
        return await call_next(request)


def _add_world_routes(app: FastAPI, sessions: EnvSessions) -> None:
    world, options = sessions.world, sessions.options

    @app.get("/health", response_model=None)
    async def health() -> Json:
        return {
            "status": "ok",
            "process": os.getpid(),
            "open": len(sessions),
            "started": sessions.num_started,
            "failed": sessions.num_failed,
            "expired": sessions.num_expired,
        }

    @app.get("/v1/world", response_model=None)
    async def describe() -> Json:
        return {
            "protocol": PROTOCOL,
            "env": options.env,
            "options": options.options,
            "name": world.name,
            "max_turns": world.max_turns,
            "max_tokens": world.max_tokens,
            "max_envs": options.max_envs,
        }

    @app.post("/v1/tasks", response_model=None)
    def tasks(body: TasksBody) -> Json:
        if not 0 <= body.count <= MAX_TASKS:
            raise HTTPException(422, f"count: {body.count}; expected 0 to {MAX_TASKS}")
        return {"tasks": [task_to_json(task) for task in world.tasks(body.split, body.count, body.seed)]}

    @app.post("/v1/demonstrations", response_model=None)
    def demonstrations(body: DemonstrationsBody) -> Json:
        dialogues = world.demonstrations(body.count, body.seed)
        return {"demonstrations": [[message_to_json(message) for message in dialogue] for dialogue in dialogues]}


def _add_env_routes(app: FastAPI, sessions: EnvSessions) -> None:
    @app.put("/v1/envs/{name}", response_model=None)
    async def start(name: str, body: StartBody) -> Json:
        return await sessions.start(name, body)

    @app.post("/v1/envs/{name}", response_model=None)
    async def call(name: str, body: CallBody) -> Json:
        return await sessions.call(name, body)

    @app.delete("/v1/envs/{name}", response_model=None)
    async def close(name: str) -> Json:
        await sessions.close(name)
        return {}


async def _tell_failure(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AttemptFailed), "it is registered for this class"
    return JSONResponse({"failure": _failure_to_json(error)}, 500)


def _failure_to_json(error: AttemptFailed) -> Json:
    return asdict(failure_of(error))


async def _tell_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "it is registered for this class"
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"detail": f"{place}: {first['msg']}"}, 422)
