from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import turnwise as tw
from local_server import serving, unused_address
from served_world import ObedientEnv
from turnwise.env_service.server import EnvServerOptions, make_env_app
from turnwise.envs.base import Task, assistant
from turnwise.envs.check import check_env
from turnwise.envs.registry import get_world
from turnwise.envs.remote.client import RemoteWorld
from turnwise.envs.worlds import as_world
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.rollout.call import DeadlinePassed, EnvCalls
from turnwise.rollout.limits import Clock, RolloutLimits

TASK = Task(id="train-2", data={"seed": 2})


def _serve(**options: Any) -> Any:
    return serving(make_env_app(as_world(ObedientEnv), EnvServerOptions(env="obedient", **options)))


@pytest.fixture
def world() -> Iterator[RemoteWorld]:
    with _serve(deadline_s=0.5, max_envs=2) as address:
        yield RemoteWorld(address)


def _calls(world: Any, *, step_deadline_s: float = 20.0) -> EnvCalls:
    limits = RolloutLimits(step_deadline_s=step_deadline_s, close_deadline_s=5.0)
    return EnvCalls(lambda: world.make_env(TASK, 0), limits, Clock(60.0))


def _health(world: RemoteWorld) -> dict[str, Any]:
    return httpx2.get(f"{world.workers.workers[0].address}/health").json()


async def _play(world: Any, replies: tuple[str, ...]) -> list[Any]:
    env = _calls(world)
    seen: list[Any] = [await env.start()]
    for reply in replies:
        seen += [await env.state_key(), await env.potential(), await env.step(assistant(reply))]
    fork = await env.fork()
    seen += [await fork.state_key()]
    await fork.close()
    await env.close()
    assert env.close_problem is None
    return seen


async def test_a_served_world_plays_exactly_as_it_does_here(world: RemoteWorld) -> None:
    here = as_world(ObedientEnv)
    assert await _play(world, ("a", "b")) == await _play(here, ("a", "b"))
    assert world.tasks("test", 5, 3) == here.tasks("test", 5, 3)
    assert _health(world)["open"] == 0
    assert world.workers.workers[0].num_taken == 0


def test_a_served_world_keeps_every_rule_of_an_env() -> None:
    inner = get_world("guess_number", high=8)
    with serving(make_env_app(inner, EnvServerOptions(env="guess_number"))) as address:
        report = check_env(RemoteWorld(address), num_tasks=1, deadline_s=120)
    assert report.is_ok, str(report)
    assert "demonstrations" in {result.name for result in report.results if result.state == "passed"}


@pytest.mark.parametrize(("reply", "party", "words"), [("raise", "env", "as ordered"), ("tool", "tool", "tool broke")])
async def test_a_failure_is_blamed_on_the_party_that_failed_with_the_line_of_its_code(
    world: RemoteWorld, reply: str, party: str, words: str
) -> None:
    env = _calls(world)
    await env.start()
    with pytest.raises(AttemptFailed, match=words) as caught:
        await env.step(assistant(reply))
    assert caught.value.party is Party(party)
    if party == "env":
        assert "served_world.py" in caught.value.detail
        assert "raise ValueError" in str(caught.value.__cause__)
        assert "served_world.py:" in str(caught.value.facts["place"])
    await env.close()


async def test_a_call_that_hangs_ends_at_the_deadline_of_either_side_and_frees_its_place(world: RemoteWorld) -> None:
    for step_deadline_s in (20.0, 0.2):  # the server's is 0.5
        env = _calls(world, step_deadline_s=step_deadline_s)
        await env.start()
        with pytest.raises(AttemptFailed, match=r"step gave no answer within 0\.[52] s") as caught:
            await env.step(assistant("sleep"))
        assert caught.value.party is Party.ENV
        assert isinstance(caught.value, DeadlinePassed) == (step_deadline_s < 0.5)
        await env.close()
    assert _health(world)["open"] == 0


def test_a_request_that_comes_twice_is_played_once_and_answered_twice() -> None:
    with _serve() as address, httpx2.Client(base_url=address) as http:
        http.put("/v1/envs/one", json={"task": {"id": "x", "data": {"seed": 2}}, "seed": 0})
        body = {"number": 1, "method": "step", "reply": {"role": "assistant", "content": "hi"}}
        first, again = (http.post("/v1/envs/one", json=body).json() for _ in range(2))
        assert first == again
        assert first["step"]["messages"][0]["content"] == "1: hi"
        assert http.post("/v1/envs/one", json={**body, "number": 7}).status_code == 409
        assert http.post("/v1/envs/two", json=body).status_code == 404


def test_a_full_server_says_so_and_an_env_that_nobody_calls_is_closed() -> None:
    with _serve(max_envs=1, idle_s=0.3) as address, httpx2.Client(base_url=address) as http:
        start = {"task": {"id": "x", "data": {"seed": 2}}, "seed": 0}
        assert http.put("/v1/envs/one", json=start).status_code == 200
        assert http.put("/v1/envs/two", json=start).status_code == 503
        for _ in range(100):
            if http.get("/health").json()["expired"]:
                break
            asyncio.run(asyncio.sleep(0.05))
        assert http.put("/v1/envs/two", json=start).status_code == 200


async def test_an_attempt_waits_for_a_place_instead_of_failing(world: RemoteWorld) -> None:
    envs = [_calls(world) for _ in range(5)]

    async def attempt(env: EnvCalls) -> str:
        await env.start()
        step = await env.step(assistant("stop"))
        await env.close()
        return step.messages[0].content

    assert await asyncio.gather(*map(attempt, envs)) == ["1: stop"] * 5


def test_wrong_servers_are_refused_before_anything_is_spent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start it: turnwise env serve"):
        RemoteWorld(unused_address())
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        RemoteWorld("localhost:8100")
    with _serve(key="secret") as address:
        with pytest.raises(ConfigError, match="set TURNWISE_ENV_KEY"):
            RemoteWorld(address)
        monkeypatch.setenv("TURNWISE_ENV_KEY", "secret")
        assert RemoteWorld(address).name == "ObedientEnv"
        with pytest.raises(ConfigError, match=r"serve obedient with \{\}, and the run plays guess_number"):
            tw.train("guess_number", model="tiny", cluster={"env_workers": [address]}, run={"dir": str(tmp_path / "x")})
