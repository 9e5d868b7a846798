"""verifiers tasksets and envs as worlds: `turnwise train verifiers:my_taskset`.

The name is what verifiers itself takes: an installed taskset package, or your own `Taskset` as
`verifiers:module:Class` or `verifiers:file.py:Class`. The env is the taskset's own, or the single-agent one.

A verifiers episode runs by itself and calls a model. Here the policy is that model: each attempt starts an episode and
gives it an address for its model calls. A call becomes the messages of `start` or `step`, and the policy's reply
becomes the model's answer. The taskset's score at the end is the reward; metrics and single rewards are logged.

An attempt is one dialogue: an env that calls the policy in two seats, or rewrites earlier messages, is refused, and so
are tasksets with tool servers. verifiers has no seeds, so an attempt can be replayed only if the taskset's code is
deterministic. One task of the taskset in five is held out, by a hash of its content, unless `test_taskset` is given.
"""

# pyright: basic
# Strict checks would only report the peer package, which has no types.

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from turnwise.envs.adapters.peers import import_peer, numbers_of
from turnwise.envs.base import Env, EnvStep, Split, Task
from turnwise.envs.splits import draw, in_split, random_for
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.import_path import add_current_folder, load_attribute
from turnwise.trajectory import Message

DEFAULT_MAX_TURNS = 10

_MODEL = "policy"
_CLOSE_S = 3.0
_GOODBYE_S = 0.1
_SESSION_HEADER = "X-Session-ID"


class VerifiersWorld:
    """One taskset with its env."""

    def __init__(
        self,
        taskset_id: str,
        *,
        taskset: dict[str, Any] | None = None,
        test_taskset: dict[str, Any] | None = None,
        env: dict[str, Any] | None = None,
        num_tasks: int = 1000,
        max_turns: int | None = None,
        max_tokens: int = 256,
        success_reward: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            taskset: The taskset's own config, such as {split: train}.
            test_taskset: Its config for the held-out tasks, such as {split: test}.
            env: The env's config, such as {id: best-of-n}. The policy does not play a seat that has its own client.
            num_tasks: The largest number of tasks to read from the taskset.
            max_turns: Turns of the policy. The default is 1 for a single-agent taskset, else 10.
            success_reward: An attempt is a success when its reward is at least this.
            timeout_s: Time limit of each part: setting up, finalising and scoring an attempt.
        """
        self._vf = import_peer("verifiers.v1", extra="verifiers")
        self._loaders = import_peer("verifiers.v1.utils.loaders", extra="verifiers")
        self._id = _register(taskset_id, self._vf) if ":" in taskset_id else taskset_id
        self.name = f"verifiers:{taskset_id}"
        self.max_tokens = max_tokens
        self.success_reward = success_reward
        self._timeout_s = timeout_s
        self._num_tasks = num_tasks
        add_current_folder()
        self.max_turns: int = max_turns or self._own_max_turns((env or {}).get("id") or "")
        self.config = self._make_config(taskset or {}, env or {})
        self._check_needs()
        self._theirs: dict[str, Any] = {}
        self._tasks = self._read_splits(taskset or {}, test_taskset)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        if not self._tasks[split]:
            raise ConfigError(f"{self.name} has no {split} tasks; give it more tasks, or a test_taskset of their own")
        return draw(self._tasks[split], count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - verifiers has no seeds
        if task.id not in self._theirs:
            raise ConfigError(f"{self.name} has no task {task.id!r}; the taskset has changed since it was drawn")
        return as_env(VerifiersEnv(self, self._theirs[task.id]))

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002 - there are none
        return []

    def load_env(self) -> Any:
        """Make a verifiers env. Each attempt needs its own, because the env holds the servers of its episodes."""
        return self._loaders.load_environment(self.config)

    def model_at(self, address: str) -> Any:
        """Describe the policy as a model that verifiers can call."""
        client = self._vf.EvalClientConfig(base_url=address, api_key_var="TURNWISE_NO_KEY")
        return self._vf.ModelContext(model=_MODEL, client=client)

    def _make_config(self, taskset: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
        """The env's config, with all seats played in this process. The policy plays the seat that has no client."""
        harness = importlib.import_module("turnwise.envs.adapters.verifiers_harness").HARNESS_ID
        try:
            kind = self._loaders.env_config_type(self._id, env.get("id") or "")
            seats = [name for name, f in kind.model_fields.items() if isinstance(f.default, self._vf.AgentConfig)]
            stages = dict.fromkeys(("setup", "finalize", "scoring"), self._timeout_s)
            raw = {"interception": {"type": "server"}, **env, "taskset": {"id": self._id, **taskset}}
            for seat in seats:
                own = dict(raw.get(seat) or {})
                played: dict[str, Any] = {
                    "harness": {"id": harness},
                    "runtime": {"type": "subprocess"},
                    "timeout": stages,
                }
                if isinstance(own.get("client"), Mapping):
                    own["client"] = {"type": "eval", **own["client"]}
                else:
                    played["max_turns"] = self.max_turns
                raw[seat] = {**played, **own}
            return self._loaders.resolve_env_config(raw)
        except (AttributeError, ModuleNotFoundError, TypeError, ValueError) as cause:
            raise ConfigError(f"{self.name}: {cause}") from cause

    def _check_needs(self) -> None:
        """Refuse early what this process cannot offer."""
        kind, config = self._loaders.taskset_class(self._id), self.config.taskset
        task = kind.task_type()
        tools = [type(server).__name__ for server in (*kind.toolsets(config), *task.toolsets(config.task))]
        if tools:
            raise ConfigError(
                f"{self.name} has tool servers ({', '.join(tools)}); only tasksets without can be trained"
            )
        if task.NEEDS_CONTAINER:
            raise ConfigError(f"{self.name}: {task.__name__} needs a container; only tasks without can be trained")

    def _own_max_turns(self, env_id: str) -> int:
        try:
            env_class = self._loaders.environment_class(self._id, env_id)
        except (AttributeError, ModuleNotFoundError, TypeError, ValueError) as cause:
            raise ConfigError(f"{self.name}: {cause}") from cause
        return 1 if env_class is self._vf.SingleAgentEnv else DEFAULT_MAX_TURNS

    def _read_splits(
        self, taskset: Mapping[str, Any], test_taskset: Mapping[str, Any] | None
    ) -> Mapping[Split, Sequence[Task]]:
        tasks = self._read_tasks(taskset)
        if test_taskset is None:
            return {"train": in_split(tasks, "train"), "test": in_split(tasks, "test")}
        known = {task.id for task in tasks}
        held_out = self._read_tasks({**taskset, **test_taskset})
        shared = [task for task in held_out if task.id in known]
        if shared:
            raise ConfigError(
                f"{self.name}: {len(shared)} tasks of test_taskset={dict(test_taskset)} are train tasks too"
            )
        return {"train": tasks, "test": held_out}

    def _read_tasks(self, taskset: Mapping[str, Any]) -> list[Task]:
        found: dict[str, Task] = {}
        try:
            kind = self._loaders.taskset_config_type(self._id)
            loaded = self._loaders.load_taskset(kind.model_validate({"id": self._id, **taskset}))
            for theirs in itertools.islice(loaded, self._num_tasks):
                content = json.dumps(theirs.data.model_dump(mode="json", exclude={"idx"}), sort_keys=True)
                key = f"task-{hashlib.sha256(content.encode('utf-8')).hexdigest()[:16]}"
                found.setdefault(key, Task(id=key, data={"idx": theirs.data.idx}))
                self._theirs.setdefault(key, theirs)
        except (ImportError, LookupError, OSError, TypeError, ValueError) as cause:
            raise ConfigError(f"the taskset of {self.name} cannot be read: {cause!r:.300}") from cause
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Ask:
    """One model call: its messages, its dialogue, and where the reply goes."""

    messages: Sequence[Mapping[str, Any]]
    session: str
    reply: asyncio.Future[str]


class VerifiersEnv:
    """One episode. Its methods are plain functions; `as_env` runs them.

    The episode has its own event loop, which runs only during the episode's turn: until it calls the policy or ends.
    """

    def __init__(self, world: VerifiersWorld, theirs: Any) -> None:
        self._world = world
        self._theirs = theirs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._episode: asyncio.Task[Any] | None = None
        self._asks: asyncio.Queue[Ask] = asyncio.Queue()
        self._ask: Ask | None = None
        self._session: str | None = None
        self._said: list[tuple[str, str]] = []
        self._is_abandoned = False

    def start(self) -> list[Message]:
        self._loop = asyncio.new_event_loop()
        self._episode = self._loop.create_task(self._play())
        if not self._advance():
            self._check_episode(self._episode.result())
            raise DataError(f"{self._world.name} ended an episode without asking the policy")
        return self._news()

    def step(self, reply: Message) -> EnvStep:
        assert self._ask is not None, "step comes after start"
        assert self._episode is not None
        self._said.append(("assistant", reply.content))
        self._ask.reply.set_result(reply.content)
        if self._advance():
            return EnvStep(messages=self._news())
        return self._judge(self._episode.result())

    def close(self) -> None:
        loop, episode = self._loop, self._episode
        if loop is None or episode is None or loop.is_closed():
            return
        if loop.is_running():  # a call is stuck in another thread; that thread cleans up when the call returns
            self._is_abandoned = True
            loop.call_soon_threadsafe(episode.cancel)
            return
        self._shut_down(loop, episode)

    async def _play(self) -> Any:
        async with policy_address(self._asks) as address:
            env = self._world.load_env()
            async with env.serving():
                return await env.run_episode(self._theirs, self._world.model_at(address))

    def _advance(self) -> bool:
        """Run the episode until it calls the policy (return True) or ends (return False)."""
        loop, episode = self._loop, self._episode
        assert loop is not None
        assert episode is not None
        asked = loop.create_task(self._asks.get())
        try:
            loop.run_until_complete(asyncio.wait({asked, episode}, return_when=asyncio.FIRST_COMPLETED))
        finally:
            if not asked.done():
                asked.cancel()
            if self._is_abandoned:
                self._shut_down(loop, episode)
        if not asked.done() or asked.cancelled():
            return False
        self._ask = asked.result()
        return True

    def _news(self) -> list[Message]:
        """The messages of this call that are new."""
        assert self._ask is not None
        if self._session not in (None, self._ask.session):
            raise DataError(
                f"{self._world.name} asks the policy in two dialogues at once; give all seats but one a client: "
                "env.options.env.SEAT.client"
            )
        self._session = self._ask.session
        said = [(str(message.get("role")), _to_text(message.get("content"))) for message in self._ask.messages]
        if said[: len(self._said)] != self._said:
            raise DataError(f"{self._world.name} rewrote what was said before; only dialogues that grow can be trained")
        news, self._said = said[len(self._said) :], said
        return [Message(role=role, content=content) for role, content in news]  # pyright: ignore[reportArgumentType]

    def _judge(self, episode: Any) -> EnvStep:
        self._check_episode(episode)
        trace = next(trace for trace in episode.traces if trace.id == self._session)
        is_cut = bool(trace.is_timeout) or trace.stop_condition in _LIMITS
        reward = float(trace.reward)
        rewards = {f"reward_{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
        return EnvStep(
            reward=reward,
            terminated=not is_cut,
            truncated=is_cut,
            is_success=reward >= self._world.success_reward,
            info=numbers_of({**trace.metrics, **rewards}),
        )

    def _check_episode(self, episode: Any) -> None:
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
            raise DataError(f"{self._world.name}: the episode failed: {text:.1000}")

    def _shut_down(self, loop: asyncio.AbstractEventLoop, episode: asyncio.Task[Any]) -> None:
        async def end() -> None:
            if self._ask is not None:
                self._ask.reply.cancel()
            episode.cancel()
            await asyncio.wait({episode}, timeout=_CLOSE_S)
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest, timeout=_CLOSE_S)

        try:
            loop.run_until_complete(end())
            if episode.done() and not episode.cancelled():
                episode.exception()  # read the exception, so that asyncio does not warn
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")


@contextlib.asynccontextmanager
async def policy_address(asks: asyncio.Queue[Ask]) -> AsyncIterator[str]:
    """Serve an OpenAI-compatible address on this machine. Calls are put into `asks` and wait for their answer."""
    web = import_peer("aiohttp.web", extra="verifiers")

    async def complete(request: Any) -> Any:
        body = await request.json()
        ask = Ask(
            body["messages"], request.headers.get(_SESSION_HEADER, ""), asyncio.get_running_loop().create_future()
        )
        asks.put_nowait(ask)
        message = {"role": "assistant", "content": await ask.reply}
        return web.json_response(
            {
                "id": "turnwise",
                "object": "chat.completion",
                "created": 0,
                "model": _MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )

    application = web.Application(client_max_size=2**30)
    application.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(application, shutdown_timeout=_GOODBYE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _to_text(content: Any) -> str:
    """The text of a message. `DataError` if it holds anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part for part in content if isinstance(part, Mapping)]
    if any(part.get("type") != "text" for part in parts):
        raise DataError(f"a message holds {sorted({str(part.get('type')) for part in parts})}; expected only text")
    return "\n".join(str(part.get("text", "")) for part in parts)


def _register(target: str, vf: Any) -> str:
    """Register a taskset class under a new module name, because verifiers finds tasksets by top-level module."""
    taskset = load_attribute(target)
    if not (isinstance(taskset, type) and issubclass(taskset, vf.Taskset)):
        raise ConfigError(f"{target} is {taskset!r:.60}; expected a subclass of verifiers.v1.Taskset")
    source = sys.modules[taskset.__module__]
    envs = [
        value
        for value in vars(source).values()
        if isinstance(value, type) and issubclass(value, vf.Env) and value.__module__ == source.__name__
    ]
    name = f"turnwise_taskset_{hashlib.sha256(f'{source.__name__}:{taskset.__qualname__}'.encode()).hexdigest()[:8]}"
    module = ModuleType(name)
    for exported in (taskset, *envs):
        setattr(module, exported.__name__, exported)
    vars(module)["__all__"] = [exported.__name__ for exported in (taskset, *envs)]
    module.__spec__ = source.__spec__  # `find_spec` reads this for a module that is already imported
    sys.modules[name] = module
    return name
