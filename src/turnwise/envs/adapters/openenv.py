"""OpenEnv servers as worlds: `turnwise train openenv:http://localhost:8000`.

Each attempt is one session over a web socket. It sends the messages that OpenEnv's own client sends: `reset` with the
task's seed, `step` with an action, `close`. Every call has a deadline. This side needs only the package `websockets`;
the server needs `openenv-core`.

The server's `/schema` says what an action is. A single text field takes the whole reply. A single field of another type
takes the reply as a JSON value. Several fields take the first JSON object in the reply, and the first message lists
them. A reply that the server refuses is flagged as unparsable and answered with the server's error.

`done` means terminated. The protocol has no truncation, so the adapter truncates an attempt after `max_turns` turns. A
task is a seed (even: training, odd: held out). Whether equal seeds give equal attempts depends on the server.
"""

# pyright: basic
# Strict checks would only report the peer package, which has no types.

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from turnwise.envs.adapters.peers import import_peer, seed_tasks
from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.network import is_on_this_machine
from turnwise.trajectory import Message

_OWN_FIELDS = ("metadata", "done", "reward")
"""Fields of every action and observation that belong to the protocol."""
_REFUSED = "VALIDATION_ERROR"
_FULL = "CAPACITY_REACHED"
_GOODBYE_S = 2.0
_WAITS_S = (0.05, 0.1, 0.2, 0.5)
_MAX_MESSAGE_BYTES = 100 * 2**20


class OpenEnvWorld:
    """One server."""

    def __init__(
        self,
        url: str,
        *,
        reset: dict[str, Any] | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        rules: str = "",
        max_turns: int = 10,
        max_tokens: int = 256,
        success_return: float = 1.0,
        timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            reset: Arguments for the server's `reset`, beside the seed.
            action_field: The field of the action that takes the whole reply. The default comes from the schema.
            observation_field: The field of the observation to show. The default shows all of them.
            rules: Text before the first observation.
            max_turns: An attempt that is not done by then is truncated.
            success_return: An attempt that is done is a success when its rewards add up to at least this.
            timeout_s: Time limit of every call of the server.
        """
        if urlsplit(url).scheme not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"{url!r} is not an address of a server; expected openenv:http://HOST:PORT")
        self.websockets = import_peer("websockets.asyncio.client", extra="openenv")
        self.websocket_errors = import_peer("websockets.exceptions", extra="openenv")
        self.url = url.rstrip("/")
        self.name = f"openenv:{self.url}"
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.success_return = success_return
        self.timeout_s = timeout_s
        self.reset_options = dict(reset or {})
        self.observation_field = observation_field
        self.codec = read_codec(_fetch_schema(self.url, timeout_s), action_field)
        self.rules = "\n".join(part for part in (rules, self.codec.hint) if part)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return seed_tasks(self.name, split, count, seed)

    def make_env(self, task: Task, seed: int) -> OpenEnvEnv:  # noqa: ARG002 - the server gets the task's seed
        return OpenEnvEnv(self, seed=task.data["seed"])

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002 - there are none
        return []


class OpenEnvEnv:
    """One session."""

    def __init__(self, world: OpenEnvWorld, *, seed: int) -> None:
        self._world = world
        self._seed = seed
        self._socket: Any = None
        self._turn = 0
        self._return = 0.0

    async def start(self) -> list[Message]:
        """Open a session. If the server is full, try again until `timeout_s` has passed."""
        world = self._world
        give_up_s = asyncio.get_running_loop().time() + world.timeout_s
        result = await self._open()
        for wait_s in itertools.chain(_WAITS_S, itertools.repeat(_WAITS_S[-1])):
            if not isinstance(result, ServerError):
                break
            await self.close()
            if asyncio.get_running_loop().time() + wait_s > give_up_s:
                raise result
            await asyncio.sleep(wait_s)
            result = await self._open()
        assert not isinstance(result, ServerError)
        text = observation_to_text(result.get("observation", {}), world.observation_field)
        return [user(f"{world.rules}\n\n{text}" if world.rules else text)]

    async def _open(self) -> Mapping[str, Any] | ServerError:
        """Return the first observation, or the error of a server that is full."""
        world = self._world
        self._socket = await world.websockets.connect(
            web_socket_address(world.url),
            open_timeout=world.timeout_s,
            close_timeout=_GOODBYE_S / 2,
            max_size=_MAX_MESSAGE_BYTES,
            proxy=None if is_on_this_machine(world.url) else True,
        )
        try:
            return await self._call("reset", {"seed": self._seed, **world.reset_options})
        except ServerError as error:
            if error.code != _FULL:
                raise
            return error

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        is_last = self._turn >= self._world.max_turns
        action = self._world.codec.read(reply.content)
        if action is None:
            return _refusal(self._world.codec.hint, is_last)
        try:
            result = await self._call("step", action)
        except ServerError as error:
            if error.code != _REFUSED:
                raise
            return _refusal(str(error), is_last)
        reward = float(result.get("reward") or 0.0)
        self._return += reward
        is_done = bool(result.get("done", False))
        return EnvStep(
            messages=[user(observation_to_text(result.get("observation", {}), self._world.observation_field))],
            reward=reward,
            terminated=is_done,
            truncated=is_last and not is_done,
            is_success=is_done and self._return >= self._world.success_return if is_done or is_last else None,
        )

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            with contextlib.suppress(TimeoutError, OSError, self._world.websocket_errors.ConnectionClosed):
                async with asyncio.timeout(_GOODBYE_S):
                    await socket.send(json.dumps({"type": "close"}))
                    await socket.close()
        finally:
            socket.transport.abort()  # do not wait longer for a server that does not answer
            await socket.wait_closed()

    async def _call(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send one message and read its answer."""
        async with asyncio.timeout(self._world.timeout_s):
            with contextlib.suppress(self._world.websocket_errors.ConnectionClosed):
                # A full server sends an error and closes at once; the error can still be read.
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise DataError(f"{self._world.url} answered {kind} with {answer!r:.200}; expected type and data")
        if answer.get("type") == "error":
            raise ServerError(str(answer["data"].get("code", "")), _explain(answer["data"]))
        return answer["data"]


class ServerError(DataError):
    """An error that the server sent."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def _explain(data: Mapping[str, Any]) -> str:
    advice = {_FULL: "; allow more sessions on the server, or play fewer at once: rollout.max_concurrency"}
    details = [
        f"{'.'.join(str(part) for part in error.get('loc', ()))}: {error.get('msg')}"
        for error in data.get("errors") or ()
        if isinstance(error, Mapping)
    ]
    text = " ".join([str(data.get("message", "the server failed")), *details])
    return text + advice.get(str(data.get("code")), "")


def _refusal(why: str, is_last: bool) -> EnvStep:
    return EnvStep(messages=[user(why)], truncated=is_last, is_success=False if is_last else None, is_unparsable=True)


def web_socket_address(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return parts._replace(scheme=scheme, path=f"{parts.path}/ws").geturl()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCodec:
    """Turns a reply into an action."""

    fields: Mapping[str, str]
    """Names and JSON types of an action's fields."""
    whole: str | None
    """The field that takes the whole reply. None if the reply is a JSON object."""

    @property
    def hint(self) -> str:
        if self.whole is None:
            listed = ", ".join(f'"{name}" ({kind})' for name, kind in self.fields.items())
            return f"Say a JSON object with {listed}."
        kind = self.fields.get(self.whole, "string")
        return "" if kind == "string" else f"Say the {self.whole} alone: a JSON {kind}."

    def read(self, text: str) -> dict[str, Any] | None:
        if self.whole is not None and self.fields.get(self.whole, "string") == "string":
            return {self.whole: text}
        try:
            value = _first_object(text) if self.whole is None else json.loads(text)
        except (ValueError, RecursionError):
            return None
        if self.whole is not None:
            return {self.whole: value}
        return value if isinstance(value, dict) else None


def read_codec(schema: Mapping[str, Any], action_field: str | None) -> ActionCodec:
    """The codec for a server's action schema."""
    action = cast(Mapping[str, Any], schema.get("action", {}))
    properties = cast(Mapping[str, Any], action.get("properties", {}))
    fields = {name: str(about.get("type", "any")) for name, about in properties.items() if name not in _OWN_FIELDS}
    if action_field is not None and action_field not in fields:
        raise ConfigError(
            f"action_field={action_field!r}; the server's actions have {', '.join(fields) or 'no fields'}"
        )
    required = [name for name in action.get("required", []) if name in fields]
    whole = action_field or next((names[0] for names in (list(fields), required) if len(names) == 1), None)
    return ActionCodec(fields=fields, whole=whole)


def observation_to_text(observation: Any, field: str | None) -> str:
    """Write an observation as text: one field's text, or all fields by name."""
    if not isinstance(observation, Mapping):
        return str(observation)
    fields = {str(name): value for name, value in observation.items() if name not in _OWN_FIELDS}
    if field is not None:
        if field not in fields:
            raise DataError(f"the observation has {', '.join(fields) or 'no fields'}; expected {field!r}")
        return _value_to_text(fields[field])
    if len(fields) == 1:
        return _value_to_text(next(iter(fields.values())))
    return "\n".join(f"{name}: {_value_to_text(value)}" for name, value in fields.items())


def _value_to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _first_object(text: str) -> Any:
    start = text.find("{")
    if start < 0:
        raise ValueError("no object")
    value, _ = json.JSONDecoder().raw_decode(text[start:])
    return value


def _fetch_schema(url: str, timeout_s: float) -> Mapping[str, Any]:
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    address = parts._replace(scheme=scheme, path=f"{parts.path}/schema").geturl()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if is_on_this_machine(url) else None))
    try:
        with opener.open(address, timeout=timeout_s) as response:
            return json.load(response)
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{address} gave no schema: {cause}; is an OpenEnv server running there?") from cause
