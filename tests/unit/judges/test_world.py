from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from local_server import serving
from turnwise.envs.base import EnvStep, Task, assistant, user
from turnwise.envs.check import check_env
from turnwise.envs.library.negotiate_text import write_offer
from turnwise.envs.registry import get_world
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.judges import Judge, JudgeLimits, Rubric, judged
from turnwise.judges.models import JudgeFailedError
from turnwise.opponents.seating import seat
from turnwise.trajectory import Message

RUBRIC = Rubric(criteria="It is polite.")


class Opinion:
    """A judge model that always says the same, and remembers what it was asked."""

    name = "opinion"

    def __init__(self, answer: str = "Score: 5") -> None:
        self._answer = answer
        self.prompts: list[str] = []

    async def answer(self, prompt: Sequence[Message]) -> str:
        self.prompts.append(prompt[-1].content)
        if not self._answer:
            raise JudgeFailedError("it is out")
        return self._answer


def guess(**options: Any) -> tuple[Any, Opinion]:
    opinion = Opinion()
    return judged(get_world("guess_number"), Judge(opinion, RUBRIC), **options), opinion


async def play(world: Any, replies: Sequence[str]) -> list[EnvStep]:
    (task,) = world.tasks("train", 1, 0)
    env = world.make_env(task, 0)
    await env.start()
    return [await env.step(assistant(reply.format(**task.data))) for reply in replies]


async def test_the_score_is_a_channel_of_its_own_on_the_last_turn() -> None:
    world, opinion = guess(weight=0.4)
    first, last = await play(world, ["zero", "{secret}"])
    assert "judge" not in first.reward_parts
    assert dict(last.reward_parts) == {"outcome": 1.0, "judge": pytest.approx(0.2)}
    assert last.is_success
    assert dict(last.info) == {"guesses": 2, "judge_asked": 1.0, "judge_fallback": 0.0, "judge_score": 0.5}
    (asked,) = opinion.prompts
    assert "[assistant] zero" in asked
    assert "[user] Say one number" in asked


@pytest.mark.parametrize(("gate", "is_asked"), [("success", False), ("outcome", False), ("always", True)])
async def test_what_fails_the_verifiable_reward_is_judged_only_when_asked_for(gate: str, is_asked: bool) -> None:
    world, opinion = guess(gate=gate)
    steps = await play(world, ["zero"] * 5)
    assert steps[-1].is_over
    assert bool(opinion.prompts) == is_asked
    assert ("judge" in steps[-1].reward_parts) == is_asked


async def test_the_gate_outcome_lets_part_of_a_success_through() -> None:
    opinion = Opinion()
    world = judged(get_world("key_door", num_rooms=2, spare_turns=0), Judge(opinion, RUBRIC), gate="outcome")
    (task,) = world.tasks("train", 1, 0)
    env = world.make_env(task, 0)
    await env.start()
    door = task.data["rooms"][0]["door"]
    steps = [await env.step(assistant(reply)) for reply in (f"take {door}", "open", "wait", "wait")]
    assert steps[-1].is_success is False
    assert steps[-1].reward_parts["judge"] == 0.5


async def test_a_judge_that_fails_fails_the_attempt_or_leaves_its_channel_out() -> None:
    inner = get_world("guess_number")
    strict = judged(inner, Judge(Opinion(""), RUBRIC))
    with pytest.raises(AttemptFailed, match="it is out") as failed:
        await play(strict, ["{secret}"])
    assert failed.value.party is Party.JUDGE
    lenient = judged(inner, Judge(Opinion(""), RUBRIC, limits=JudgeLimits(fallback="skip")))
    (step,) = await play(lenient, ["{secret}"])
    assert dict(step.reward_parts) == {"outcome": 1.0}
    assert step.info["judge_fallback"] == 1.0
    fixed = JudgeLimits(fallback="value", fallback_value=0.1)
    (step,) = await play(judged(inner, Judge(Opinion(""), RUBRIC, limits=fixed)), ["{secret}"])
    assert dict(step.reward_parts) == {"outcome": 1.0, "judge": 0.1}


class Offering:
    """An opponent that is a model as far as anybody sees: it makes one offer."""

    name, is_scripted = "offering", False

    async def reply(self, game: Any, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002
        return f"What about this?\n{write_offer({issue.name: 0 for issue in game.table.issues}, game.table.issues)}"


@pytest.mark.parametrize("opponent", ["conceder", "offering"])
async def test_a_negotiation_is_paid_by_its_table_and_judged_in_a_channel_of_its_own(opponent: str) -> None:
    opinion = Opinion()
    inner = get_world("negotiate", opponent="conceder")
    world: Any = judged(inner, Judge(opinion, RUBRIC), gate="always", weight=0.2)
    if opponent == "offering":
        world = seat(world, lambda _task, _seed: Offering())
    task = next(one for one in inner.tasks("train", 8, 0) if one.data["first"] != one.data["seat"])
    env = world.make_env(task, 0)
    await env.start()
    step = await env.step(assistant("Accept"))
    assert step.terminated
    assert dict(step.reward_parts) == {"outcome": step.info["payoff"], "judge": pytest.approx(0.1)}
    assert step.labels["opponent"] == opponent
    assert "[assistant] Accept" in opinion.prompts[0]


async def test_the_reference_is_shown_and_a_wrong_key_is_named() -> None:
    world, opinion = guess(reference_key="secret")
    (task,) = world.tasks("train", 1, 0)
    await play(world, ["{secret}"])
    assert opinion.prompts[0].endswith(f"A right answer says: {task.data['secret']}")
    broken, _ = guess(reference_key="answer")
    with pytest.raises(ConfigError, match=r"'answer' is not in the data of task .*; it has secret, phrasing"):
        broken.make_env(task, 0)


@pytest.mark.parametrize("name", ["guess_number", "search", "calculator"])
def test_a_judged_world_keeps_the_rules_of_worlds(name: str) -> None:
    report = check_env(judged(get_world(name), Judge(Opinion(), RUBRIC)), num_tasks=2, deadline_s=120)
    assert report.is_ok, report
    states = {result.name: result.state for result in report.results}
    inner = {result.name: result.state for result in check_env(get_world(name), num_tasks=2, deadline_s=120).results}
    assert states == inner  # state_key and fork are there exactly when the world has them


class PlainWorld:
    """Plain methods: the judge wraps what `as_env` makes of them."""

    name, max_turns, max_tokens = "plain", 1, 4

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{number}") for number in range(count)]

    def make_env(self, task: Task, seed: int) -> Any:  # noqa: ARG002
        return self

    def demonstrations(self, count: int, seed: int) -> list[Any]:  # noqa: ARG002
        return []

    def start(self) -> list[Message]:
        return [user("Hi")]

    def step(self, reply: Message) -> EnvStep:
        return EnvStep(reward=1.0, terminated=True, is_success=bool(reply.content))

    def close(self) -> None:
        pass


async def test_plain_envs_are_judged_too() -> None:
    world = judged(PlainWorld(), Judge(Opinion(), RUBRIC))  # pyright: ignore[reportArgumentType]
    (step,) = await play(world, ["hello"])
    assert step.reward_parts["judge"] == 0.5
    env = world.make_env(Task(id="x"), 0)
    assert not hasattr(env, "state_key")
    await env.close()


@pytest.mark.parametrize("options", [{"gate": "never"}, {"weight": 0.0}, {"weight": -1.0}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        guess(**options)


def test_the_command_lines_world_reads_rubric_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, seen = FastAPI(), []

    @app.post("/v1/chat/completions", response_model=None)
    async def complete(request: Request) -> dict[str, Any]:
        seen.append((request.headers.get("authorization"), (await request.json())["messages"][0]["content"]))
        return {"choices": [{"message": {"content": "Score: 4"}}]}

    (tmp_path / "rubric.txt").write_text("Few guesses.", encoding="utf-8")
    options = {
        "world": "guess_number",
        "world_options": {"high": 8},
        "rubric": f"@{tmp_path}/rubric.txt",
        "model": "m",
        "api_key_variable": "MY_JUDGE_KEY",
        "cache": str(tmp_path / "judge.db"),
        "weight": 0.5,
    }
    name = "turnwise.judges:judged_by_model"
    with serving(app) as address:
        with pytest.raises(ConfigError, match="the environment variable MY_JUDGE_KEY is not set"):
            get_world(name, base_url=f"{address}/v1", **options)
        monkeypatch.setenv("MY_JUDGE_KEY", "k3y")
        world = get_world(name, base_url=f"{address}/v1", **options)
        (step,) = asyncio.run(play(world, ["{secret}"]))
    assert dict(step.reward_parts) == {"outcome": 1.0, "judge": pytest.approx(0.2)}
    assert seen[0][0] == "Bearer k3y"
    assert "Few guesses." in seen[0][1]
    assert "k3y" not in json.dumps(repr(world))
