"""Makes the parts of a training loop from a config and what is known about the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwise.config.config import Config
from turnwise.config.critic import CriticConfig
from turnwise.credit.shaping import NO_SHAPING, Shaping
from turnwise.envs.base import Split, Task, World
from turnwise.envs.config import EnvConfig, OneWorld
from turnwise.envs.joint import JointWorld, leaf_of, leaves, wrap_leaves
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
from turnwise.training.demonstrations import has_scripts
from turnwise.training.objects import NO_OBJECTS, PythonObjects
from turnwise.training.task_order import CurriculumRules, CurriculumTasks, MixedTasks, TaskOrder, WorldTasks
from turnwise.training.workers import bounded_by_workers, make_played_world
from turnwise.types import AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a run needs besides its clients."""

    config: Config
    world: World
    tasks: TaskOrder
    """Training tasks, by the number of the group that plays one."""
    held_out: tuple[Task, ...]
    rollout: RolloutConfig
    """With the limits of the world; of several, with the most of each limit."""
    eval_rollout: RolloutConfig
    method: AnyMethod
    context_length: int
    """Most tokens that the model takes."""
    shaping: Shaping = NO_SHAPING
    limits: Mapping[str, RolloutConfig] = field(default_factory=dict[str, RolloutConfig])
    """For a run in several worlds: `rollout` with the limits of each world, by its name."""

    @property
    def needs_critic(self) -> bool:
        """The method learns from a critic's values."""
        return getattr(self.method, "needs_values", False)

    def rules(self, task: Task) -> RolloutConfig:
        """How a group is played at a task."""
        return self.limits.get(leaf_of(self.world, task.id), self.rollout)

    def eval_rules(self, task: Task) -> RolloutConfig:
        """How a held-out task is played."""
        limits = self.limits.get(leaf_of(self.world, task.id))
        return self.eval_rollout if limits is None else make_eval_rollout(self.config, limits)


def assemble(config: Config, facts: ModelFacts, objects: PythonObjects = NO_OBJECTS) -> Parts:
    """Make the world, the method and the limits of a run from its config.

    Args:
        objects: What the caller passed as Python objects in place of names in the config.
    """
    world = with_outcome_model(make_played_world(config, objects), config)
    for name, leaf in leaves(world).items() if config.warmup.steps else ():
        if not has_scripts(leaf):
            raise ConfigError(
                f"{name or leaf.name} has no scripted dialogues to warm up with; give the env class a method "
                "demonstrate() (docs/tutorials/demonstrations.md), or set warmup.steps=0"
            )
    if config.method.needs_critic and config.critic.pretrain_steps:
        check_pretraining(config.critic, world)
    rollout = bounded_by_workers(config.rollout.for_world(world, facts.context_length), world)
    held_out = held_out_tasks(config, world)
    if isinstance(world, JointWorld):
        world = world.kept_apart(held_out)
    return Parts(
        config=config,
        world=world,
        tasks=make_task_order(config, world),
        held_out=held_out,
        rollout=rollout,
        limits=leaf_limits(config, world, facts.context_length),
        eval_rollout=make_eval_rollout(config, rollout),
        method=make_method(config, rollout),
        context_length=facts.context_length,
        shaping=make_shaping(config),
    )


def with_outcome_model(world: World, config: Config) -> World:
    """The world with the score of `reward.model` in the rewards of its attempts; as it is where there is none."""
    if not config.reward.model:
        return world
    model = open_outcome_model(config.reward.model)
    return wrap_leaves(world, lambda inner: OutcomeWorld(inner=inner, model=model))


def check_pretraining(critic: CriticConfig, world: World) -> None:
    """Refuse a source of pre-training that does not exist, before anything is spent."""
    match critic.pretrain_from:
        case "rollouts":
            return
        case "demonstrations":
            for leaf in (leaf for leaf in leaves(world).values() if not has_scripts(leaf)):
                raise ConfigError(f"{leaf.name} has no scripted dialogues; set critic.pretrain_from=rollouts")
        case path:
            place = Path(path).expanduser()
            if not (is_run(place) or (place.suffix == ".jsonl" and place.is_file())):
                raise ConfigError(
                    f"critic.pretrain_from={path} is no run directory and no .jsonl file; expected one of them, or "
                    "rollouts, or demonstrations"
                )


def leaf_limits(config: Config, world: World, context_length: int) -> dict[str, RolloutConfig]:
    """For a run in several worlds: how each is played within its own limits, by its name. Empty for one world."""
    if not isinstance(world, JointWorld):
        return {}
    return {name: config.rollout.for_world(leaf, context_length) for name, leaf in leaves(world).items()}


def make_task_order(config: Config, world: World) -> TaskOrder:
    """Which training task each group of a run gets."""

    def is_allowed(task: Task) -> bool:
        return not (isinstance(world, JointWorld) and world.is_apart(task))

    return _order(config, config.env, world, lambda task: task, is_allowed)


def _order(
    config: Config, env: OneWorld, world: World, name_task: Callable[[Task], Task], allowed: Callable[[Task], bool]
) -> TaskOrder:
    """The order in which a world's tasks, or those of its parts, are trained on.

    Args:
        name_task: Gives a task of this world the id that it has in the run.
        allowed: Whether a task with that id may be trained on.
    """
    train, seed = config.train, derive_seed(config.train.seed, "tasks")
    if not isinstance(world, JointWorld):
        drawn = [name_task(task) for task in distinct_tasks(world, "train", train.num_tasks, seed)]
        tasks = [task for task in drawn if allowed(task)]
        if drawn and not tasks:
            raise ConfigError(f"every training task of {drawn[0].id} and its like is held out by another world")
        return WorldTasks(tasks, train.tasks_per_step, seed)

    def order_part(name: str, own: OneWorld) -> TaskOrder:
        return _order(config, own, world.parts[name], lambda task: name_task(world.joint_task(name, task)), allowed)

    if world.kind == "level":
        orders = {name: order_part(name, env) for name in world.parts}
        levels = {name: order for name, order in orders.items() if isinstance(order, WorldTasks)}
        return CurriculumTasks(levels, CurriculumRules.of(env), seed)
    assert isinstance(env, EnvConfig), "a mix is not a member of a mix"
    members = {name: order_part(name, env.mix[name]) for name in world.parts}
    return MixedTasks(members, {name: member.share for name, member in env.mix.items()})


def held_out_tasks(config: Config, world: World) -> tuple[Task, ...]:
    """The tasks of every evaluation of a run; the seed of the run draws them.

    Each member of a mix has as many as in a run of its own, and the same ones. The levels of a curriculum share them.
    """
    return tuple(_held_out(world, config.eval.tasks, derive_seed(config.train.seed, "tasks")))


def _held_out(world: World, count: int, seed: int) -> list[Task]:
    if not isinstance(world, JointWorld) or not count:
        return distinct_tasks(world, "test", count, seed)
    names = list(world.tested or world.parts)
    own = count if world.kind == "world" else max(1, count // len(names))
    return [world.joint_task(name, task) for name in names for task in _held_out(world.parts[name], own, seed)]


def distinct_tasks(world: World, split: Split, count: int, seed: int) -> list[Task]:
    """Up to `count` tasks without duplicates; a world may have fewer."""
    tasks: Sequence[Task] = world.tasks(split, count, seed) if count else ()
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
