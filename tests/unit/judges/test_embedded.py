"""A judge that is a model or an adapter of ours, from Python and through the command line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import ONE_STEP
from turnwise.cli import main
from turnwise.client.local import ServiceClient
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.base import EnvStep, World, assistant, user
from turnwise.envs.registry import get_world
from turnwise.errors import AttemptFailed, Party
from turnwise.judges import EmbeddedModel, Judge, JudgedWorld, JudgeLimits, Rubric, attach_judge, judged, needs_service
from turnwise.judges.cache import FileCache
from turnwise.renderers.choose import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.runlog.reader import RunReader
from turnwise.types import AdamParams

pytestmark = pytest.mark.model

CRITERIA = "Few guesses."
RUBRIC = Rubric(criteria=CRITERIA)
NAME = "turnwise.judges:judged_by_model"
SMALL = (
    *ONE_STEP,
    "env.options.world=guess_number",
    "env.options.world_options={max_turns: 1}",
    f"env.options.rubric={CRITERIA}",
    "env.options.gate=always",
    "env.options.max_tokens=12",
)


@pytest.fixture(scope="module")
def service(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:  # noqa: ARG001
    with ServiceClient(data_dir=tmp_path_factory.mktemp("judge")) as service:
        yield service


@pytest.fixture(scope="module")
def seven(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:  # noqa: ARG001
    """The checkpoint of an adapter that was taught to say `Score: 7`, whatever it reads."""
    folder = tmp_path_factory.mktemp("seven")
    with ServiceClient(data_dir=folder) as service:
        trainer = service.create_lora_training_client("tiny", rank=8, seed=0)
        renderer = get_renderer(trainer.get_tokenizer())
        dialogues = []
        for number in range(4):
            asked = RUBRIC.ask([user(f"Guess a number from 1 to {10 * number}."), assistant(str(number))])
            turns = dialogue_to_turns(renderer, [*asked, assistant("Score: 7")])
            dialogues.append(dialogue_to_datums([(turn.prompt_ids, turn.reply_ids) for turn in turns]))
        batch = [datum for dialogue in weigh(dialogues, token_mean) for datum in dialogue]
        for _ in range(24):
            trainer.forward_backward(batch, "cross_entropy").result()
            trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
        trainer.save_weights_for_sampler("seven").result()
    (config,) = folder.glob("checkpoints/**/adapter_config.json")
    return str(config.parent)


async def play(world: World) -> EnvStep:
    (task,) = world.tasks("train", 1, 0)
    env = world.make_env(task, 0)
    await env.start()
    return await env.step(assistant(str(task.data["secret"])))


def judged_guess(model: str, **limits: Any) -> JudgedWorld:
    judge = Judge(EmbeddedModel(model, max_tokens=12), RUBRIC, limits=JudgeLimits(**limits))
    return judged(get_world("guess_number"), judge)


def train(directory: Path, *options: str) -> int:
    return main(["train", NAME, *SMALL, *options, f"run.dir={directory}"])


def test_an_adapter_judges_a_run_of_the_command_line_its_evaluation_and_its_replay(
    seven: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, cache = tmp_path / "run", tmp_path / "answers.db"
    options = (f"env.options.model={seven}", "env.options.weight=0.5", f"env.options.cache={cache}")
    assert train(run_dir, *options) == 0
    with RunReader(run_dir) as run:
        assert run.metric("rollout/reward_judge_mean") == [(1, pytest.approx(0.35))]
        assert run.metric("rollout/env_judge_asked_mean") == [(1, 1.0)]
        assert run.metric("rollout/env_judge_fallback_mean") == [(1, 0.0)]
        attempt = run.attempts(phase="train")[0].id
    assert FileCache(cache).get("no such key") is None  # it is there, and a cache
    assert main(["eval", str(run_dir)]) == 0
    assert "reward 0.350" in capsys.readouterr().out
    assert main(["replay", str(run_dir), "--attempt", str(attempt)]) == 0


def test_a_base_model_that_says_no_score_leaves_it_to_the_fallback(service: ServiceClient) -> None:
    world = judged_guess("tiny", fallback="value", fallback_value=0.25, max_tries=1)
    assert needs_service(world)
    attach_judge(world, service)
    assert dict(asyncio.run(play(world)).reward_parts) == {"outcome": 1.0, "judge": 0.25}
    assert world.judge.counts["failed_requests"] == 1


def test_a_score_has_a_deadline(service: ServiceClient) -> None:
    world = judged_guess("tiny", deadline_s=1e-4)
    attach_judge(world, service)
    with pytest.raises(AttemptFailed, match=r"no score within 0\.0001 s"):
        asyncio.run(play(world))


def test_a_model_that_nobody_loaded_is_the_judges_failure() -> None:
    with pytest.raises(AttemptFailed, match="the model tiny is not loaded") as failed:
        asyncio.run(play(judged_guess("tiny")))
    assert failed.value.party is Party.JUDGE


def test_worlds_without_such_a_judge_need_no_service(service: ServiceClient) -> None:
    world = get_world("guess_number")
    assert not needs_service(world)
    attach_judge(world, service)  # nothing to do


def test_a_checkpoint_that_was_written_again_is_another_judge(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    before = EmbeddedModel(str(tmp_path)).name
    assert EmbeddedModel(str(tmp_path)).name == before
    os.utime(tmp_path / "adapter_config.json", ns=(1, 1))
    assert EmbeddedModel(str(tmp_path)).name != before


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("env.options.model=tinker://nowhere/sampler_weights/x",), "no checkpoint tinker://nowhere"),
        (("env.options.model=no-such-model",), "no-such-model"),
        (("env.options.model=",), "expected a model's name or a checkpoint"),
        (("env.options.model=m", "env.options.api_key_variable=KEY"), "a judge in this process needs no key"),
    ],
)
def test_mistakes_are_one_message_before_anything_is_played(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *options) == 2
    assert said in capsys.readouterr().err
