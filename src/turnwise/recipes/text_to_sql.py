"""Text to SQL from a script: warm-up, play, learn, measure, with the clients and the rooms above them.

    python -m turnwise.recipes.text_to_sql --model smollm2
    python -m turnwise.recipes.text_to_sql --model tiny --warmup 2 --steps 2 --tasks 2 --held-out 4      # does it run?

`turnwise train text_to_sql` does the same with a run directory, checkpoints and certificates around it. This is the
loop itself, to be copied and changed: another database (`TextToSql(path="spider")`), another reward, another method.
"""

import argparse
import asyncio
import time

import turnwise
from turnwise import types
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.library.text_to_sql import TextToSql
from turnwise.methods.base import datums_of
from turnwise.methods.grpo import Grpo
from turnwise.renderers import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout import RolloutConfig, play_groups
from turnwise.rollout.stats import success_rate

BATCH_SIZE = 8


def make_rollout(group_size):
    return RolloutConfig(max_trajectory_tokens=1024, group_size=group_size, min_group_size=min(group_size, 2))


async def warm_up(trainer, renderer, world, steps, adam):
    """Imitate scripted dialogues; only the assistant's tokens are learned."""
    dialogues = [dialogue_to_turns(renderer, one) for one in world.demonstrations(BATCH_SIZE * steps, seed=0)]
    datums = [dialogue_to_datums([(turn.prompt_ids, turn.reply_ids) for turn in turns]) for turns in dialogues]
    for first in range(0, len(datums), BATCH_SIZE):
        batch = [datum for one in weigh(datums[first : first + BATCH_SIZE], token_mean) for datum in one]
        await trainer.forward_backward(batch, "cross_entropy")
        await trainer.optim_step(adam)


async def measure(sampler, renderer, world, num_tasks):
    """Success on databases that were never trained on."""
    tasks = world.tasks("test", num_tasks, seed=0)
    played = await play_groups(world, tasks, sampler, renderer, make_rollout(1), seed=0)
    return success_rate([trajectory for group in played.groups for trajectory in group.trajectories]) or 0.0


async def train(trainer, renderer, world, options):
    adam = types.AdamParams(learning_rate=options.learning_rate)
    await warm_up(trainer, renderer, world, options.warmup, types.AdamParams(learning_rate=1e-3))
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    print(f"held-out success after the warm-up: {await measure(sampler, renderer, world, options.held_out):.2f}")
    method = Grpo(loss_fn="importance_sampling", loss_config={})
    for step in range(options.steps):
        tasks = world.tasks("train", options.tasks, seed=step)
        played = await play_groups(world, tasks, sampler, renderer, make_rollout(options.group), seed=step)
        kept = method.keep(played.groups)  # a group that all solved, or nobody, says nothing
        if kept.groups:
            await trainer.forward_backward(datums_of(method.lessons(kept.groups)), method.loss_fn, method.loss_config)
            await trainer.optim_step(adam)
            sampler = await trainer.save_weights_and_get_sampling_client_async()
        said = played.stats.metrics()
        reward, success = said.get("rollout/reward_mean", 0.0), said.get("rollout/success_mean", 0.0)
        print(f"step {step + 1:3}  reward {reward:.2f}  success {success:.2f}  groups {len(kept.groups)}", flush=True)
    return await measure(sampler, renderer, world, options.held_out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of the store, the hub or a directory")
    parser.add_argument("--difficulty", default="easy", choices=["easy", "medium", "hard", "mixed"])
    parser.add_argument("--warmup", type=int, default=12, help=f"supervised steps of {BATCH_SIZE} dialogues")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=4, help="per step")
    parser.add_argument("--group", type=int, default=8, help="attempts per task")
    parser.add_argument("--held-out", type=int, default=32, help="held-out tasks to measure on")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    started_s = time.monotonic()
    world = TextToSql(difficulty=options.difficulty, demonstration_skill=0.3, demonstration_mistakes=0.1)
    service = turnwise.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=16, seed=0)
    renderer = get_renderer(trainer.get_tokenizer())
    success = asyncio.run(train(trainer, renderer, world, options))
    print(f"held-out success at the end:        {success:.2f}  ({time.monotonic() - started_s:.0f} s)")
    service.close()


if __name__ == "__main__":
    main()
