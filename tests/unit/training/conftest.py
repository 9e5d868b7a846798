"""A world of one question, a sampler that answers from a script, and everything that a loop needs around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.backends.local import LocalPublisher
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.config.config import Config
from turnwise.config.files import config_to_yaml
from turnwise.envs.base import EnvStep, Split, Task, assistant, user
from turnwise.renderers import Renderer, get_renderer
from turnwise.runlog.reader import RunReader
from turnwise.runlog.writer import RunWriter
from turnwise.training.assemble import Parts, make_eval_rollout, make_method
from turnwise.training.checkpoint import NEW_RUN, RunCheckpoints
from turnwise.training.learner_news import LearnerNews, OneLearner
from turnwise.training.loop import Loop, LoopSetup
from turnwise.training.record import Recorder
from turnwise.training.task_order import WorldTasks
from turnwise.trajectory import Message
from turnwise.watch.interrupt import Interrupt
from turnwise.watch.terminal import LineView

SMALL: dict[str, Any] = {
    "model": "tiny",
    "train": {"tasks_per_step": 1, "max_empty_steps": 1000, "save_every": 0},
    "rollout": {"group_size": 2, "max_turns": 1, "max_tokens_per_turn": 4},
    "eval": {"tasks": 0},
    "warmup": {"steps": 0},
}
"""Options of a run of the Python API that does as little as possible."""

CONTEXT_LENGTH = 512


@dataclass(frozen=True, slots=True)
class CoinWorld:
    """Every reply is right or wrong by the attempt's seed; `is_constant` makes all of them wrong, `is_easy` right."""

    name: str = "coin"
    max_turns: int = 1
    max_tokens: int = 4
    is_constant: bool = False
    is_easy: bool = False
    is_broken: bool = False
    """Every step raises."""

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> CoinEnv:  # noqa: ARG002
        return CoinEnv(is_right=self.is_easy or (seed % 2 == 0 and not self.is_constant), is_broken=self.is_broken)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return [[user("heads or tails?"), assistant("heads")]] * count


@dataclass(slots=True)
class CoinEnv:
    is_right: bool
    is_broken: bool = False

    async def start(self) -> Sequence[Message]:
        return [user("heads or tails?")]

    async def step(self, reply: Message) -> EnvStep:  # noqa: ARG002
        if self.is_broken:
            raise ValueError("no such coin")
        return EnvStep(reward=float(self.is_right), terminated=True, is_success=self.is_right)

    async def close(self) -> None:
        pass


@dataclass
class Rig:
    """A loop with test doubles, and what it leaves behind."""

    directory: Path
    renderer: Renderer
    world: CoinWorld = field(default_factory=CoinWorld)
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        end_id = self.renderer.stop_ids[0]
        self.trainer = RecordingTrainer(ScriptedSampler(lambda _: [7, 8, end_id]))
        self.interrupt = Interrupt()
        self.learners: LearnerNews = OneLearner()

    def loop(self) -> Loop:
        self.writer = RunWriter.create(self.directory, config_to_yaml(self.config), max_size_mb=64)
        recorder = Recorder(self.writer, [LineView()], num_steps=self.config.train.steps)
        return Loop(
            LoopSetup(
                parts=self.parts(),
                trainer=self.trainer,
                publisher=LocalPublisher(),
                renderer=self.renderer,
                recorder=recorder,
                checkpoints=RunCheckpoints(self.trainer, self.writer, NEW_RUN, max_kept=2),
                interrupt=self.interrupt,
                learners=self.learners,
            )
        )

    def parts(self) -> Parts:
        config = self.config
        rollout = config.rollout.for_world(self.world, CONTEXT_LENGTH)
        return Parts(
            config=config,
            world=self.world,
            tasks=WorldTasks(self.world.tasks("train", 6, 0), config.train.tasks_per_step, 0),
            held_out=tuple(self.world.tasks("test", config.eval.tasks, 0)),
            rollout=rollout,
            eval_rollout=make_eval_rollout(config, rollout),
            method=make_method(config, rollout),
            context_length=CONTEXT_LENGTH,
        )

    def run(self) -> RunReader:
        return RunReader(self.directory)

    def methods_called(self) -> list[str]:
        return [call.method for call in self.trainer.calls]


MakeRig = Callable[..., Rig]


@pytest.fixture(scope="session")
def renderer(tiny_dir: Path) -> Renderer:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return get_renderer(loader.from_pretrained(str(tiny_dir)))


@pytest.fixture
def make_rig(tmp_path: Path, renderer: Renderer) -> MakeRig:
    """`make_rig({"train": {"steps": 2}}, is_constant=True)`."""

    def make(sections: dict[str, dict[str, Any]], **world: Any) -> Rig:
        small: dict[str, dict[str, Any]] = {
            "train": {"steps": 2, "tasks_per_step": 2, "save_every": 0},
            "rollout": {"group_size": 12, "same_start": False},  # the coin falls for each by itself
            "eval": {"tasks": 3, "every": 0},
        }
        merged = {name: {**small.get(name, {}), **sections.get(name, {})} for name in {*small, *sections}}
        rig = Rig(tmp_path / "run", renderer, world=replace(CoinWorld(), **world))
        rig.config = Config.model_validate(merged)
        return rig

    return make
