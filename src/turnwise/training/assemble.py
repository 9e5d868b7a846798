"""A config and a model's sizes to the parts that the loop is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from turnwise.config.config import Config, EnvConfig, GeneratorConfig
from turnwise.credit.shaping import NO_SHAPING, Shaping
from turnwise.envs.base import Split, Task, World
from turnwise.envs.registry import get_world, world_options
from turnwise.errors import ConfigError
from turnwise.methods.base import MethodSetup
from turnwise.methods.config import METHOD_OPTIONS
from turnwise.methods.registry import AnyMethod, build_method
from turnwise.models.facts import ModelFacts
from turnwise.renderers import Renderer, get_renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import is_run
from turnwise.training.critic_config import CRITIC_METHODS, CriticConfig
from turnwise.training.task_order import Deck
from turnwise.types import AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a run needs besides its clients."""

    config: Config
    world: World
    tasks: Deck[Task]
    """Train tasks, in batches."""
    held_out: tuple[Task, ...]
    rollout: RolloutConfig
    eval_rollout: RolloutConfig
    method: AnyMethod
    shaping: Shaping = NO_SHAPING

    @property
    def needs_critic(self) -> bool:
        """The method learns from a critic's values."""
        return getattr(self.method, "needs_values", False)


def assemble(config: Config, facts: ModelFacts) -> Parts:
    world = make_world(config.env, config.generator)
    if config.warmup.steps and not world.demonstrations(1, 0):
        raise ConfigError(f"{world.name} has no scripted dialogues to warm up with; set warmup.steps=0")
    if config.method.name in CRITIC_METHODS and config.critic.pretrain_steps:
        check_pretraining(config.critic, world)
    limits = make_limits(config.generator, world, facts.context_length)
    rollout = make_rollout(config.generator, limits)
    train = config.train
    task_seed = derive_seed(train.seed, "tasks")
    return Parts(
        config=config,
        world=world,
        tasks=Deck(distinct_tasks(world, "train", train.num_tasks, task_seed), train.tasks_per_step, task_seed),
        held_out=tuple(distinct_tasks(world, "test", config.eval.tasks, task_seed)),
        rollout=rollout,
        eval_rollout=make_eval_rollout(config, rollout),
        method=make_method(config, limits),
        shaping=make_shaping(config),
    )


def check_pretraining(critic: CriticConfig, world: World) -> None:
    """Refuse a place to learn from that is not there, before anything is spent."""
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


def make_world(env: EnvConfig, generator: GeneratorConfig) -> World:
    """The world; a turn limit in the config also reaches a world that tells its players about it."""
    options = dict(env.options)
    if generator.max_turns and any(option.name == "max_turns" for option in world_options(env.name)):
        options.setdefault("max_turns", generator.max_turns)
    return get_world(env.name, **options)


def distinct_tasks(world: World, split: Split, count: int, seed: int) -> list[Task]:
    """At most `count` tasks, none twice; a world may have fewer."""
    tasks = world.tasks(split, count, seed) if count else []
    return list({task.id: task for task in tasks}.values())


def make_limits(generator: GeneratorConfig, world: World, context_length: int) -> RolloutLimits:
    wanted = generator.max_trajectory_tokens or context_length
    return RolloutLimits(
        max_turns=generator.max_turns or world.max_turns,
        max_tokens_per_turn=generator.sampling_params.max_generate_length or world.max_tokens,
        max_trajectory_tokens=min(wanted, context_length),
        attempt_deadline_s=generator.attempt_deadline_s,
        step_deadline_s=generator.step_deadline_s,
        sample_deadline_s=generator.sample_deadline_s,
    )


def make_rollout(generator: GeneratorConfig, limits: RolloutLimits) -> RolloutConfig:
    return RolloutConfig(
        limits=limits,
        group_size=generator.n_samples_per_prompt,
        min_group_size=min(generator.min_group_size, generator.n_samples_per_prompt),
        max_retries=generator.max_retries,
        same_start=generator.same_start,
        max_concurrency=generator.max_concurrency,
        temperature=generator.sampling_params.temperature,
        stop=generator.stop,
        on_unparsable=generator.on_unparsable,
        unparsable_penalty=generator.unparsable_penalty,
    )


def make_eval_rollout(config: Config, rollout: RolloutConfig) -> RolloutConfig:
    """The same play, at the evaluation's temperature. Nothing is centred: one attempt is a group, and several attempts
    at a task meet worlds of their own, which tell more of the task than one world met several times.
    """
    return dataclasses.replace(
        rollout,
        group_size=config.eval.samples,
        min_group_size=1,
        same_start=False,
        temperature=config.eval.temperature,
    )


def make_method(config: Config, limits: RolloutLimits) -> AnyMethod:
    return build_method(
        MethodSetup(
            config=config.method_in_use,
            data=config.data,
            group_size=config.generator.n_samples_per_prompt,
            max_turns=limits.max_turns,
            max_tokens=limits.max_turns * limits.max_tokens_per_turn,
            potential_weight=config.reward.weights.shaping if config.reward.potential else 0.0,
        )
    )


def make_shaping(config: Config) -> Shaping:
    """The rewards' section, with the discount that the method itself credits with."""
    reward, method = config.reward, config.method
    gamma = method.chosen("gamma") if "gamma" in METHOD_OPTIONS[method.name] else 1.0
    return Shaping(
        weights={channel: weight for channel, weight in reward.weights.model_dump().items() if weight != 1},
        potential_gamma=gamma if reward.potential else None,
        turn_decay=reward.turn_decay,
        max_length=reward.max_length,
        length_buffer=reward.length_buffer,
        length_penalty=reward.length_penalty,
        masks_truncated=reward.on_truncated == "mask",
    )


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


def make_renderer(tokenizer: Any, generator: GeneratorConfig) -> Renderer:
    return get_renderer(
        tokenizer,
        multi_turn=generator.use_conversation_multi_turn,
        name=generator.renderer,
        strip_thinking=generator.strip_thinking,
    )


def split_evenly(items: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """Consecutive shares whose sizes differ by at most one; empty ones are left out."""
    bounds = [round(part * len(items) / num_parts) for part in range(num_parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(bounds) if high > low]
