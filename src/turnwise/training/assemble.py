"""Makes the parts of a training loop from a config and what is known about the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnwise.config.config import Config
from turnwise.config.critic import CriticConfig
from turnwise.credit.shaping import NO_SHAPING, Shaping
from turnwise.envs.base import Split, Task, World
from turnwise.errors import ConfigError
from turnwise.memory.config import NO_MEMORY, MemoryConfig
from turnwise.memory.renderer import MemoryRenderer
from turnwise.methods.base import AnyMethod, MethodSetup
from turnwise.methods.lookup import check_method
from turnwise.methods.options import FreeLoss
from turnwise.models.facts import ModelFacts
from turnwise.outcomes import OutcomeWorld, open_outcome_model
from turnwise.renderers import Renderer, get_renderer
from turnwise.renderers.restart import RestartRenderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import is_run
from turnwise.training.objects import NO_OBJECTS, PythonObjects
from turnwise.training.workers import bounded_by_workers, make_played_world
from turnwise.types import AdamParams

T = TypeVar("T")


class ShuffledItems(Generic[T]):
    """An endless sequence of batches of the items, in shuffled passes: each item comes once before any comes again.

    A batch depends on its number and the seed alone, so a resumed run goes on with the very tasks that were next.
    """

    def __init__(self, items: Sequence[T], batch_size: int, seed: int) -> None:
        if not items:
            raise ConfigError("there is nothing to draw from")
        self._items = list(items)
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}
        """The order of the pass that was asked for last, by its number."""

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, index: int) -> list[T]:
        """The batch with that number, from 0. A batch may reach over the end of a pass."""
        first = index * self._batch_size
        return [self.item(position) for position in range(first, first + self._batch_size)]

    def item(self, position: int) -> T:
        """The item at that position, from 0, over all batches."""
        number, offset = divmod(position, len(self._items))
        if number not in self._orders:
            rng = np.random.default_rng(derive_seed(self._seed, "pass", number))
            self._orders = {number: rng.permutation(len(self._items))}
        return self._items[int(self._orders[number][offset])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a run needs besides its clients."""

    config: Config
    world: World
    tasks: ShuffledItems[Task]
    """Training tasks, in batches."""
    held_out: tuple[Task, ...]
    rollout: RolloutConfig
    eval_rollout: RolloutConfig
    method: AnyMethod
    context_length: int
    """Most tokens that the model takes."""
    shaping: Shaping = NO_SHAPING

    @property
    def needs_critic(self) -> bool:
        """The method learns from a critic's values."""
        return getattr(self.method, "needs_values", False)


def assemble(config: Config, facts: ModelFacts, objects: PythonObjects = NO_OBJECTS) -> Parts:
    """Args:
    objects: What the caller passed as Python objects in place of names in the config.
    """
    world = make_played_world(config, objects)
    if config.reward.model:
        world = OutcomeWorld(inner=world, model=open_outcome_model(config.reward.model))
    if config.warmup.steps and not world.demonstrations(1, 0):
        raise ConfigError(f"{world.name} has no scripted dialogues to warm up with; set warmup.steps=0")
    if config.method.needs_critic and config.critic.pretrain_steps:
        check_pretraining(config.critic, world)
    rollout = bounded_by_workers(config.rollout.for_world(world, facts.context_length), world)
    train = config.train
    task_seed = derive_seed(train.seed, "tasks")
    return Parts(
        config=config,
        world=world,
        tasks=ShuffledItems(
            distinct_tasks(world, "train", train.num_tasks, task_seed), train.tasks_per_step, task_seed
        ),
        held_out=held_out_tasks(config, world),
        rollout=rollout,
        eval_rollout=make_eval_rollout(config, rollout),
        method=make_method(config, rollout),
        context_length=facts.context_length,
        shaping=make_shaping(config),
    )


def check_pretraining(critic: CriticConfig, world: World) -> None:
    """Refuse a source of pre-training that does not exist, before anything is spent."""
    match critic.pretrain_from:
        case "rollouts":
            return
        case "demonstrations":
            if not world.demonstrations(1, 0):
                raise ConfigError(f"{world.name} has no scripted dialogues; set critic.pretrain_from=rollouts")
        case path:
            if not is_run(Path(path).expanduser()):
                raise ConfigError(
                    f"critic.pretrain_from={path} is no run directory; expected one, or rollouts, or demonstrations"
                )


def held_out_tasks(config: Config, world: World) -> tuple[Task, ...]:
    """The tasks of every evaluation of a run; the seed of the run draws them."""
    return tuple(distinct_tasks(world, "test", config.eval.tasks, derive_seed(config.train.seed, "tasks")))


def distinct_tasks(world: World, split: Split, count: int, seed: int) -> list[Task]:
    """Up to `count` tasks without duplicates; a world may have fewer."""
    tasks = world.tasks(split, count, seed) if count else []
    return list({task.id: task for task in tasks}.values())


def make_eval_rollout(config: Config, rollout: RolloutConfig) -> RolloutConfig:
    """The same play, at the evaluation's temperature. Nothing is centred: one attempt is a group, and several attempts
    at a task meet worlds of their own, which tell more of the task than one world met several times.
    """
    samples, temperature = config.eval.samples, config.eval.temperature
    changes = {"group_size": samples, "min_group_size": 1, "same_start": False, "temperature": temperature}
    return rollout.model_copy(update=changes)


def make_method(config: Config, limits: RolloutLimits) -> AnyMethod:
    options = config.method_in_use
    if isinstance(options, FreeLoss):
        options.check_outside_loss()
    method = options.build(
        MethodSetup(
            data=config.data,
            group_size=config.rollout.group_size,
            max_turns=limits.max_turns,
            max_tokens=limits.max_turns * limits.max_tokens_per_turn,
            potential_weight=config.reward.weights.shaping if config.reward.potential else 0.0,
        )
    )
    check_method(method, f"{type(options).__qualname__}.build(setup)")
    return method


def make_shaping(config: Config) -> Shaping:
    """The section `reward`, with the discount that the method credits with."""
    return Shaping(config.reward, gamma=config.method.discount if config.reward.potential else 1.0)


def make_optim(config: Config, learning_rate: float) -> AdamParams:
    train = config.train
    return AdamParams(
        learning_rate=learning_rate,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.eps,
        weight_decay=train.weight_decay,
        grad_clip_norm=train.grad_clip_norm,
    )


def critic_rate(config: Config) -> float:
    """The critic's full learning rate."""
    return config.critic.learning_rate or 2 * config.train.learning_rate


def make_renderer(tokenizer: Any, rollout: RolloutConfig, memory: MemoryConfig = NO_MEMORY) -> Renderer:
    renderer = RestartRenderer(
        get_renderer(
            tokenizer,
            multi_turn=rollout.use_conversation_multi_turn,
            name=rollout.renderer,
            strip_thinking=rollout.strip_thinking,
        )
    )
    return MemoryRenderer(renderer, memory) if memory.is_on else renderer


def split_evenly(items: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """Consecutive parts whose sizes differ by at most one; empty parts are left out."""
    bounds = [round(part * len(items) / num_parts) for part in range(num_parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(bounds) if high > low]
