"""Says how long a run will take, from the speed of this machine and the length of a typical attempt.

    scripted dialogues of the world -> PlannedAttempt -> SpeedLoad -> Speed (speed.py) -> TimePlan

A world without scripted dialogues is planned with attempts that use all of their turns and tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turnwise.client.fake import ScriptedSampler
from turnwise.config.config import Config
from turnwise.envs.base import assistant
from turnwise.models.tokenizer import load_tokenizer
from turnwise.renderers.base import Renderer
from turnwise.renderers.dialogue import DialogueTurn, dialogue_to_turns
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.stats import RolloutStats
from turnwise.training.assemble import Parts, make_renderer
from turnwise.training.plan import Plan, attempts_per_task, dialogues_per_optimizer_step
from turnwise.training.setup import Setup, find_model
from turnwise.training.speed import Speed, SpeedLoad, find_speed
from turnwise.trajectory import Trajectory
from turnwise.watch.terminal import format_duration

NUM_DIALOGUES = 16
"""Scripted dialogues whose length is looked at."""
NUM_TRIED = 4
"""Attempts that are played with scripted replies to time the env."""
ENV_S = 2.0
"""Longest time for these attempts, in seconds."""
USUAL_OBSERVED = 32
"""Tokens that the world is taken to add after a turn if it has no scripted dialogues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttempt:
    """The mean attempt."""

    turns: float
    prompt_tokens: float
    """Tokens of the first prompt."""
    reply_tokens: float
    """Tokens sampled in each turn."""
    total_tokens: float
    """Tokens of the whole dialogue; where a memory rewrites prompts, of all datums, each with its own prompt."""
    datums: float = 1.0
    """Sequences that it is trained as: one, and one more for each rewritten prompt."""
    source: str
    """The source of the numbers, in words."""

    @property
    def observed_tokens(self) -> float:
        """What is read after the first prompt: what the world says, the end of each reply, and rewritten prompts."""
        return max(0.0, self.total_tokens - self.prompt_tokens - self.turns * self.reply_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """Seconds by purpose."""

    speed: Speed
    env_turn_s: float | None
    """One turn of the env; None: not measured."""
    sampling_s: float
    """Seconds of sampling in one step."""
    env_s: float
    """Seconds of the envs in one step."""
    training_s: float
    """Seconds of training in one step."""
    evaluation_s: float
    """Seconds of all evaluations."""
    warmup_s: float
    """Seconds of all supervised steps."""
    num_steps: int
    longest_step_s: float
    """Seconds of a step in which every attempt uses all of its turns and tokens."""
    shape: PlannedAttempt
    left_out: Sequence[str] = ()

    @property
    def step_s(self) -> float:
        return self.sampling_s + self.env_s + self.training_s

    @property
    def run_s(self) -> float:
        return self.speed.load_s + self.warmup_s + self.evaluation_s + self.num_steps * self.step_s

    def lines(self) -> list[str]:
        """The times as lines of the plan."""
        env = "" if self.env_turn_s is None else f", env {_seconds(self.env_s)}"
        parts = f"load {_seconds(self.speed.load_s)}, warm-up {_seconds(self.warmup_s)}, evaluation "
        parts += f"{_seconds(self.evaluation_s)}"
        missing = f"; not included: {', '.join(self.left_out)}" if self.left_out else ""
        speed = self.speed
        line = f"about {_seconds(self.step_s)} per step (sampling {_seconds(self.sampling_s)}{env}, training "
        line += (
            f"{_seconds(self.training_s)}; up to {_seconds(self.longest_step_s)} if every attempt uses all turns and "
        )
        line += f"tokens), {format_duration(self.run_s)} for the run ({parts}){missing}"
        rates = f"{speed.sample_tokens_per_s:,.0f} tokens sampled, {speed.read_tokens_per_s:,.0f} read and "
        rates += f"{speed.train_tokens_per_s:,.0f} trained per second, measured on this machine; attempts of "
        several = f" in {self.shape.datums:.1f} datums" if self.shape.datums > 1 else ""
        rates += f"{self.shape.turns:.1f} turns and {self.shape.total_tokens:.0f} tokens{several}, from "
        rates += self.shape.source
        return [f"{'time':<13}{line}", f"{'speed':<13}{rates}"]


def time_lines(setup: Setup, report: Callable[[str], None]) -> list[str]:
    """What the plan says about time."""
    why = _why_not(setup.config)
    if why:
        return [f"time         not measured: {why}"]
    return plan_time(setup, report).lines()


def _why_not(config: Config) -> str:
    if config.model.base_url:
        return f"the model is at {config.model.base_url}"
    if config.rollout.backend != "local":
        return f"{config.rollout.backend} samples, and --plan does not start it"
    if config.cluster.learners > 1:
        return f"{config.cluster.learners} learners train together, and --plan starts none of them"
    return ""


def plan_time(setup: Setup, report: Callable[[str], None]) -> TimePlan:
    """Measure what is not on record, and add up."""
    config, parts = setup.config, setup.parts
    renderer = make_renderer(load_tokenizer(find_model(config)), config.rollout, config.memory)
    scripts = [dialogue_to_turns(renderer, one) for one in parts.world.demonstrations(NUM_DIALOGUES, 0)]
    tried = _Trial(parts, renderer, scripts).run()
    shape = _shape(parts, scripts, tried.trajectories)
    speed = find_speed(config, _speed_load(config, parts, shape), report)
    left_out = [f"the env ({tried.why_not})"] if tried.why_not else []
    left_out += ["the critic"] if config.method.needs_critic else []
    left_out += ["checkpoints"]
    plan = setup.make_plan()
    longest = _add_up(config, plan, _longest(shape, parts.rollout), speed, tried.turn_s, left_out)
    planned = _add_up(config, plan, shape, speed, tried.turn_s, left_out)
    return replace(planned, longest_step_s=max(longest.step_s, planned.step_s))


def _longest(shape: PlannedAttempt, limits: RolloutLimits) -> PlannedAttempt:
    """An attempt whose every turn is as long as it may be; the world adds as much after a turn as usual."""
    turns, reply = limits.max_turns, limits.max_tokens_per_turn
    total = shape.prompt_tokens + turns * (reply + shape.observed_tokens / shape.turns)
    datums = shape.datums * turns / shape.turns if shape.datums > 1 else 1.0
    most = datums * limits.max_trajectory_tokens
    return replace(
        shape, turns=turns, reply_tokens=reply, total_tokens=min(total, most), datums=datums, source="limits"
    )


def _speed_load(config: Config, parts: Parts, shape: PlannedAttempt) -> SpeedLoad:
    played = config.train.tasks_per_step * attempts_per_task(config) or len(parts.held_out)
    return SpeedLoad(
        rows=max(1, min(played, parts.rollout.max_concurrency, config.engine_in_use.max_num_seqs)),
        context=_rounded(shape.prompt_tokens),
        reply_tokens=_rounded(shape.reply_tokens),
        datums=max(1, round(dialogues_per_optimizer_step(config) * shape.datums)),
        datum_tokens=min(_rounded(shape.total_tokens / shape.datums), parts.rollout.max_trajectory_tokens),
        group_size=max(1, attempts_per_task(config)),
    )


def _rounded(count: float) -> int:
    """Round to two digits, so that a small change of a world does not ask for another measurement."""
    return max(1, int(float(f"{count:.2g}")))


def _shape(parts: Parts, scripts: Sequence[Sequence[DialogueTurn]], tried: Sequence[Trajectory]) -> PlannedAttempt:
    limits = parts.rollout
    if scripts:
        count = len(scripts)
        sequences = [sequence_lengths(one) for one in scripts]
        turns = sum(map(len, scripts)) / count
        replies = sum(len(turn.reply_ids) for one in scripts for turn in one) / count
        return PlannedAttempt(
            turns=min(turns, limits.max_turns),
            prompt_tokens=sum(len(one[0].prompt_ids) for one in scripts) / count,
            reply_tokens=min(replies / turns, limits.max_tokens_per_turn),
            total_tokens=sum(map(sum, sequences)) / count,
            datums=sum(map(len, sequences)) / count,
            source=f"{count} scripted dialogues",
        )
    first = [len(one.turns[0].prompt_ids) for one in tried if one.turns]
    prompt = sum(first) / len(first) if first else USUAL_OBSERVED
    reply = limits.max_tokens_per_turn
    if parts.config.memory.window:
        return _windowed(parts, prompt, reply)
    total = min(prompt + limits.max_turns * (reply + USUAL_OBSERVED), limits.max_trajectory_tokens)
    turns = max(1.0, min(limits.max_turns, (total - prompt) / (reply + USUAL_OBSERVED)))
    return PlannedAttempt(
        turns=turns, prompt_tokens=prompt, reply_tokens=reply, total_tokens=total, source="the limits of an attempt"
    )


def sequence_lengths(turns: Sequence[DialogueTurn]) -> list[int]:
    """Tokens of each sequence that an attempt is trained as: a prompt that does not go on with the last begins one."""
    lengths: list[int] = []
    last: tuple[int, ...] = ()
    for turn in turns:
        if last and turn.prompt_ids[: len(last)] == last:
            lengths.pop()
        last = (*turn.prompt_ids, *turn.reply_ids)
        lengths.append(len(last))
    return lengths


def _windowed(parts: Parts, prompt: float, reply: int) -> PlannedAttempt:
    """An attempt that uses all of its turns, with a window that is rewritten whenever turns leave it."""
    memory, limits = parts.config.memory, parts.rollout
    leaving = memory.window - memory.keep if memory.summary_tokens else 1
    datums = 1 + max(0, limits.max_turns - memory.window) / leaving
    in_window = min(memory.window, limits.max_turns)
    each = prompt + memory.summary_tokens + in_window * (reply + USUAL_OBSERVED)
    return PlannedAttempt(
        turns=limits.max_turns,
        prompt_tokens=prompt,
        reply_tokens=reply,
        total_tokens=datums * min(each, limits.max_trajectory_tokens),
        datums=datums,
        source="the limits of an attempt",
    )


def _add_up(
    config: Config, plan: Plan, shape: PlannedAttempt, speed: Speed, env_turn_s: float | None, left_out: Sequence[str]
) -> TimePlan:
    train, group_size = config.train, attempts_per_task(config)
    tasks = train.tasks_per_step * train.accumulate

    def playing_s(num_tasks: float, num_attempts: float) -> float:
        read = num_tasks * shape.prompt_tokens + num_attempts * shape.observed_tokens
        drawn = num_attempts * shape.turns * shape.reply_tokens
        return read / speed.read_tokens_per_s + drawn / speed.sample_tokens_per_s

    def learning_s(num_dialogues: float, num_updates: int) -> float:
        return num_dialogues * shape.total_tokens / speed.train_tokens_per_s + num_updates * speed.update_s

    env_s = (env_turn_s or 0.0) * shape.turns
    learned = tasks * (group_size or (2 if config.data.pairs else 1))
    tests = plan.num_eval_attempts
    return TimePlan(
        speed=speed,
        env_turn_s=env_turn_s,
        sampling_s=playing_s(tasks, tasks * group_size) if group_size else 0.0,
        env_s=env_s * tasks * group_size,
        training_s=learning_s(learned, train.substeps),
        evaluation_s=playing_s(tests / max(1, config.eval.samples), tests) + env_s * tests,
        warmup_s=learning_s(config.warmup.steps * config.warmup.batch_size, config.warmup.steps),
        num_steps=train.steps,
        longest_step_s=0.0,
        shape=shape,
        left_out=left_out,
    )


class _Trial:
    """A few attempts with scripted replies, in a thread of their own: an env that hangs must not stop the plan."""

    def __init__(self, parts: Parts, renderer: Renderer, scripts: Sequence[Sequence[DialogueTurn]]) -> None:
        self._parts = parts
        self._renderer = renderer
        self._scripts = scripts
        self.trajectories: list[Trajectory] = []
        self.turn_s: float | None = None
        self.why_not = ""

    def run(self) -> _Trial:
        if self._parts.config.cluster.env_workers:
            self.why_not = "workers play it"
            return self
        thread = threading.Thread(target=lambda: asyncio.run(self._play()), daemon=True)
        thread.start()
        thread.join(2 * ENV_S)
        if thread.is_alive():
            self.why_not = f"{NUM_TRIED} attempts took more than {2 * ENV_S:g} s"
            self.turn_s = None
        return self

    async def _play(self) -> None:
        try:
            await asyncio.wait_for(self._attempts(), ENV_S)
        except TimeoutError:
            self.why_not = self.why_not or f"{NUM_TRIED} attempts took more than {ENV_S:g} s"
        except Exception as cause:  # noqa: BLE001 - a plan says what it could not measure; the run tells the rest
            self.why_not = f"it failed: {cause}"

    async def _attempts(self) -> None:
        parts, seed = self._parts, 0
        spent_s, num_turns = 0.0, 0
        plain = tuple(self._renderer.encode_reply(assistant("ok")))
        for index, task in enumerate(parts.world.tasks("train", NUM_TRIED, seed)):
            script: Sequence[DialogueTurn] = self._scripts[index] if index < len(self._scripts) else ()
            replies = [turn.reply_ids for turn in script] or [plain] * min(4, parts.rollout.max_turns)
            rollout = parts.rollout.model_copy(update={"max_turns": min(len(replies), parts.rollout.max_turns)})
            attempt = Attempt(
                task_id=task.id, index=index, seed=seed, make_env=lambda task=task: parts.world.make_env(task, seed)
            )
            began_s = time.perf_counter()
            one = await play(attempt, ScriptedSampler(replies), self._renderer, rollout, RolloutStats())
            if one.failure is not None:
                self.why_not = f"an attempt failed by {one.failure.party}: {one.failure.detail}"
                return
            self.trajectories.append(one)
            if index:  # the first one also loads what all share
                spent_s += time.perf_counter() - began_s
                num_turns += max(1, len(one.turns))
        self.turn_s = spent_s / max(1, num_turns)


def _seconds(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 60 else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
