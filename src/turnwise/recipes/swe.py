"""Expert iteration on repos: play, keep the attempts whose fix passed the hidden tests, learn them, play again.

    python -m turnwise.recipes.swe --model smollm2
    python -m turnwise.recipes.swe --model tiny --rounds 1 --tasks 2 --group 2 --warmup 1     # does it run?

The simplest way to learn from a reward that is rarely paid: no advantages, no ratios, only imitation of what worked.
`turnwise train swe` learns from the failed attempts as well.
"""

import argparse
import asyncio
from pathlib import Path

import turnwise
from turnwise import types
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.library.swe import Swe
from turnwise.renderers import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout import RolloutConfig, play_groups

BATCH_SIZE = 4


async def learn(trainer, dialogues, learning_rate):
    """Imitate dialogues, given as lists of (prompt ids, reply ids); the replies alone are learned."""
    datums = [dialogue_to_datums(pairs) for pairs in dialogues]
    for first in range(0, len(datums), BATCH_SIZE):
        batch = [datum for one in weigh(datums[first : first + BATCH_SIZE], token_mean) for datum in one]
        await trainer.forward_backward(batch, "cross_entropy")
        await trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
    return await trainer.save_weights_and_get_sampling_client_async()


async def play(world, split, num_tasks, sampler, renderer, group_size, seed):
    """Attempts at some tasks, all in one list."""
    config = RolloutConfig(max_trajectory_tokens=1024, group_size=group_size, min_group_size=1, max_concurrency=8)
    played = await play_groups(world, world.tasks(split, num_tasks, seed), sampler, renderer, config, seed=seed)
    return [trajectory for group in played.groups for trajectory in group.trajectories]


async def train(trainer, renderer, world, options):
    shown = [dialogue_to_turns(renderer, one) for one in world.demonstrations(BATCH_SIZE * options.warmup, seed=0)]
    shown = [[(turn.prompt_ids, turn.reply_ids) for turn in turns] for turns in shown]
    sampler = await learn(trainer, shown, 1e-3)
    for number in range(options.rounds):
        attempts = await play(world, "train", options.tasks, sampler, renderer, options.group, seed=number)
        fixed = [one for one in attempts if one.is_success]
        print(f"round {number + 1:2}  {len(fixed)} of {len(attempts)} attempts fixed the repo", flush=True)
        dialogues = [[(turn.prompt_ids, turn.sampled_ids) for turn in one.turns] for one in fixed]
        sampler = await learn(trainer, dialogues, options.learning_rate) if dialogues else sampler
    held_out = await play(world, "test", options.held_out, sampler, renderer, 1, seed=0)
    print(f"held out  {sum(bool(one.is_success) for one in held_out)} of {len(held_out)} repos fixed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of the store, the hub or a directory")
    parser.add_argument("--tasks-file", default=None, help="tasks in the style of SWE-bench, instead of shipped bugs")
    parser.add_argument("--warmup", type=int, default=8, help=f"supervised steps of {BATCH_SIZE} scripted dialogues")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=8, help="per round")
    parser.add_argument("--group", type=int, default=4, help="attempts per task")
    parser.add_argument("--held-out", type=int, default=16, help="held-out tasks to measure on")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    world = Swe(path=Path(options.tasks_file)) if options.tasks_file else Swe(hint="line")
    service = turnwise.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=16, seed=0)
    asyncio.run(train(trainer, get_renderer(trainer.get_tokenizer()), world, options))
    service.close()


if __name__ == "__main__":
    main()
