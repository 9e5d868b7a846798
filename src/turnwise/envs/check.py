"""`check_env` plays an env or a world and reports, for every rule, what it found and what to do about it.

    report = check_env(MyWorld())          # or a world class, an env class, a function that makes either
    print(report)
    assert report.is_ok

The replies are numbers, words that the env itself used, empty text, 20,000 characters, garbage, and broken tool calls.
An env must answer all of them without raising, because a policy in training says all of them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, cast, get_args

from turnwise.envs.base import EnvStep, Split, Task, World
from turnwise.envs.check_play import CallFailedError, CallLateError, CheckCaller, CheckPlayer, Play
from turnwise.envs.check_replay import check_demonstrations, check_fork, check_isolation, read_scripts
from turnwise.envs.check_report import CheckFailedError, CheckReport, CheckResult, CheckSkippedError
from turnwise.envs.worlds import EnvClassWorld, as_world, check_options, is_env, is_world, world_parameters
from turnwise.errors import DataError
from turnwise.trajectory import Message, Role

__all__ = ["CheckReport", "check_env"]

_RULE_OF_MESSAGE = {"EnvStep.reward": "reward", "EnvStep.messages": "messages", "EnvStep is both": "end"}
"""`EnvStep` refuses some mistakes when it is made. The start of its error message tells which rule was broken."""


def check_env(
    target: Any,
    options: Mapping[str, Any] | None = None,
    *,
    num_tasks: int = 3,
    seed: int = 0,
    deadline_s: float = 5.0,
) -> CheckReport:
    """Check a world, or an env class by itself, against every rule.

    Args:
        options: Arguments for the constructor of `target`.
        num_tasks: Number of tasks to play. Each is played twice with every style of replies.
        deadline_s: Time limit of a single call of the env or the world.
    """
    world, has_tasks = _to_world(target, options)
    caller = CheckCaller(deadline_s)
    try:
        check = _WorldCheck(CheckPlayer(world=world, caller=caller, seed=seed), has_tasks, num_tasks)
        return check.run()
    finally:
        caller.close()


def _to_world(target: Any, options: Mapping[str, Any] | None) -> tuple[World, bool]:
    """Return the world, and whether it has tasks. An env class that takes no task is checked by itself."""
    given = dict(options or {})
    is_env_class = inspect.isclass(target) and is_env(target) and not is_world(target)
    if inspect.isfunction(target):
        made = target(**check_options(target.__name__, world_parameters(target), given))
        return (EnvClassWorld(target, given, is_single=True), False) if is_env(made) else (as_world(made), True)
    if is_env_class and not {"task", "seed"} & set(inspect.signature(target).parameters):
        return EnvClassWorld(target, given, is_single=True), False
    return as_world(target, options), True


@dataclass
class _WorldCheck:
    """One run of all rules. Each rule looks at one thing only, so that a mistake is reported once."""

    player: CheckPlayer
    has_tasks: bool
    num_tasks: int
    plays: list[tuple[Play, Play]] = field(default_factory=list[tuple[Play, Play]])
    results: list[CheckResult] = field(default_factory=list[CheckResult])
    late: CallLateError | None = None
    """The last call that was late outside of a play."""

    def run(self) -> CheckReport:
        self._rule("world", self._world)
        self._rule("tasks", self._tasks)
        self._rule("splits", self._splits)
        self._rule("task_data", self._task_data)
        is_playable = self.late is None and not self._has_failed("world", "tasks")
        if is_playable:
            self._play_all()
        for name, rule in (
            ("start", self._start),
            ("step", self._step),
            ("messages", self._messages),
            ("reward", self._reward),
            ("end", self._end),
            ("state_key", self._state_key),
            ("determinism", self._determinism),
            ("isolation", self._isolation),
            ("fork", self._fork),
            ("close", self._close),
            ("demonstrations", self._demonstrations),
        ):
            self._rule(name, rule if is_playable else _cannot_play)
        self._rule("deadline", self._deadline)
        return CheckReport(name=str(getattr(self.player.world, "name", "this world")), results=tuple(self.results))

    def _rule(self, name: str, rule: Callable[[], str]) -> None:
        """Call one rule and record the sentence that it returns or raises."""
        state: Literal["passed", "failed", "skipped"] = "passed"
        try:
            sentence = rule()
        except CheckFailedError as failure:
            state, sentence = "failed", str(failure)
        except CheckSkippedError as skip:
            state, sentence = "skipped", str(skip)
        except CallFailedError as failure:
            state, sentence = "failed", str(failure)
        except CallLateError as late:
            state, sentence = ("failed" if name == "deadline" else "skipped"), str(late)
            self.late = late
        self.results.append(CheckResult(name=name, state=state, sentence=sentence))

    def _has_failed(self, *names: str) -> bool:
        return any(result.name in names and result.state == "failed" for result in self.results)

    def _draw(self, split: Split) -> Sequence[Task]:
        world = self.player.world
        return self.player.caller.run_plain(
            f'tasks("{split}", ...)', world.tasks, split, self.num_tasks, self.player.seed
        )

    def _play_all(self) -> None:
        """Play every task with every style, twice. Stop after a late call, because the others would be as slow."""
        tasks = self._draw("train")
        self.player = replace(self.player, scripts=read_scripts(self.player, tasks))
        for task in tasks:
            for style in self.player.styles(task):
                first = self.player.play(task, style)
                again = first if first.is_late else self.player.play(task, style)
                self.plays.append((first, again))
                if first.is_late or again.is_late:
                    return

    def _world(self) -> str:
        world = self.player.world
        if not isinstance(getattr(world, "name", None), str) or not world.name:
            raise CheckFailedError(f"name is {getattr(world, 'name', None)!r}; give the world a name")
        for attribute in ("max_turns", "max_tokens"):
            value = getattr(world, attribute, None)
            if not isinstance(value, int) or value < 1:
                raise CheckFailedError(f"{attribute} is {value!r}; expected a whole number of at least 1")
        if not callable(getattr(world, "demonstrations", None)):
            raise CheckFailedError("no demonstrations(count, seed); return [] when there are none")
        return f"{world.name}: up to {world.max_turns} turns of {world.max_tokens} tokens"

    def _tasks(self) -> str:
        _skip_unless(self.has_tasks, "an env by itself has no tasks")
        for split in get_args(Split):
            first, again = self._draw(split), self._draw(split)
            if not isinstance(cast(object, first), Sequence):
                raise CheckFailedError(f"tasks({split!r}, ...) gave {first!r:.60}; expected a list of Task")
            if len(first) != self.num_tasks:
                raise CheckFailedError(
                    f"tasks({split!r}, {self.num_tasks}, seed) gave {len(first)}; return as many as were asked for"
                )
            for task in first:
                if not isinstance(cast(object, task), Task) or not task.id:
                    raise CheckFailedError(f"tasks({split!r}, ...) holds {task!r:.60}; expected Task(id=..., data=...)")
            if list(first) != list(again):
                raise CheckFailedError(f"tasks({split!r}, ...) differ from call to call; draw them from the seed alone")
        return "the same seed gives the same tasks"

    def _splits(self) -> str:
        _skip_unless(self.has_tasks and not self._has_failed("tasks"), "no tasks to compare")
        ids = {split: {task.id for task in self._draw_many(split)} for split in get_args(Split)}
        shared = ids["train"] & ids["test"]
        if shared:
            raise CheckFailedError(
                f"{min(shared)!r} is a train and a test task; hold out tasks that training never sees"
            )
        return f"{len(ids['train'])} train and {len(ids['test'])} test tasks, none in both"

    def _draw_many(self, split: Split) -> Sequence[Task]:
        world, seed = self.player.world, self.player.seed
        return self.player.caller.run_plain(f'tasks("{split}", ...)', world.tasks, split, 50 * self.num_tasks, seed)

    def _task_data(self) -> str:
        _skip_unless(self.has_tasks and not self._has_failed("tasks"), "no tasks to look at")
        for task in self._draw("train"):
            try:
                stored = json.loads(json.dumps(task.data, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise CheckFailedError(
                    f"data of {task.id} is not JSON ({error}); keep to text, numbers, lists and dicts"
                ) from error
            if stored != task.data:
                raise CheckFailedError(
                    f"data of {task.id} comes back changed from JSON; use lists for tuples, text for keys"
                )
        return "task data can be stored"

    def _all_plays(self) -> list[Play]:
        return [play for pair in self.plays for play in pair]

    def _start(self) -> str:
        for play in self._all_plays():
            failure = play.failure
            if isinstance(failure, CallFailedError) and failure.call in ("make_env", "start"):
                raise CheckFailedError(f"{play.where}: {failure}")
            if failure is not None and failure.call in ("make_env", "start"):
                continue
            if not play.start_messages():
                raise CheckFailedError(
                    f"start() gave {play.start!r:.60}; expected at least one message, such as [user('Hi')]"
                )
            last = play.start_messages()[-1]
            if isinstance(last, Message) and last.role == "assistant":
                raise CheckFailedError("start() ends with an assistant message; the policy speaks next")
        return "start() gives the first messages"

    def _step(self) -> str:
        for play in self._all_plays():
            failure = play.failure
            if isinstance(failure, CallFailedError) and failure.call == "step" and _rule_of(failure) == "step":
                reply = f"{play.replies[-1]!r:.40}"
                raise CheckFailedError(
                    f"{play.where}: {failure} on the reply {reply}; answer any text; flag it if need be"
                )
            for step in play.steps:
                if not isinstance(step, EnvStep):
                    raise CheckFailedError(f"{play.where}: step() gave {step!r:.60}; expected an EnvStep")
                for key, value in step.info.items():
                    if not isinstance(cast(object, value), Real) or not math.isfinite(value):
                        raise CheckFailedError(
                            f"{play.where}: info[{key!r}] is {value!r:.60}; expected a finite number"
                        )
        return f"{sum(len(play.steps) for play in self._all_plays())} steps, each an EnvStep"

    def _messages(self) -> str:
        count = 0
        for play in self._all_plays():
            self._raise_if_refused(play, "messages")
            said = [message for step in play.env_steps() for message in step.messages]
            for message in [*play.start_messages(), *said]:
                count += 1
                if not isinstance(message, Message):
                    raise CheckFailedError(f"{message!r:.60} is not a Message; use user(...) or Message(...)")
                if message.role not in get_args(Role):
                    raise CheckFailedError(f"role {message.role!r}; expected {', '.join(get_args(Role))}")
                if not isinstance(cast(object, message.content), str):
                    raise CheckFailedError(f"content {message.content!r:.60}; expected text")
            if any(message.role == "assistant" for message in said):
                raise CheckFailedError(f"{play.where}: step() speaks as assistant; that is the policy's role")
        return f"{count} messages, all with a known role and text"

    def _reward(self) -> str:
        rewards: list[float] = []
        for play in self._all_plays():
            self._raise_if_refused(play, "reward")
            rewards += [sum(step.reward_parts.values()) for step in play.env_steps()]
        return (
            f"from {min(rewards):g} to {max(rewards):g}, finite, with known parts" if rewards else "no step to look at"
        )

    def _end(self) -> str:
        max_turns = self.player.world.max_turns
        for play in self._all_plays():
            self._raise_if_refused(play, "end")
            steps = play.env_steps()
            if play.failure is not None or len(steps) < len(play.steps):
                continue
            if steps and not steps[-1].is_over:
                raise CheckFailedError(
                    f"{play.where}: not over after max_turns={max_turns}; set terminated, or raise max_turns"
                )
            flags = [flag for step in steps for flag in (step.terminated, step.truncated, step.is_success or False)]
            if not all(isinstance(cast(object, flag), bool) for flag in flags):
                raise CheckFailedError(f"{play.where}: terminated, truncated and is_success must be True or False")
            if any(step.is_success is not None for step in steps[:-1]):
                raise CheckFailedError(
                    f"{play.where}: is_success is set before the last step; set it when the attempt is over"
                )
        return f"over within {max_turns} turns, whatever the reply"

    def _raise_if_refused(self, play: Play, rule: str) -> None:
        failure = play.failure
        if isinstance(failure, CallFailedError) and _rule_of(failure) == rule:
            raise CheckFailedError(f"{play.where}: {failure.cause}")

    def _state_key(self) -> str:
        failed = [
            p for p in self._all_plays() if isinstance(p.failure, CallFailedError) and p.failure.call == "state_key"
        ]
        if failed:
            raise CheckFailedError(f"{failed[0].where}: {failed[0].failure}")
        keys = [key for play in self._all_plays() for key in play.state_keys]
        _skip_unless(bool(keys), "no state_key(); methods that compare equal states cannot use this env")
        for key in keys:
            if not isinstance(key, str):
                raise CheckFailedError(f"state_key() gave {key!r:.60}; expected text")
        return f"{len(set(keys))} states named"

    def _determinism(self) -> str:
        for first, again in self.plays:
            if first.failure or again.failure:
                continue
            for turn, (one, two) in enumerate(zip(first.transcript(), again.transcript(), strict=False)):
                if one != two:
                    where = f"task {first.task.id}, {first.style} replies, turn {turn}"
                    raise CheckFailedError(
                        f"{where}: {one!r:.120} and then, with the same seed and replies, {two!r:.120}; "
                        "draw all randomness from the seed, and keep nothing between attempts"
                    )
        return "same seed, same replies: same messages and rewards"

    def _isolation(self) -> str:
        _skip_unless(not self._is_marred("determinism"), "only an env that repeats itself can be compared")
        return check_isolation(self.player, [first for first, _ in self.plays])

    def _fork(self) -> str:
        _skip_unless(not self._is_marred("determinism"), "only an env that repeats itself can be compared")
        return check_fork(self.player, [first for first, _ in self.plays])

    def _is_marred(self, rule: str) -> bool:
        is_failed = self._has_failed(rule)
        has_bad_steps = any(len(play.env_steps()) < len(play.steps) for play in self._all_plays())
        return is_failed or has_bad_steps or any(play.failure for play in self._all_plays())

    def _close(self) -> str:
        for play in self._all_plays():
            if isinstance(play.close_failure, CallFailedError):
                raise CheckFailedError(f"{play.where}: {play.close_failure}")
        _skip_unless(not any(play.failure for play in self._all_plays()), "the env did not get through an attempt")
        task = self.plays[0][0].task
        unused = self.player.make_env(task)
        begun, play = self.player.begin(task, "number")
        self.player.turn(begun, play)
        for when, env in (("before start()", unused), ("in the middle", begun)):
            for times in ("once", "twice"):
                failure = self.player.close(env)
                if isinstance(failure, CallLateError):
                    raise failure
                if failure is not None:
                    raise CheckFailedError(f"close() {when}, {times}: {failure}; close() must be safe at any time")
        return "close() works before start, in the middle, at the end, and twice"

    def _demonstrations(self) -> str:
        _skip_unless(self.has_tasks, "an env by itself has none")
        is_marred = self._is_marred("determinism") or self._has_failed("start", "messages")
        _skip_unless(not is_marred, "the env itself has to be mended first")
        return check_demonstrations(self.player, self.num_tasks)

    def _deadline(self) -> str:
        late = [
            f for play in self._all_plays() for f in (play.failure, play.close_failure) if isinstance(f, CallLateError)
        ]
        if late or self.late:
            raise CheckFailedError(f"{late[0] if late else self.late}; give every wait inside it a timeout")
        return "every call came back in time"


def _rule_of(failure: CallFailedError) -> str:
    """The rule that is broken when `step` raises this."""
    if isinstance(failure.cause, DataError):
        for beginning, rule in _RULE_OF_MESSAGE.items():
            if str(failure.cause).startswith(beginning):
                return rule
    return "step"


def _skip_unless(condition: bool, why_not: str) -> None:
    if not condition:
        raise CheckSkippedError(why_not)


def _cannot_play() -> str:
    raise CheckSkippedError("fix the world or its tasks first")
