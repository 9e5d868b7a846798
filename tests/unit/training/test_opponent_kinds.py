"""Every kind of opponent plays in every world with two sides, is recorded, and its replies are the same again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from local_server import serving
from turnwise.client.base import SamplingClient
from turnwise.client.local import ServiceClient
from turnwise.client.publish import VersionedSampler
from turnwise.config.config import Config
from turnwise.envs.base import EnvStep, Task, World, assistant
from turnwise.envs.registry import get_world
from turnwise.models.store import fetch_model
from turnwise.rollout.config import RolloutConfig
from turnwise.training.opponent_words import check_opponents
from turnwise.training.opponents import Opponents
from turnwise.types import AdamParams, Datum, ModelInput

pytestmark = pytest.mark.model
WORLDS: dict[str, dict[str, Any]] = {
    "negotiate": {"max_turns": 2},
    "tic_tac_toe": {},
    "twenty_questions": {},
    "bargain": {},
    "customer_service": {"level": 0, "protocol": "line", "max_turns": 2},
}
"""Worlds that docs/opponents.md lists, with options that keep games short."""
if find_spec("textarena") is not None:
    WORLDS["textarena:TicTacToe-v0"] = {}
MAX_STEPS = 12


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceClient]:
    with ServiceClient() as service:
        yield service


@pytest.fixture(scope="module")
def trained(service: ServiceClient) -> tuple[SamplingClient, str]:
    """A sampler of weights that differ from the base, and where they are saved."""
    trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
    ids = trainer.get_tokenizer().encode("learn this " * 6)
    inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    for _ in range(4):
        trainer.forward_backward([Datum(ModelInput.from_ints(ids[:-1]), inputs)], "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=0.05)).result()
    path = trainer.save_weights_for_sampler("opponent").result().path
    return service.create_sampling_client(model_path=path), path


@contextmanager
def words_of(kind: str, world: Any, saved: str, folder: Path) -> Iterator[str]:
    """The value of the option `opponent` for a kind."""
    if kind == "script":
        yield world.scripted_opponents[-1]
    elif kind == "checkpoint":
        yield saved
    elif kind == "model":
        other = folder / "other"
        if not other.exists():
            shutil.copytree(fetch_model("tiny").directory, other)
        yield str(other)
    elif kind == "address":
        with serving(chat) as address:
            yield address
    else:
        yield kind


async def chat(scope: Any, receive: Any, send: Any) -> None:
    """A model behind an OpenAI-compatible address: it names the number of messages that it was shown."""
    if scope["type"] != "http":
        return
    asked = json.loads((await receive())["body"])
    assert (scope["path"], asked["model"]) == ("/chat/completions", "m")
    assert asked["messages"][0]["role"] == "system" or asked["messages"][-1]["role"] == "user"
    content = f"I have read {len(asked['messages'])} messages."
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})


def words_for(task: Task) -> str:
    """Something that the other side has to answer: a question, a price or a free square, and words."""
    if "seed" in task.data:
        return "[4]"
    free = task.data["board"].index(" ") + 1 if "board" in task.data else 5
    return f"Is it alive? {free}"


async def play(world: World, task: Task, seed: int) -> list[EnvStep]:
    env = world.make_env(task, seed)
    await env.start()
    steps = [await env.step(assistant(words_for(task)))]
    while not steps[-1].terminated and len(steps) < MAX_STEPS:
        steps.append(await env.step(assistant(words_for(task))))
    await env.close()
    return steps


@pytest.mark.parametrize("kind", ["script", "base", "self", "pool", "checkpoint", "model", "address"])
async def test_every_kind_plays_in_every_world_with_two_sides(
    kind: str, service: ServiceClient, trained: tuple[SamplingClient, str], tmp_path: Path
) -> None:
    sampler, saved = trained
    for name, options in WORLDS.items():
        with words_of(kind, get_world(name), saved, tmp_path) as words:
            world = get_world(name, opponent=words, **options)
            section = {"address": {"model": "m"}, "pool": {"scripted_weight": 0}}.get(kind, {})
            env = {"name": name, "options": {"opponent": words, **options}}
            config = Config.model_validate({"model": {"name": "tiny"}, "env": env, "opponent": section})
            check_opponents(config, world)
            rollout = RolloutConfig(max_trajectory_tokens=4096, max_tokens_per_turn=6).for_world(world)
            (task,) = world.tasks("train", 1, 0)
            with Opponents(config, world, service, rollout) as opponents:
                opponents.open()
                opponents.follow(VersionedSampler(sampler, 1))
                steps = await play(opponents.world, task, 3)
                again = await play(opponents.world, task, 3)
        labels = steps[-1].labels
        assert labels["opponent"] == ("base" if kind == "pool" else words), name
        assert ("opponent_said" in labels) == (kind != "script"), name
        assert labels == again[-1].labels, f"{name}: the same seed gives the same replies"
        assert ("result" in labels) == steps[-1].terminated, name
        if kind != "script":
            said = json.loads(labels["opponent_said"])
            assert said, f"{name}: it had to answer"
            assert kind != "address" or all(text.startswith("I have read") for text in said), name
