"""Measure how busy conversations with slow envs keep the sampler, against the same conversations with fast envs.

The bench runs the whole path of a training rollout: `play_groups`, the local client, the engine's worker and its
sampler. Wall time has three parts. *Busy*: the worker is inside `Sampler.step`. *Waiting*: a request is open but the
sampler does not step; this is the cost of the code between rollout and sampler. *Starved*: every conversation is in its
env, so there is nothing to sample. A step may itself wait for Python's lock, which event loop and envs sometimes hold;
`step_cpu_share` is the share of the busy time in which the worker's thread computed. The ideal is a simulation with the
same latencies, the same replies and the measured step times, without any cost between steps.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.bench.report import machine, model_directory
from turnwise.client.local import LocalSamplingClient, ServiceClient
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.errors import ConfigError
from turnwise.renderers import Renderer, get_renderer
from turnwise.rollout import RolloutConfig, RolloutResult, play_groups
from turnwise.trajectory import Message, Trajectory
from turnwise.types import SampleResponse

SEED = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model="tiny")
    parser.add_argument("--conversations", type=int, default=64, help="number of conversations at the same time")
    parser.add_argument("--turns", type=int, default=8, help="replies in each conversation")
    parser.add_argument("--reply", type=int, default=64, help="most tokens in each reply")
    parser.add_argument(
        "--latency-ms", type=float, default=200.0, help="longest time of an env call; times are uniform from 0"
    )
    parser.add_argument("--blocking", action="store_true", help="use envs with plain methods, each in a thread")


def run(args: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(device=args.device, dtype=args.dtype, seed=SEED, max_num_seqs=args.conversations)
    with ServiceClient(engine=config) as service:
        trainer = service.create_lora_training_client(str(model_directory(args.model)), rank=args.rank, seed=SEED)
        client = trainer.save_weights_and_get_sampling_client()
        engine = client._model.worker.engine
        check_fits(args, engine.max_context_length)
        renderer = get_renderer(client.get_tokenizer())
        slow, quick = [], []
        for index in range(args.warmups + args.repeats):
            for latency_s, runs in ((args.latency_ms / 1000, slow), (0.0, quick)):
                measured = measure(args, latency_s, client, engine, renderer)
                if index >= args.warmups:
                    runs.append(measured)
        device = machine(engine.device)
    kind = "plain envs in threads" if args.blocking else "async envs"
    late, at_once = _typical(slow), _typical(quick)
    return {
        "bench": "rollout",
        "model": args.model,
        "machine": device,
        "load": f"{args.conversations} conversations at once x {args.turns} turns x up to {args.reply} tokens; "
        f"{kind}, 0-{args.latency_ms:g} ms per call",
        **late,
        **{f"{key}_at_0_ms": value for key, value in at_once.items()},
        "tokens_per_s_ratio": late["tokens_per_s"] / at_once["tokens_per_s"],
    }


def check_fits(args: argparse.Namespace, context_length: int) -> None:
    needed = args.turns * (args.reply + 32)
    if needed > context_length:
        raise ConfigError(
            f"--turns {args.turns} x --reply {args.reply} takes up to {needed} tokens and {args.model} reads "
            f"{context_length}; give less of one of them"
        )


def _typical(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median run as a whole, so that its shares add up."""
    return sorted(runs, key=lambda run: run["sampler_busy_share"])[len(runs) // 2]


def measure(
    args: argparse.Namespace, latency_s: float, client: LocalSamplingClient, engine: Engine, renderer: Renderer
) -> dict[str, float]:
    """Play all conversations once, from an empty cache."""
    world = LateWorld(args.turns, args.reply, latency_s, is_blocking=args.blocking)
    config = RolloutConfig(
        max_turns=args.turns,
        max_tokens_per_turn=args.reply,
        max_trajectory_tokens=engine.max_context_length,
        group_size=1,
        min_group_size=1,
        max_concurrency=args.conversations,
    )
    client._model.worker.run("bench", lambda engine: engine.sampler.drop_cache()).result()
    watch = Watch()
    watched = WatchedClient(client, watch)
    step = engine.sampler.step

    def timed_step() -> None:
        num_rows, started_cpu_s, started_s = watch.num_in_flight, time.thread_time(), time.perf_counter()
        step()
        seconds, cpu_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
        watch.steps.append(MeasuredStep(seconds, cpu_s, num_rows))

    vars(engine.sampler)["step"] = timed_step
    try:
        tasks = world.tasks("train", args.conversations, SEED)
        gc.collect()  # do not count the garbage of loading
        started_s = time.perf_counter()
        played = asyncio.run(play_groups(world, tasks, watched, renderer, config, seed=SEED))
        ended_s = time.perf_counter()
    finally:
        del vars(engine.sampler)["step"]
    return figures(played, watch, ended_s - started_s, latency_s)


def figures(played: RolloutResult, watch: Watch, wall_s: float, latency_s: float) -> dict[str, float]:
    busy_s = sum(step.seconds for step in watch.steps)
    in_flight_s = watch.in_flight_s
    conversations = [conversation_of(trajectory, latency_s) for trajectory in played.stats.kept]
    assert not played.dropped, played.dropped[0]
    ideal = play_ideally(conversations, step_times(watch.steps))
    return {
        "sampler_busy_share": busy_s / wall_s,
        "waiting_share": max(0.0, in_flight_s - busy_s) / wall_s,
        "starved_share": 1 - max(in_flight_s, busy_s) / wall_s,
        "ideal_busy_share": ideal.busy_s / ideal.wall_s,
        "step_cpu_share": sum(step.cpu_s for step in watch.steps) / busy_s,
        "tokens_per_s": played.stats.num_drawn / wall_s,
        "ideal_tokens_per_s": sum(sum(own.replies) for own in conversations) / ideal.wall_s,
        "tokens_per_step": played.stats.num_drawn / len(watch.steps),
        "step_ms": 1000 * statistics.median(step.seconds for step in watch.steps),
        "wall_s": wall_s,
    }


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One call of `Sampler.step`."""

    seconds: float
    cpu_s: float
    num_in_flight: int
    """Number of open requests when the step began."""


@dataclass(slots=True)
class Watch:
    """The record of one rollout: steps on the worker's thread, requests on the event loop's thread."""

    steps: list[MeasuredStep] = field(default_factory=list[MeasuredStep])
    num_in_flight: int = 0
    in_flight_s: float = 0.0
    """Time with at least one open request."""
    since_s: float = 0.0

    def change(self, difference: int) -> None:
        now_s = time.perf_counter()
        if self.num_in_flight:
            self.in_flight_s += now_s - self.since_s
        self.num_in_flight += difference
        self.since_s = now_s


class WatchedClient(LocalSamplingClient):
    """A local client that counts open requests."""

    def __init__(self, client: LocalSamplingClient, watch: Watch) -> None:
        super().__init__(client._model, client._policy)
        self._watch = watch

    async def sample_async(self, *args: Any, **kwargs: Any) -> SampleResponse:
        self._watch.change(+1)
        try:
            return await super().sample_async(*args, **kwargs)
        finally:
            self._watch.change(-1)


@dataclass(frozen=True, slots=True)
class LateWorld:
    """A world whose envs say the same text every turn, after a delay."""

    max_turns: int
    max_tokens: int
    latency_s: float
    is_blocking: bool
    name: str = "slow"

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}") for index in range(count)]

    def make_env(self, task: Task, seed: int) -> Any:  # noqa: ARG002
        latencies = draw_latencies(seed, 1 + self.max_turns, self.latency_s)
        return (BlockingLateEnv if self.is_blocking else LateEnv)(latencies)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


def draw_latencies(seed: int, count: int, latency_s: float) -> list[float]:
    """The delays of `start` and of each `step` of the env with that seed."""
    rng = random.Random(f"latency {seed}")
    return [rng.uniform(0.0, latency_s) for _ in range(count)]


class LateEnv:
    def __init__(self, latencies: Sequence[float]) -> None:
        self._latencies = list(latencies)

    async def start(self) -> Sequence[Message]:
        await asyncio.sleep(self._latencies.pop(0))
        return [user("What next?")]

    async def step(self, reply: Message) -> EnvStep:  # noqa: ARG002
        await asyncio.sleep(self._latencies.pop(0))
        return self._answer()

    async def close(self) -> None:
        pass

    def _answer(self) -> EnvStep:
        return EnvStep(messages=[user("Go on.")]) if self._latencies else EnvStep(reward=1.0, terminated=True)


class BlockingLateEnv:
    """The same env with plain methods, as most envs have."""

    def __init__(self, latencies: Sequence[float]) -> None:
        self._latencies = list(latencies)

    def start(self) -> Sequence[Message]:
        time.sleep(self._latencies.pop(0))
        return [user("What next?")]

    def step(self, reply: Message) -> EnvStep:  # noqa: ARG002
        time.sleep(self._latencies.pop(0))
        return EnvStep(messages=[user("Go on.")]) if self._latencies else EnvStep(reward=1.0, terminated=True)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Conversation:
    """The latency of the start, and for each turn the tokens of the reply and the latency of the answer."""

    start_s: float
    replies: Sequence[int]
    answers_s: Sequence[float]


def conversation_of(trajectory: Trajectory, latency_s: float) -> Conversation:
    start_s, *answers_s = draw_latencies(trajectory.seed, 1 + len(trajectory.turns), latency_s)
    return Conversation(start_s, [len(turn.sampled_ids) for turn in trajectory.turns], answers_s)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step as base + each * (open replies), fitted to the measured steps."""

    base_s: float
    each_s: float

    def __call__(self, num_rows: int) -> float:
        return max(1e-6, self.base_s + self.each_s * num_rows)


def step_times(steps: Sequence[MeasuredStep]) -> StepTimes:
    rows = np.array([step.num_in_flight for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps])
    if rows.std() < 1:
        return StepTimes(float(seconds.mean()), 0.0)
    each_s = max(0.0, float(np.cov(rows, seconds, bias=True)[0, 1] / rows.var()))
    return StepTimes(float(seconds.mean() - each_s * rows.mean()), each_s)


@dataclass(frozen=True, slots=True)
class Ideal:
    busy_s: float
    wall_s: float


def play_ideally(conversations: Sequence[Conversation], seconds: StepTimes) -> Ideal:
    """Simulate the same conversations without any time between an env's answer, the next step and the next call."""
    waiting = [(conversation.start_s, index) for index, conversation in enumerate(conversations)]
    heapq.heapify(waiting)
    turn = [0] * len(conversations)
    left: dict[int, int] = {}
    now_s = busy_s = end_s = 0.0
    while waiting or left:
        if not left:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s:
            _, index = heapq.heappop(waiting)
            left[index] = conversations[index].replies[turn[index]]
        step_s = seconds(len(left))
        now_s, busy_s = now_s + step_s, busy_s + step_s
        for index in [index for index, count in left.items() if count == 1]:
            del left[index]
            answered_s = now_s + conversations[index].answers_s[turn[index]]
            turn[index] += 1
            if turn[index] < len(conversations[index].replies):
                heapq.heappush(waiting, (answered_s, index))
            end_s = max(end_s, answered_s)
        left = {index: count - 1 for index, count in left.items()}
    return Ideal(busy_s, max(end_s, now_s))
