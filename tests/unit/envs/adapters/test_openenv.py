"""The server needs openenv-core (268 MB with what it drags in), which is in the extra `adapters` and not in `dev`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator

import pytest

from attempts import play
from local_server import unused_address
from openenv_servers import openenv_server
from turnwise.envs.adapters.openenv import ServerError, observation_to_text, read_codec, web_socket_address
from turnwise.envs.base import Task, assistant
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError, DataError

GUESS = """
import time, random
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

class Guess(Action):
    number: int = Field(..., ge=0, le=99)

class Hint(Observation):
    hint: str = ""

class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State()
        self.secret = None

    def reset(self, seed=None, episode_id=None, high=9):
        self._state = State(step_count=0)
        self.secret = random.Random(seed).randrange(high + 1)
        return Hint(hint=f"0 to {high}", done=False, reward=0.0)

    def step(self, action):
        if action.number == 13:
            raise ValueError("thirteen")
        if action.number == 77:
            time.sleep(5)
        right = action.number == self.secret
        return Hint(hint="right" if right else "no", done=right, reward=float(right))

    @property
    def state(self):
        return self._state

app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=2)
"""

needs_server = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="run by tests/contract/test_adapters_packages.py"
)
pytest.importorskip("websockets")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with openenv_server(GUESS, tmp_path_factory.mktemp("guess")) as address:
        get_world(f"openenv:{address}", timeout_s=120.0)  # comes back when the server is up
        yield address


@needs_server
async def test_an_attempt_is_one_session_with_the_tasks_seed(address: str) -> None:
    world = get_world(f"openenv:{address}", reset={"high": 9})
    task = world.tasks("train", 1, 0)[0]
    start, steps = await play(world, [str(number) for number in range(10)], task)
    assert start[0].content == "Say the number alone: a JSON integer.\n\n0 to 9"
    assert [step.messages[0].content for step in steps] == ["no"] * (len(steps) - 1) + ["right"]
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].is_success) == (1.0, True, True)
    assert await play(world, [str(number) for number in range(10)], task) == (start, steps)


@needs_server
async def test_what_is_not_done_by_then_is_truncated(address: str) -> None:
    world = get_world(f"openenv:{address}", max_turns=2, reset={"high": 99})
    _, steps = await play(world, ["0", "1", "2"], Task(id="train-0", data={"seed": 0}))
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]


@needs_server
async def test_an_action_that_the_schema_refuses_is_flagged_and_answered(address: str) -> None:
    _, steps = await play(get_world(f"openenv:{address}"), ["seven", "100", "5"])
    assert [step.is_unparsable for step in steps] == [True, True, False]
    assert steps[0].messages[0].content == "Say the number alone: a JSON integer."
    assert "number: Input should be less than or equal to 99" in steps[1].messages[0].content


@needs_server
async def test_an_error_of_the_env_is_the_envs(address: str) -> None:
    world = get_world(f"openenv:{address}")
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    with pytest.raises(ServerError, match="thirteen"):
        await env.step(assistant("13"))
    await env.close()


@needs_server
async def test_a_server_without_room_is_asked_again_and_then_says_what_to_do(address: str) -> None:
    world = get_world(f"openenv:{address}", timeout_s=0.5)
    envs = [world.make_env(task, 0) for task in world.tasks("train", 3, 0)]
    for env in envs[:2]:
        await env.start()
    with pytest.raises(ServerError, match=r"play fewer at once: rollout\.max_concurrency"):
        await envs[2].start()
    patient = get_world(f"openenv:{address}").make_env(world.tasks("train", 1, 0)[0], 0)
    waiting = asyncio.create_task(patient.start())
    await asyncio.wait({waiting}, timeout=0.2)
    assert not waiting.done()
    await envs[0].close()
    assert len(await waiting) == 1
    for env in (*envs, patient):
        await env.close()


@needs_server
async def test_a_call_that_takes_too_long_ends(address: str) -> None:
    world = get_world(f"openenv:{address}", timeout_s=0.5)
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    with pytest.raises(TimeoutError):
        await env.step(assistant("77"))
    await env.close()


def test_an_address_where_nobody_listens_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/schema gave no schema: .*; is an OpenEnv server running there\?"):
        get_world(f"openenv:{unused_address()}")
    with pytest.raises(
        ConfigError, match="'localhost' is not an address of a server; expected openenv:http://HOST:PORT"
    ):
        get_world("openenv:localhost")


def _schema(required: list[str], **fields: str) -> dict[str, object]:
    properties = {name: {"type": kind} for name, kind in fields.items()} | {"metadata": {"type": "object"}}
    return {"action": {"properties": properties, "required": required}}


def test_one_text_field_takes_the_whole_reply() -> None:
    assert read_codec(_schema(["message"], message="string"), None).read(" hi ") == {"message": " hi "}
    assert read_codec(_schema(["code"], code="string", timeout="number"), None).read("x") == {"code": "x"}


def test_several_fields_take_the_first_json_object() -> None:
    codec = read_codec(_schema(["x", "y"], x="integer", y="integer"), None)
    assert codec.hint == 'Say a JSON object with "x" (integer), "y" (integer).'
    assert codec.read('I go {"x": 1, "y": 2}. {"x": 3}') == {"x": 1, "y": 2}
    assert [codec.read(text) for text in ("", "[1]", "{", "{" * 100_000)] == [None] * 4


def test_a_field_can_be_chosen() -> None:
    assert read_codec(_schema([], a="string", b="string"), "b").read("x") == {"b": "x"}
    with pytest.raises(ConfigError, match="action_field='c'; the server's actions have a, b"):
        read_codec(_schema([], a="string", b="string"), "c")


def test_observations_are_told_by_field() -> None:
    assert observation_to_text({"text": "hi", "done": False, "reward": 1, "metadata": {}}, None) == "hi"
    assert observation_to_text({"a": "x", "b": [1]}, None) == "a: x\nb: [1]"
    assert observation_to_text({"a": "x", "b": [1]}, "b") == "[1]"
    with pytest.raises(DataError, match="the observation has a; expected 'c'"):
        observation_to_text({"a": 1}, "c")


def test_the_web_socket_is_beside_the_address() -> None:
    assert web_socket_address("http://host:80/env") == "ws://host:80/env/ws"
    assert web_socket_address("https://host") == "wss://host/ws"
