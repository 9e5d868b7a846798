"""Somebody never answers: env, tool, sampler, trainer, disk, or code that blocks the loop. Training names the culprit
within its deadline and goes on or stops cleanly, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from command_line import run_module, start_cli
from turnwise.backends.local import LocalPublisher
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.client.futures import ApiFuture
from turnwise.config.config import Config
from turnwise.config.critic import CriticConfig
from turnwise.config.files import config_to_yaml
from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.envs.tools import Toolbox, tool
from turnwise.methods.ppo import Ppo
from turnwise.renderers import Renderer, get_renderer
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.writer import RunWriter
from turnwise.runtime.exit_codes import ExitCode
from turnwise.runtime.pending_calls import PENDING_CALLS
from turnwise.training.assemble import Parts, make_eval_rollout, make_method, make_optim
from turnwise.training.checkpoint import NEW_RUN, RunCheckpoints
from turnwise.training.critic import Critic
from turnwise.training.loop import Loop, LoopSetup
from turnwise.training.pretrain import pretrain
from turnwise.training.progress import NothingToLearnError
from turnwise.training.record import Recorder
from turnwise.training.task_order import WorldTasks
from turnwise.trajectory import Message, ToolCall
from turnwise.types import SampleRequest, SampleResponse
from turnwise.watch.interrupt import Interrupt
from turnwise.watch.terminal import LineView
from turnwise.watch.watchdog import StalledError, Watchdog

DEADLINE_S = 2.0
TOOL_DEADLINE_S = 0.3
ENV_CALLS = ("start", "step", "close", "tool")
TRAINER_CALLS = ("forward_backward", "optim_step", "save_state", "save_weights_and_get_sampling_client_async")


async def _never() -> Any:
    await asyncio.Event().wait()


class HangingWorld:
    """One reply, right or wrong by seed; the attempts at one task hang where they are told to."""

    name = "hanging"
    max_turns = 1
    max_tokens = 4

    def __init__(self, hang: str = "", *, every: int = 3) -> None:
        self.hang = hang
        self.every = every

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> HangingEnv:
        return HangingEnv(self.hang if task.data["index"] % self.every == 0 else "", seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class HangingEnv:
    def __init__(self, hang: str, seed: int) -> None:
        self._hang = hang
        self._is_right = seed % 2 == 0

    async def start(self) -> Sequence[Message]:
        if self._hang == "start":
            await _never()
        return [user("?")]

    async def step(self, reply: Message) -> EnvStep:  # noqa: ARG002
        if self._hang == "step":
            await _never()
        if self._hang == "tool":
            await Toolbox(_search).call(ToolCall(name="search", arguments={}))
        return EnvStep(reward=float(self._is_right), terminated=True, is_success=self._is_right)

    async def close(self) -> None:
        if self._hang == "close":
            await _never()


@tool(name="search", timeout_s=TOOL_DEADLINE_S)
async def _search() -> str:
    """Search."""
    return await _never()


class HangingSampler(ScriptedSampler):
    """Every third sample never comes."""

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        if len(self.prompts) % 3 == 2:
            self.prompts.append(list(request.prompt))
            return _no_answer()
        return super().submit(request)


class HangingTrainer(RecordingTrainer):
    """Never answers one kind of call, from its second on."""

    def __init__(self, sampler: ScriptedSampler, hang: str) -> None:
        super().__init__(sampler)
        self._hang = hang
        self._num_calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in TRAINER_CALLS and name == super().__getattribute__("_hang"):
            self._num_calls += 1
            if self._num_calls > 1:
                return (lambda *_, **__: _never()) if name.endswith("async") else (lambda *_, **__: _no_answer())
        return super().__getattribute__(name)


def _no_answer() -> ApiFuture[Any]:
    return ApiFuture(Future(), "an answer that never comes")


@pytest.fixture(scope="session")
def renderer(tiny_dir: Path) -> Renderer:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return get_renderer(loader.from_pretrained(str(tiny_dir)))


@dataclass
class Running:
    loop: Loop
    recorder: Recorder
    parts: Parts


def _run(directory: Path, renderer: Renderer, world: HangingWorld, trainer: RecordingTrainer, **train: Any) -> Running:
    settings = {"steps": 3, "tasks_per_step": 3, "save_every": 1, "max_empty_steps": 99, **train}
    generator = {"group_size": 4, "max_retries": 0, "step_deadline_s": DEADLINE_S}
    generator |= {"sample_deadline_s": DEADLINE_S, "min_group_size": 2, "same_start": False}
    config = Config.model_validate({"train": settings, "rollout": generator, "eval": {"tasks": 0}})
    rollout = config.rollout.for_world(world, 512).model_copy(update={"close_deadline_s": DEADLINE_S})
    parts = Parts(
        config=config,
        world=world,
        tasks=WorldTasks(world.tasks("train", 9, 0), config.train.tasks_per_step, 0),
        held_out=(),
        rollout=rollout,
        eval_rollout=make_eval_rollout(config, rollout),
        method=make_method(config, rollout),
        context_length=512,
    )
    writer = RunWriter.create(directory, config_to_yaml(config), max_size_mb=64)
    recorder = Recorder(writer, [LineView()], num_steps=config.train.steps)
    loop = Loop(
        LoopSetup(
            parts=parts,
            trainer=trainer,
            publisher=LocalPublisher(),
            renderer=renderer,
            recorder=recorder,
            checkpoints=RunCheckpoints(trainer, writer, NEW_RUN, max_kept=2),
        )
    )
    return Running(loop, recorder, parts)


def _sampler(renderer: Renderer, kind: type[ScriptedSampler] = ScriptedSampler) -> ScriptedSampler:
    return kind(lambda _: [7, 8, renderer.stop_ids[0]])


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("where", ENV_CALLS)
async def test_an_env_or_tool_that_never_answers_is_blamed_and_training_goes_on(
    where: str, lag: int, tmp_path: Path, renderer: Renderer
) -> None:
    running = _run(tmp_path, renderer, HangingWorld(where), RecordingTrainer(_sampler(renderer)), max_staleness=lag)
    await asyncio.wait_for(running.loop.run(), 120)
    running.recorder.close()
    with RunReader(tmp_path) as run:
        assert [step for step, _ in run.metric("time/step_s")] == [1, 2, 3]
        failed = [run.attempt(row.id).trajectory for row in run.attempts() if row.outcome == "failed"]
        blamed = {one.failure.party for one in failed if one.failure is not None}
        assert blamed == ({"tool"} if where == "tool" else set() if where == "close" else {"env"})
        name = "search" if where == "tool" else where
        assert all(name in one.failure.detail for one in failed if one.failure is not None)
        if where == "close":
            assert sum(value for _, value in run.metric("rollout/close_failures")) > 0
    assert len(PENDING_CALLS) == 0


async def test_a_sampler_that_never_answers_is_blamed_and_training_goes_on(tmp_path: Path, renderer: Renderer) -> None:
    sampler = _sampler(renderer, HangingSampler)
    running = _run(tmp_path, renderer, HangingWorld(), RecordingTrainer(sampler), max_staleness=1)
    await asyncio.wait_for(running.loop.run(), 120)
    running.recorder.close()
    with RunReader(tmp_path) as run:
        assert sum(value for _, value in run.metric("rollout/dropped_sampler_failed")) > 0
        assert [step for step, _ in run.metric("time/step_s")] == [1, 2, 3]


@pytest.mark.parametrize("where", TRAINER_CALLS)
async def test_a_trainer_that_never_answers_ends_the_run_with_its_name(
    where: str, tmp_path: Path, renderer: Renderer
) -> None:
    trainer = HangingTrainer(_sampler(renderer), where)
    running = _run(tmp_path, renderer, HangingWorld(), trainer, max_staleness=1, call_deadline_s=DEADLINE_S)
    with pytest.raises(StalledError, match=r"trainer: .* gave no answer within 2 s") as caught:
        await asyncio.wait_for(running.loop.run(), 120)
    running.recorder.close()
    assert caught.value.party == "trainer"
    assert len(PENDING_CALLS) == 0
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_critic_that_never_answers_while_it_learns_alone_is_named(tmp_path: Path, renderer: Renderer) -> None:
    class Silent:
        def forward(self, *_: Any) -> ApiFuture[Any]:
            return _no_answer()

    client: Any = Silent()
    parts = _run(tmp_path, renderer, HangingWorld(), RecordingTrainer(_sampler(renderer))).parts
    gae = Ppo.Options().make_gae()
    critic = Critic(
        client, CriticConfig(pretrain_steps=1), gae, make_optim(parts.config, 1e-3), renderer, max_tokens=64
    )
    arguments = (parts, renderer, _sampler(renderer), Interrupt(), Watchdog(call_deadline_s=DEADLINE_S))
    with pytest.raises(StalledError, match=r"critic: .* gave no answer within 2 s"):
        async for _ in pretrain(critic, *arguments):
            pass
    assert len(PENDING_CALLS) == 0


async def test_a_hundred_runs_with_hanging_parties_leave_no_process_thread_file_or_task_behind(
    tmp_path: Path, renderer: Renderer
) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def children() -> set[str]:
        return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

    parties = (*ENV_CALLS, "sampler", *TRAINER_CALLS, "")
    stalled: Counter[str] = Counter()

    async def run_once(number: int) -> None:
        where = parties[number % len(parties)]
        sampler = _sampler(renderer, HangingSampler if where == "sampler" else ScriptedSampler)
        trainer = HangingTrainer(sampler, where)
        world = HangingWorld(where, every=9)
        limits: dict[str, Any] = {"steps": 2, "max_staleness": number % 3}
        if where in TRAINER_CALLS:
            limits["call_deadline_s"] = DEADLINE_S
        running = _run(tmp_path / str(number), renderer, world, trainer, **limits)
        try:
            await running.loop.run()
        except StalledError:
            stalled[where] += 1
        except NothingToLearnError:  # on a busy machine a run this short may lose every attempt
            assert running.loop.done_step == running.loop.num_steps
        running.recorder.close()

    await run_once(1000)
    gc.collect()
    threads, files, processes = set(threading.enumerate()), open_files(), children()
    for first in range(0, 100, 20):
        await asyncio.gather(*(run_once(number) for number in range(first, first + 20)))
    gc.collect()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert set(threading.enumerate()) <= threads
    assert set(stalled) == set(TRAINER_CALLS), "only without its trainer does a run end"
    assert open_files() <= files
    assert children() <= processes
    assert len(PENDING_CALLS) == 0


BLOCKING_WORLD = """
import time
from turnwise.bench.slow_world import SlowEnv, SlowWorld

class Blocking(SlowEnv):
    async def step(self, reply):
        time.sleep(600)

class BlockingWorld(SlowWorld):
    def make_env(self, task, seed):
        return Blocking(self, seed)
"""


def _command(directory: Path, world: str, *options: str) -> subprocess.Popen[str]:
    small = ("model=tiny", "train.tasks_per_step=2", "rollout.group_size=2", "eval.tasks=0")
    more = ("train.max_empty_steps=1000", "train.call_deadline_s=3", "train.save_every=1", f"run.dir={directory}")
    return start_cli("train", world, *small, *more, *options)


@pytest.mark.usefixtures("tiny_dir")
def test_an_env_that_blocks_the_event_loop_is_shown_with_its_line_and_stopped(tmp_path: Path) -> None:
    file = tmp_path / "blocking.py"
    file.write_text(BLOCKING_WORLD)
    process = _command(tmp_path / "run", f"{file}:BlockingWorld")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.STALLED, out
    assert "the event loop has not come round" in out
    assert "blocking.py:7 step" in out


def _has_checkpoint(directory: Path) -> bool:
    if not is_run(directory):
        return False
    with RunReader(directory) as run:
        return bool(run.checkpoints())


@pytest.mark.usefixtures("tiny_dir")
def test_a_disk_that_does_not_take_a_step_is_named_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    quick = ("env.options.median_s=0.05", "env.options.p99_s=0.2", "train.steps=400")
    process = _command(directory, "turnwise.bench.slow_world:SlowWorld", *quick)
    while not _has_checkpoint(directory):
        assert process.poll() is None
        time.sleep(0.05)
    lock = sqlite3.connect(directory / "run.db", timeout=120)
    lock.execute("BEGIN IMMEDIATE")
    out, _ = process.communicate(timeout=120)
    lock.rollback()
    lock.close()
    assert process.returncode == ExitCode.STALLED, out
    assert "disk: " in out
    with RunReader(directory) as run:
        done = run.checkpoints()[-1].step
    run_module("turnwise.cli", "train", "--resume", str(directory), f"train.steps={done + 1}")
