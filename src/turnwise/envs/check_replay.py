"""Rules of `check_env` that compare attempts: interleaved ones, forks, and demonstrations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

from turnwise.envs.base import Env, EnvStep, Task
from turnwise.envs.check_play import CallFailedError, CallLateError, CheckPlayer, Play
from turnwise.envs.check_report import CheckFailedError, CheckSkippedError
from turnwise.envs.sync import as_env
from turnwise.trajectory import Message


def check_isolation(player: CheckPlayer, plays: Sequence[Play]) -> str:
    """Two attempts played at the same time, turn by turn, must go exactly as they did one after the other."""
    pairs = [(a, b) for a, b in pairwise(plays) if a.task.id == b.task.id]
    for pair in pairs:
        begun = [player.begin(alone.task, alone.style) for alone in pair]
        try:
            goes_on = [True, True]
            for _ in range(player.world.max_turns):
                goes_on = [on and player.turn(env, play) for on, (env, play) in zip(goes_on, begun, strict=True)]
        finally:
            for env, _ in begun:
                player.close(env)
        for alone, (_, together) in zip(pair, begun, strict=True):
            if alone.transcript() != together.transcript():
                raise CheckFailedError(
                    f"task {alone.task.id}, {alone.style} replies: two attempts at the same time disturb each other; "
                    "keep state on the env object (self), not on its class or module"
                )
    return f"{len(pairs)} pairs of attempts at the same time, none disturbed the other"


def check_fork(player: CheckPlayer, plays: Sequence[Play]) -> str:
    """A fork and its original must give the same answers to the same replies, and must not affect each other."""
    of_one_task = [play for play in plays if play.task.id == plays[0].task.id and len(play.steps) > 1]
    if not of_one_task:
        raise CheckSkippedError("every attempt ends after its first turn, so there is no middle to fork in")
    for alone in of_one_task:
        _compare_fork(player, alone)
    return "a fork goes on as its original does, and leaves it alone"


def _compare_fork(player: CheckPlayer, alone: Play) -> None:
    """Fork half-way through the attempt that was played `alone`, play the fork to its end, then the original."""
    env, play = player.begin(alone.task, alone.style)
    envs = [env]
    try:
        fork: Callable[[], Env] | None = getattr(env, "fork", None)
        if fork is None:
            raise CheckSkippedError("no fork(); methods that branch in the middle of an attempt cannot use this env")
        for _ in range(len(alone.steps) // 2):
            player.turn(env, play)
        envs.append(as_env(player.caller.run_plain("fork", fork)))
        forked = copy.deepcopy(play)
        for one, its_play in ((envs[1], forked), (env, play)):
            while len(its_play.steps) < len(alone.steps) and player.turn(one, its_play):
                pass
        for name, its_play in (("the fork", forked), ("the original, once its fork was played,", play)):
            if its_play.transcript() != alone.transcript():
                raise CheckFailedError(
                    f"{alone.where}: {name} answers differently; copy everything that step() changes"
                )
    finally:
        for one in envs:
            player.close(one)


def read_scripts(player: CheckPlayer, tasks: Sequence[Task]) -> dict[str, list[str]]:
    """The demonstrated replies of each task. Empty if `demonstrations` fails; another rule reports that."""
    try:
        dialogues = _demonstrations(player, len(tasks))
    except (CallFailedError, CallLateError, CheckFailedError):
        return {}
    replies = [[message.content for message in dialogue if message.role == "assistant"] for dialogue in dialogues]
    return {task.id: script for task, script in zip(tasks, replies, strict=False)}


def _demonstrations(player: CheckPlayer, count: int) -> Sequence[Sequence[Message]]:
    dialogues: Sequence[Sequence[Message]] = player.caller.run_plain(
        "demonstrations", player.world.demonstrations, count, player.seed
    )
    for message in (message for dialogue in dialogues for message in dialogue):
        if not isinstance(cast(object, message), Message):
            raise CheckFailedError(f"a demonstration holds {message!r:.60}; expected only messages")
    return dialogues


def check_demonstrations(player: CheckPlayer, count: int) -> str:
    """The replies of a demonstration must get the same answers from a new env of its task, and end in success."""
    dialogues = _demonstrations(player, count)
    if not dialogues:
        raise CheckSkippedError("there are none")
    tasks: Sequence[Task] = player.caller.run_plain(
        'tasks("train", ...)', player.world.tasks, "train", count, player.seed
    )
    for number, dialogue in enumerate(dialogues, start=1):
        in_order = [*tasks[number - 1 :], *tasks[: number - 1]]  # its own task first, then any other
        problems = [_replay(player, task, dialogue) for task in in_order]
        if all(problems):
            advice = "make them with turnwise.envs.scripted.play_demonstrations, out of the env itself"
            raise CheckFailedError(f"demonstration {number}: {problems[0]}; {advice}")
    return f"{len(dialogues)} demonstrations replay to success"


def _replay(player: CheckPlayer, task: Task, dialogue: Sequence[Message]) -> str:
    """Replay a dialogue in a new env of `task`. Return what goes wrong; empty text if nothing does."""
    env = player.make_env(task)
    try:
        rest = list(dialogue)
        heard: Sequence[Message] = player.caller.run("start", env.start)
        while True:
            if rest[: len(heard)] != list(heard):
                return f"the env says {_shorten(heard)}, the dialogue {_shorten(rest[: len(heard)])}"
            rest = rest[len(heard) :]
            if not rest or rest[0].role != "assistant":
                return f"the dialogue goes on with {_shorten(rest[:1])}; expected a reply of the assistant"
            step: EnvStep = player.caller.run("step", env.step, rest.pop(0))
            if step.is_over:
                break
            if not rest:
                return "the dialogue stops, but the env is not over"
            heard = step.messages
        if rest and rest != list(step.messages):
            return f"the env is over, but the dialogue goes on with {_shorten(rest[:1])}"
        return "" if step.is_success or step.is_success is None else "it ends without success"
    finally:
        player.close(env)


def _shorten(messages: Sequence[Message]) -> str:
    return " / ".join(f"{message.role}: {message.content}" for message in messages)[:120] or "nothing"
