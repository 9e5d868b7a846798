# ruff: noqa: ARG002 - broken envs look at less than they are given
"""`check_env` passes every shipped world, and finds in a broken env the one rule that it breaks."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cases import plain_world_names
from turnwise.cli import main
from turnwise.envs.base import EnvStep, Split, Task, assistant, user
from turnwise.envs.check import check_env
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

SLOW = {"code", "household", "repository", "swe", "text_to_sql", "workflow", "workspace"}
"""Worlds with sandboxes or long attempts. One task goes through every rule, too."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in plain_world_names()),
    ("calculator", {"protocol": "tool_call"}),
    ("calculator", {"max_digits": 1, "operators": "*"}),
    ("dialogue", {"max_words": 0}),
    ("gsm8k_multi_turn", {"max_turns": 1}),
    ("guess_number", {"holdout": "phrasing", "turn_decay": 0.9}),
    ("guess_number", {"low": 0, "high": 1, "max_turns": 2}),
    ("key_door", {"num_rooms": 1, "num_keys": 2, "spare_turns": 0}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_shipped_world_keeps_the_rules(name: str, options: dict[str, Any]) -> None:
    report = check_env(get_world(name, **options), num_tasks=1 if name in SLOW else 2, deadline_s=120)
    assert report.is_ok, report


class Env:
    """Three turns of counting up; each broken env changes one thing about it."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task = task
        self.seed = seed
        self.turn = 0

    async def start(self) -> Any:
        return [user(f"Say {self.task.data['number']}.")]

    async def step(self, reply: Message) -> Any:
        self.turn += 1
        is_right = reply.content == str(self.task.data["number"])
        if is_right or self.turn == 3:
            return EnvStep(reward=float(is_right), terminated=True, is_success=is_right)
        return EnvStep(messages=[user("Again.")])

    async def close(self) -> None:
        pass


class World:
    """Say a number: train tasks are even, test tasks are odd."""

    name = "counting"
    max_turns = 3
    max_tokens = 8
    env_class: type = Env

    def tasks(self, split: Split, count: int, seed: int) -> Any:
        numbers = [2 * n + (split == "test") for n in random.Random(seed).sample(range(1000), count)]
        return [Task(id=f"say-{number}", data={"number": number}) for number in numbers]

    def make_env(self, task: Task, seed: int) -> Any:
        return self.env_class(task, seed)

    def demonstrations(self, count: int, seed: int) -> Any:
        tasks = self.tasks("train", count, seed)
        return [[user(f"Say {t.data['number']}."), assistant(str(t.data["number"]))] for t in tasks]


def with_env(env_class: type) -> World:
    world = World()
    world.env_class = env_class
    return world


def test_the_env_that_the_broken_ones_are_made_of_is_whole() -> None:
    report = check_env(World())
    assert report.is_ok, report


class EmptyStart(Env):
    async def start(self) -> Any:
        return []


class SilentStart(Env):
    async def start(self) -> Any:
        return None


class AssistantSpeaksFirst(Env):
    async def start(self) -> Any:
        return [user("Hi"), assistant("Hello!")]


class CrashingStart(Env):
    async def start(self) -> Any:
        raise RuntimeError("no connection")


class CrashingConstructor(Env):
    def __init__(self, task: Task, seed: int) -> None:
        raise RuntimeError("no display")


class UnknownRole(Env):
    async def start(self) -> Any:
        return [Message(role="narrator", content="Once upon a time")]  # pyright: ignore[reportArgumentType]


class PlainTextStart(Env):
    async def start(self) -> Any:
        return ["Say something."]


class SpeaksForThePolicy(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return step if step.is_over else EnvStep(messages=[assistant("I said that.")])


class TextForMessages(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return step if step.is_over else EnvStep(messages="Again.")  # pyright: ignore[reportArgumentType]


class ReturnsTuple(Env):
    async def step(self, reply: Message) -> Any:
        return "Again.", 0.0, False


class CrashesOnEmptyReply(Env):
    async def step(self, reply: Message) -> Any:
        if not reply.content:
            raise IndexError("string index out of range")
        return await super().step(reply)


class TextInInfo(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        info: Any = {"note": "hm"}
        return EnvStep(terminated=True, info=info) if step.is_over else step


class NanReward(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return EnvStep(reward=float("nan"), terminated=True) if step.is_over else step


class UnknownPart(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return EnvStep(reward={"bonus": 1.0}, terminated=True) if step.is_over else step


class NeverOver(Env):
    async def step(self, reply: Message) -> Any:
        if reply.content == str(self.task.data["number"]):
            return EnvStep(reward=1.0, terminated=True, is_success=True)
        return EnvStep(messages=[user("Again.")])


class BothEnds(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return EnvStep(terminated=True, truncated=True) if step.is_over and not step.is_success else step


class SuccessTooEarly(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return step if step.is_over else EnvStep(messages=step.messages, is_success=False)


class NumberForSuccess(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        success: Any = 0.5
        return EnvStep(terminated=True, is_success=success) if step.is_over and not step.is_success else step


class DrawsFromTheClock(Env):
    async def step(self, reply: Message) -> Any:
        step = await super().step(reply)
        return step if step.is_over else EnvStep(messages=[user(f"Again, it is {time.monotonic_ns()}.")])


class StateOnTheClass(Env):
    """Reset in `start`, so that attempts one after the other go well, but two at a time do not."""

    shared: ClassVar[dict[str, int]] = {}

    async def start(self) -> Any:
        self.shared["turn"] = 0
        return await super().start()

    async def step(self, reply: Message) -> Any:
        self.shared["turn"] += 1
        self.turn = self.shared["turn"] - 1
        return await super().step(reply) if self.turn < 3 else EnvStep(terminated=True, is_success=False)


class StateKeyIsANumber(Env):
    def state_key(self) -> Any:
        return self.turn


class ForkShares(Env):
    def fork(self) -> Any:
        return self


class ForkForgets(Env):
    def fork(self) -> Any:
        return ForkForgets(self.task, self.seed)


class ClosesOnce(Env):
    is_closed = False

    async def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed already")
        self.is_closed = True


class ClosesOnlyWhatWasStarted(Env):
    async def start(self) -> Any:
        self.resource = object()
        return await super().start()

    async def close(self) -> None:
        assert self.resource


class HangsInStep(Env):
    async def step(self, reply: Message) -> Any:
        await asyncio.Event().wait()


class HangsInPlainStep(Env):
    def step(self, reply: Message) -> Any:
        time.sleep(1.0)
        return EnvStep(terminated=True)


class BlocksTheLoop(Env):
    async def step(self, reply: Message) -> Any:
        time.sleep(1.5)
        return EnvStep(terminated=True)


class HangsInClose(Env):
    async def close(self) -> None:
        await asyncio.Event().wait()


BROKEN_ENVS: list[tuple[type, str]] = [
    (EmptyStart, "start"),
    (SilentStart, "start"),
    (AssistantSpeaksFirst, "start"),
    (CrashingStart, "start"),
    (CrashingConstructor, "start"),
    (UnknownRole, "messages"),
    (PlainTextStart, "messages"),
    (SpeaksForThePolicy, "messages"),
    (TextForMessages, "messages"),
    (ReturnsTuple, "step"),
    (CrashesOnEmptyReply, "step"),
    (TextInInfo, "step"),
    (NanReward, "reward"),
    (UnknownPart, "reward"),
    (NeverOver, "end"),
    (BothEnds, "end"),
    (SuccessTooEarly, "end"),
    (NumberForSuccess, "end"),
    (DrawsFromTheClock, "determinism"),
    (StateOnTheClass, "isolation"),
    (StateKeyIsANumber, "state_key"),
    (ForkShares, "fork"),
    (ForkForgets, "fork"),
    (ClosesOnce, "close"),
    (ClosesOnlyWhatWasStarted, "close"),
    (HangsInStep, "deadline"),
    (HangsInPlainStep, "deadline"),
    (BlocksTheLoop, "deadline"),
    (HangsInClose, "deadline"),
]


class WorldWithoutName(World):
    name = None  # pyright: ignore[reportAssignmentType]


class WorldWithoutTurns(World):
    max_turns = 0


class WorldWithoutDemonstrations(World):
    demonstrations = None  # pyright: ignore[reportAssignmentType]


class RandomTasks(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return super().tasks(split, count, random.randrange(10**9))


class TooFewTasks(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return super().tasks(split, count, seed)[1:]


class DictsForTasks(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return [{"id": task.id} for task in super().tasks(split, count, seed)]


class NoTasks(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return None


class NoEnv(World):
    def make_env(self, task: Task, seed: int) -> Any:
        return None


class DictsForMessages(World):
    def demonstrations(self, count: int, seed: int) -> Any:
        return [[{"role": "user", "content": "hi"}]]


class SharedTasks(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return super().tasks("train", count, seed)


class TupleData(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return [Task(id=t.id, data={**t.data, "pair": (1, 2)}) for t in super().tasks(split, count, seed)]


class ObjectData(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        return [Task(id=t.id, data={**t.data, "when": Path("x")}) for t in super().tasks(split, count, seed)]


class LosingDemonstrations(World):
    def demonstrations(self, count: int, seed: int) -> Any:
        return [[*dialogue[:-1], assistant("-1")] for dialogue in super().demonstrations(count, seed)]


class DemonstrationsOfAnotherGame(World):
    def demonstrations(self, count: int, seed: int) -> Any:
        return [[user("Knock knock."), *dialogue[1:]] for dialogue in super().demonstrations(count, seed)]


class SlowTasks(World):
    def tasks(self, split: Split, count: int, seed: int) -> Any:
        time.sleep(1.0)
        return super().tasks(split, count, seed)


BROKEN_WORLDS: list[tuple[type[World], str]] = [
    (WorldWithoutName, "world"),
    (WorldWithoutTurns, "world"),
    (WorldWithoutDemonstrations, "world"),
    (RandomTasks, "tasks"),
    (TooFewTasks, "tasks"),
    (DictsForTasks, "tasks"),
    (NoTasks, "tasks"),
    (NoEnv, "start"),
    (SharedTasks, "splits"),
    (DictsForMessages, "demonstrations"),
    (TupleData, "task_data"),
    (ObjectData, "task_data"),
    (LosingDemonstrations, "demonstrations"),
    (DemonstrationsOfAnotherGame, "demonstrations"),
    (SlowTasks, "deadline"),
]

CASES = [
    *((lambda broken=broken: with_env(broken), rule, broken.__name__) for broken, rule in BROKEN_ENVS),
    *((broken, rule, broken.__name__) for broken, rule in BROKEN_WORLDS),
]


@pytest.mark.parametrize(("make", "rule"), [case[:2] for case in CASES], ids=[case[2] for case in CASES])
def test_a_broken_env_fails_exactly_the_rule_it_breaks(make: Callable[[], World], rule: str) -> None:
    report = check_env(make(), deadline_s=0.5 if rule == "deadline" else 10.0)
    assert [result.name for result in report.failed] == [rule], report


def test_every_rule_is_broken_by_some_env() -> None:
    rules = {result.name for result in check_env(World()).results}
    assert rules == {rule for _, rule, _ in CASES}


def test_a_late_call_is_named_with_what_to_do() -> None:
    blocked = check_env(with_env(BlocksTheLoop), deadline_s=0.5).failed
    expected = "step did not come back within 0.5 s and held up the event loop"
    assert any(expected in rule.sentence for rule in blocked)
    waiting = check_env(with_env(HangsInStep), deadline_s=0.5).failed
    assert any("step did not come back within 0.5 s;" in rule.sentence for rule in waiting)


class Coin:
    """An env by itself: no task, no seed."""

    def start(self) -> list[Message]:
        return [user("Heads or tails?")]

    def step(self, reply: Message) -> EnvStep:
        return EnvStep(reward=float("heads" in reply.content), terminated=True, is_success="heads" in reply.content)

    def close(self) -> None:
        pass


class SeededCoin(Coin):
    def __init__(self, seed: int) -> None:
        self.seed = seed


def make_coin() -> Coin:
    return Coin()


@pytest.mark.parametrize("target", [Coin, make_coin])
def test_an_env_by_itself_is_checked_without_tasks(target: Any) -> None:
    report = check_env(target)
    assert report.is_ok, report
    skipped = {result.name for result in report.results if result.state == "skipped"}
    assert skipped == {"tasks", "splits", "task_data", "state_key", "fork", "demonstrations"}


def test_an_env_class_with_a_seed_is_a_world() -> None:
    report = check_env(SeededCoin)
    assert report.is_ok, report
    assert {result.name for result in report.results if result.state == "skipped"} == {
        "state_key",
        "fork",
        "demonstrations",
    }


def test_options_reach_the_world() -> None:
    assert "up to 7 turns" in str(check_env(type(get_world("guess_number")), {"max_turns": 7}))
    with pytest.raises(ConfigError, match="did you mean 'max_turns'"):
        check_env(type(get_world("guess_number")), {"max_turn": 7})


def test_command_line_says_ok_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "guess_number", "high=8"]) == 0
    assert "guess_number: keeps all the rules" in capsys.readouterr().out


def test_command_line_exits_with_1_when_a_rule_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mute.py"
    file.write_text(
        "class Mute:\n"
        "    def __init__(self, seed: int): ...\n"
        "    def start(self): return []\n"
        "    def step(self, reply): ...\n"
        "    def close(self): ...\n",
        encoding="utf-8",
    )
    assert main(["check-env", f"{file}:Mute", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [rule for rule in report["rules"] if rule["state"] == "failed"]
    assert not report["is_ok"]
    assert failed[0]["rule"] == "start"
    assert "expected at least one message" in failed[0]["sentence"]


def test_an_exception_of_an_env_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "careless.py"
    file.write_text(
        "from turnwise import EnvStep, user\n"
        "class Careless:\n"
        "    def __init__(self, seed: int): ...\n"
        "    def start(self): return [user('A number?')]\n"
        "    def step(self, reply): return EnvStep(reward=float(reply.content), terminated=True)\n"
        "    def close(self): ...\n",
        encoding="utf-8",
    )
    assert main(["check-env", f"{file}:Careless"]) == 1
    assert re.search(r"step failed with ValueError: .* at .*careless\.py:5 on the reply", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["no_such_world"], ["guess_number", "high"], ["guess_number", "--tasks", "0"]])
def test_command_line_says_what_is_wrong_with_its_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", *arguments]) == 2
    assert capsys.readouterr().err.startswith("turnwise: ")


def test_no_threads_are_left_by_a_check_that_went_well() -> None:
    before = set(threading.enumerate())
    assert check_env(SeededCoin).is_ok
    for _ in range(1500):  # a stopped thread takes a moment to end
        if not set(threading.enumerate()) - before:
            break
        time.sleep(0.02)
    assert not set(threading.enumerate()) - before
