"""Tic-tac-toe learned by playing oneself: `turnwise.train` with both seats of a game trained.

    python -m turnwise.recipes.self_play --model smollm2
    python -m turnwise.recipes.self_play --steps 5 --games 4        # `tiny`: does it run? It is too small to learn it

Two copies of the policy sit at each board. Every seat of every game is an attempt of its own, with its own ids and its
own reward: 1, 0 or -1, and the two of a game add up to 0. A seat is compared with the same seat in the other games of
the same opening, so the baseline already holds that "X usually wins". Both seats are trained (docs/opponents.md).

How good the policy is cannot be seen in its games against itself, where somebody always loses. So evaluations play
against an opponent that does not learn, on openings that were never trained on. `turnwise train tic_tac_toe
env.options.opponent=self opponent.train=both opponent.panel=[random]` is the same in a shell.
"""

import argparse

import turnwise
from turnwise.envs.library.tic_tac_toe import TicTacToe

BATCH_SIZE = 8


def train(options):
    return turnwise.train(
        TicTacToe(opponent="self"),
        model=options.model,
        method="grpo",
        steps=options.steps,
        directory=options.dir,
        opponent={"train": "both", "panel": ["random"]},
        # A few imitated games, so that replies are squares of the board at all.
        warmup={
            "steps": options.warmup,
            "demonstrations": BATCH_SIZE * max(options.warmup, 1),
            "batch_size": BATCH_SIZE,
            "learning_rate": 5e-3,
        },
        train={"tasks_per_step": options.openings, "learning_rate": options.learning_rate},
        rollout={"group_size": options.games, "max_trajectory_tokens": 512},
        eval={"tasks": options.held_out, "every": 0},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model of the store, the hub or a directory")
    parser.add_argument("--warmup", type=int, default=30, help=f"supervised steps of {BATCH_SIZE} games")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--openings", type=int, default=4, help="openings per step (default 4)")
    parser.add_argument("--games", type=int, default=8, help="games per opening; each seat of them makes one group")
    parser.add_argument("--held-out", type=int, default=64, help="held-out openings to measure on")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="learning rate (default 1e-3)")
    parser.add_argument("--dir", default=None, help="where the run is kept; default: a new directory below runs/")
    with train(parser.parse_args()) as run:
        for row in run.evaluations:
            won = row.reward + 1 - row.success  # a win is worth 1, a loss -1, and success means not lost
            print(f"{row.label}: not lost {row.success:.2f}, won {won:.2f} against random moves")
        print(f"the run is in {run.directory}")


if __name__ == "__main__":
    main()
