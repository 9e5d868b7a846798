"""Supervised steps on a world's scripted dialogues, so that reinforcement learning has something to reinforce.

Only the assistant's tokens are learned, through the same renderer that plays. The steps are counted apart from
training, and evaluated apart too.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.client.base import TrainingClient
from turnwise.config.training import WarmupConfig
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.base import World
from turnwise.renderers.base import Renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout.seeds import derive_seed
from turnwise.training.metrics import strip_reductions
from turnwise.training.task_order import ShuffledItems
from turnwise.types import AdamParams, Datum


def make_warmup(world: World, renderer: Renderer, config: WarmupConfig, seed: int) -> ShuffledItems[list[Datum]]:
    """The world's dialogues as datums, in batches."""
    dialogue_seed = derive_seed(seed, "demonstrations")
    datums = read_demonstrations(world, renderer, config.demonstrations, dialogue_seed)
    return ShuffledItems(datums, config.batch_size, dialogue_seed)


def read_demonstrations(world: World, renderer: Renderer, count: int, seed: int) -> list[list[Datum]]:
    """The world's dialogues; one dialogue may be several datums."""
    found: list[list[Datum]] = []
    for messages in world.demonstrations(count, seed):
        turns = [(turn.prompt_ids, turn.reply_ids) for turn in dialogue_to_turns(renderer, messages)]
        found.append(dialogue_to_datums(turns))
    return found


async def warm_up_step(
    trainer: TrainingClient, batch: Sequence[Sequence[Datum]], optim: AdamParams
) -> dict[str, float]:
    """One supervised step; the loss is the mean over the assistant's tokens."""
    datums = [datum for own in weigh(batch, token_mean) for datum in own]
    output = await trainer.forward_backward(datums, "cross_entropy")
    stepped = await trainer.optim_step(optim)
    metrics = strip_reductions({**output.metrics, **stepped.metrics})
    return {f"warmup/{key}": value for key, value in metrics.items()}
