"""Write code, read the tests, fix it: warm-up, play, learn, measure, with the clients and the rooms above them.

    python -m turnwise.recipes.code --model smollm2
    python -m turnwise.recipes.code --model tiny --warmup 2 --steps 2 --tasks 2 --held-out 4     # does it run?

`turnwise train code` does the same with a run directory and checkpoints around it. Besides success it prints how often
an attempt that did not pass at once was repaired after reading what the tests said.
"""

import argparse
import asyncio

import turnwise
from turnwise import types
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.library.code import Code
from turnwise.methods.base import datums_of
from turnwise.methods.grpo import Grpo
from turnwise.renderers import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout import RolloutConfig, play_groups

BATCH_SIZE = 8


def make_rollout(group_size):
    return RolloutConfig(max_trajectory_tokens=1024, group_size=group_size, min_group_size=min(group_size, 2))


async def warm_up(trainer, renderer, world, steps):
    dialogues = [dialogue_to_turns(renderer, one) for one in world.demonstrations(BATCH_SIZE * steps, seed=0)]
    datums = [dialogue_to_datums([(turn.prompt_ids, turn.reply_ids) for turn in turns]) for turns in dialogues]
    for first in range(0, len(datums), BATCH_SIZE):
        batch = [datum for one in weigh(datums[first : first + BATCH_SIZE], token_mean) for datum in one]
        await trainer.forward_backward(batch, "cross_entropy")
        await trainer.optim_step(types.AdamParams(learning_rate=1e-3))


async def measure(sampler, renderer, world, num_tasks):
    """Success on held-out problems, and of the attempts whose first code failed a shown test, the share repaired."""
    tasks = world.tasks("test", num_tasks, seed=0)
    played = await play_groups(world, tasks, sampler, renderer, make_rollout(1), seed=0)
    attempts = [trajectory for group in played.groups for trajectory in group.trajectories]
    answers = [one.turns[0].observation[0].content if one.turns[0].observation else "" for one in attempts]
    failed_first = [one for one, answer in zip(attempts, answers, strict=True) if ", expected" in answer]
    solved = sum(bool(one.is_success) for one in attempts) / max(len(attempts), 1)
    repaired = sum(bool(one.is_success) for one in failed_first) / max(len(failed_first), 1)
    return f"success {solved:.2f}, repaired {repaired:.2f} of {len(failed_first)}"


async def train(trainer, renderer, world, options):
    await warm_up(trainer, renderer, world, options.warmup)
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    print("held out, after the warm-up:", await measure(sampler, renderer, world, options.held_out), flush=True)
    method = Grpo(loss_fn="importance_sampling", loss_config={})
    for step in range(options.steps):
        tasks = world.tasks("train", options.tasks, seed=step)
        played = await play_groups(world, tasks, sampler, renderer, make_rollout(options.group), seed=step)
        kept = method.keep(played.groups)  # a group that all solved, or nobody, says nothing
        if kept.groups:
            await trainer.forward_backward(datums_of(method.lessons(kept.groups)), method.loss_fn, method.loss_config)
            await trainer.optim_step(types.AdamParams(learning_rate=options.learning_rate))
            sampler = await trainer.save_weights_and_get_sampling_client_async()
        success = played.stats.metrics().get("rollout/success_mean", 0.0)
        print(f"step {step + 1:3}  success {success:.2f}  groups {len(kept.groups)}", flush=True)
    print("held out, at the end:", await measure(sampler, renderer, world, options.held_out))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of the store, the hub or a directory")
    parser.add_argument("--level", default="easy", choices=["easy", "medium", "hard", "mixed"])
    parser.add_argument("--warmup", type=int, default=12, help=f"supervised steps of {BATCH_SIZE} dialogues")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=4, help="per step")
    parser.add_argument("--group", type=int, default=8, help="attempts per task")
    parser.add_argument("--held-out", type=int, default=32, help="held-out tasks to measure on")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    world = Code(level=options.level)
    service = turnwise.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=16, seed=0)
    asyncio.run(train(trainer, get_renderer(trainer.get_tokenizer()), world, options))
    service.close()


if __name__ == "__main__":
    main()
