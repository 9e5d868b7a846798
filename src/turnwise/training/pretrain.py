"""What is learned before the first step of training: the form of a dialogue by the policy, values by the critic.

**Warm-up.** Supervised steps on the world's scripted dialogues, so that reinforcement learning has something to
reinforce. Only the assistant's tokens are learned, through the same renderer that plays. The steps are counted and
evaluated apart from training.

**The critic alone** (VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118).
Batches of attempts come from one of three places: the policy as it is plays them, the world's scripted dialogues are
played again for their rewards, or a stored run has them. The policy learns nothing meanwhile. It ends after
`critic.pretrain_steps` batches, or when explained variance and loss, measured on each batch before it is learned,
have stopped to get better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.fake import ScriptedSampler
from turnwise.credit.shaping import shape_group
from turnwise.credit.weights import token_mean, weigh
from turnwise.errors import ConfigError
from turnwise.renderers.base import Renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout.group import Rollout
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.runtime.blocking import in_thread
from turnwise.training.assemble import Parts, make_optim
from turnwise.training.critic import Critic
from turnwise.training.demonstrations import Demonstrations, has_scripts, read_demonstrations
from turnwise.training.metrics import strip_reductions
from turnwise.training.stored import HeldOutTasks, read_critic_attempts
from turnwise.training.task_order import ShuffledItems
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import AdamParams, Datum
from turnwise.watch.interrupt import Interrupt
from turnwise.watch.watchdog import Watchdog

NUM_PLAYED = 8
"""Scripted dialogues that are played to see whether they earn anything."""


def read_lessons(parts: Parts, renderer: Renderer) -> Demonstrations:
    """What the warm-up shows."""
    count, seed = parts.config.warmup.demonstrations, _dialogue_seed(parts)
    return read_demonstrations(parts.world, renderer, count, seed, context_length=parts.context_length)


def batch_lessons(lessons: Demonstrations, parts: Parts) -> ShuffledItems[list[Datum]]:
    """What the warm-up shows, in batches."""
    return ShuffledItems(lessons.dialogues, parts.config.warmup.batch_size, _dialogue_seed(parts))


def _dialogue_seed(parts: Parts) -> int:
    return derive_seed(parts.config.train.seed, "demonstrations")


async def warm_up_step(
    trainer: TrainingClient, batch: Sequence[Sequence[Datum]], optim: AdamParams
) -> dict[str, float]:
    """One supervised step; the loss is the mean over the assistant's tokens."""
    datums = [datum for own in weigh(batch, token_mean) for datum in own]
    output = await trainer.forward_backward(datums, "cross_entropy")
    stepped = await trainer.optim_step(optim)
    metrics = strip_reductions({**output.metrics, **stepped.metrics})
    return {f"warmup/{key}": value for key, value in metrics.items()}


async def pretrain(
    critic: Critic,
    parts: Parts,
    renderer: Renderer,
    sampler: SamplingClient,
    interrupt: Interrupt,
    watchdog: Watchdog | None = None,
) -> AsyncGenerator[dict[str, float], None]:
    """Train the critic batch by batch; each gives its metrics. The policy is only sampled from."""
    watchdog = watchdog or Watchdog()
    config, batches = critic.config, Batches(parts, renderer, critic.config.pretrain_from)
    optim = make_optim(parts.config, config.pretrain_learning_rate)
    while not critic.is_pretrained:
        batch = await interrupt.unless(batches.batch(critic.num_pretrained, sampler))
        work = critic.study(batch.trajectories, optim)
        metrics = await watchdog.call("critic", "learn ahead of the policy", work)
        critic.num_pretrained += 1
        if critic.plateau.is_reached(metrics["explained_variance"], metrics["loss"]):
            critic.num_pretrained = config.pretrain_steps
        yield {**metrics, "attempts": float(len(batch.trajectories)), "sampled_tokens": float(batch.num_drawn)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticBatch:
    """What the critic learns from in one batch."""

    trajectories: Sequence[Trajectory]
    num_drawn: int = 0
    """Tokens that the policy drew for it, those of attempts that failed included."""


class Batches:
    """The attempts of each batch, by its number."""

    def __init__(self, parts: Parts, renderer: Renderer, source: str) -> None:
        self._parts = parts
        self._renderer = renderer
        self._source = source
        self._stored: ShuffledItems[Trajectory] | None = None

    @property
    def is_played(self) -> bool:
        """The clients that sample from the policy."""
        return self._source == "rollouts"

    async def batch(self, index: int, sampler: SamplingClient) -> CriticBatch:
        if self.is_played:
            return await self._play(index, sampler)
        if self._stored is None:
            config = self._parts.config
            is_script = self._source == "demonstrations"
            stored = await self._demonstrations() if is_script else self._read(self._source)
            rollout, train = self._parts.rollout, config.train
            self._stored = ShuffledItems(
                stored, rollout.group_size * train.tasks_per_step, derive_seed(train.seed, "critic")
            )
        return CriticBatch(trajectories=self._stored.batch(index))

    def _read(self, source: str) -> list[Trajectory]:
        parts = self._parts
        return read_critic_attempts(source, parts.config, HeldOutTasks(parts.config, parts.held_out))

    async def _play(self, index: int, sampler: SamplingClient) -> CriticBatch:
        parts = self._parts
        count, rollout = parts.config.train.tasks_per_step, Rollout(parts.world, sampler, self._renderer, parts.rollout)
        rollout.rules = parts.rules
        tasks = [parts.tasks.spread(position) for position in range(index * count, (index + 1) * count)]
        played = await rollout.play(tasks, seed=derive_seed(parts.config.train.seed, "critic", index))
        groups = [shape_group(group, parts.shaping) for group in played.groups]
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories:
            raise ConfigError(
                f"no attempt of batch {index + 1} can be learned from; did the world {parts.world.name} fail?"
            )
        return CriticBatch(trajectories=trajectories, num_drawn=played.stats.num_drawn)

    async def _demonstrations(self) -> list[Trajectory]:
        """The world's scripted dialogues with the rewards that its envs give them."""
        parts = self._parts
        if not await in_thread(lambda: has_scripts(parts.world)):
            raise ConfigError(f"{parts.world.name} has no scripted dialogues; set critic.pretrain_from=rollouts")
        found = await play_demonstrations(parts, self._renderer, parts.config.warmup.demonstrations)
        if not found:
            raise ConfigError(
                f"a dialogue of {parts.world.name} does not belong to its task, so its rewards are unknown; set "
                "critic.pretrain_from=rollouts"
            )
        played = [one for one in found if one.failure is None]
        if not played:
            raise ConfigError(f"no scripted dialogue of {parts.world.name} can be played: {found[0].failure}")
        group = TrajectoryGroup(task_id="demonstrations", trajectories=tuple(played))
        return list(shape_group(group, parts.shaping).trajectories)


async def play_demonstrations(parts: Parts, renderer: Renderer, count: int = NUM_PLAYED) -> list[Trajectory]:
    """The world's scripted dialogues, played for their rewards; none if one of them does not belong to its task."""
    seed = _dialogue_seed(parts)
    dialogues = await in_thread(lambda: parts.world.demonstrations(count, seed))
    tasks = parts.world.tasks("train", count, seed)
    found: list[Trajectory] = []
    for index, (task, dialogue) in enumerate(zip(tasks, dialogues, strict=False)):
        replies = [turn.reply_ids for turn in dialogue_to_turns(renderer, dialogue)]
        attempt = Attempt(
            task_id=task.id, index=index, seed=seed, make_env=lambda task=task: parts.world.make_env(task, seed)
        )
        rollout = parts.rules(task).model_copy(update={"max_turns": len(replies)})
        one = await play(attempt, ScriptedSampler(replies), renderer, rollout, RolloutStats())
        if list(one.start) != list(dialogue[: len(one.start)]):
            return []
        found.append(one)
    return found
