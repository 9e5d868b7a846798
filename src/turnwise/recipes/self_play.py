"""Tic-tac-toe learned by playing oneself, with the clients and one rollout function.

    python -m turnwise.recipes.self_play --model smollm2
    python -m turnwise.recipes.self_play --steps 5 --games 4        # `tiny`: does it run? It is too small to learn it

Two copies of the policy sit at each board. Every seat of every game is a trajectory of its own, with its own ids and
its own reward: 1, 0 or -1, and the two of a game add up to 0. A seat is compared with the same seat in the other games
of the same opening, so "X usually wins" is part of the baseline and not of the lesson. Both seats are trained.

How good the policy is cannot be seen in its games against itself, where somebody always loses. So it is measured
against an opponent that does not learn, on openings that were never trained on.

This recipe has a loop of its own: `turnwise.train` plays groups of attempts of one player each, and here the two seats
of a game are two trajectories that wait for each other (`rollout.self_play.play_games`).
"""

import argparse
import asyncio
import time

import turnwise
from turnwise import types
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.library.tic_tac_toe import TicTacToe
from turnwise.methods.base import datums_of
from turnwise.methods.grpo import Grpo
from turnwise.renderers import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout import RolloutConfig, play_groups
from turnwise.rollout.self_play import play_games


def make_rollout(group_size):
    return RolloutConfig(max_trajectory_tokens=512, group_size=group_size)


async def warm_up(trainer, renderer, world, steps, adam):
    """A few imitated games, so that replies are squares of the board at all."""
    games = [dialogue_to_turns(renderer, game) for game in world.demonstrations(8 * steps, seed=0)]
    datums = [dialogue_to_datums([(turn.prompt_ids, turn.reply_ids) for turn in game]) for game in games]
    for first in range(0, len(datums), 8):
        batch = [datum for game in weigh(datums[first : first + 8], token_mean) for datum in game]
        await trainer.forward_backward(batch, "cross_entropy")
        await trainer.optim_step(adam)


async def measure(sampler, renderer, world, num_games):
    """Share of games that are not lost, and of games that are won, against the scripted opponent."""
    tasks = world.tasks("test", num_games, seed=0)
    played = await play_groups(world, tasks, sampler, renderer, make_rollout(1), seed=0)
    games = [trajectory for group in played.groups for trajectory in group.trajectories]
    won = sum(game.metrics["win"] for game in games)
    return sum(game.is_success is True for game in games) / len(games), won / len(games)


async def train(trainer, renderer, world, options):
    adam = types.AdamParams(learning_rate=options.learning_rate)
    await warm_up(trainer, renderer, world, options.warmup, types.AdamParams(learning_rate=5e-3))
    method = Grpo(loss_fn="importance_sampling", loss_config={})
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    print(
        "after the warm-up: not lost {:.2f}, won {:.2f}".format(*await measure(sampler, renderer, world, 64)),
        flush=True,
    )
    for step in range(options.steps):
        openings = world.tasks("train", options.openings, seed=step)
        played = await play_games(world, openings, sampler, renderer, make_rollout(options.games), seed=step)
        kept = method.keep(played.groups)  # a seat that always won, or always lost, says nothing
        if kept.groups:
            await trainer.forward_backward(datums_of(method.lessons(kept.groups)), method.loss_fn, method.loss_config)
            await trainer.optim_step(adam)
            sampler = await trainer.save_weights_and_get_sampling_client_async()
        if (step + 1) % 10 == 0 or step + 1 == options.steps:
            said = played.stats.metrics()
            illegal, turns = said.get("rollout/env_illegal_mean", 0.0), said.get("rollout/turns_mean", 0.0)
            print(
                f"step {step + 1:3}  seats {len(kept.groups):2}  turns {turns:.1f}  illegal {illegal:.2f}", flush=True
            )
    return await measure(sampler, renderer, world, 64)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model of the store, the hub or a directory")
    parser.add_argument("--warmup", type=int, default=30, help="supervised steps of 8 games")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--openings", type=int, default=4, help="openings per step (default 4)")
    parser.add_argument("--games", type=int, default=8, help="games per opening, which make one group (default 8)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="learning rate (default 1e-3)")
    options = parser.parse_args()
    started_s = time.monotonic()
    service = turnwise.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=16, seed=0)
    renderer = get_renderer(trainer.get_tokenizer())
    not_lost, won = asyncio.run(train(trainer, renderer, TicTacToe(opponent="random"), options))
    print(f"after self-play:   not lost {not_lost:.2f}, won {won:.2f}  ({time.monotonic() - started_s:.0f} s)")
    service.close()


if __name__ == "__main__":
    main()
