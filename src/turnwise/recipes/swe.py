"""Expert iteration on repos: play, keep the attempts whose fix passed the hidden tests, learn them, play again.

    python -m turnwise.recipes.swe --model smollm2
    python -m turnwise.recipes.swe --model tiny --rounds 1 --tasks 2 --group 2 --warmup 1     # does it run?

The simplest way to learn from a reward that is rarely paid: no advantages, no ratios, only imitation of what worked.
That is the method `rft` of `turnwise.train`, and a round is one of its steps. `turnwise train swe` learns from the
failed attempts as well.
"""

import argparse
from pathlib import Path

import turnwise
from turnwise.envs.library.swe import Swe

BATCH_SIZE = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of the store, the hub or a directory")
    parser.add_argument("--tasks-file", default=None, help="tasks in the style of SWE-bench, instead of shipped bugs")
    parser.add_argument("--warmup", type=int, default=8, help=f"supervised steps of {BATCH_SIZE} scripted dialogues")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of play and training (default 8)")
    parser.add_argument("--tasks", type=int, default=8, help="tasks per round (default 8)")
    parser.add_argument("--group", type=int, default=4, help="attempts per task")
    parser.add_argument("--held-out", type=int, default=16, help="held-out tasks to measure on")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="learning rate (default 2e-4)")
    parser.add_argument("--dir", default=None, help="where the run is kept; default: a new directory below runs/")
    options = parser.parse_args()
    run = turnwise.train(
        Swe(path=Path(options.tasks_file)) if options.tasks_file else Swe(hint="line"),
        model=options.model,
        method="rft",
        steps=options.rounds,
        directory=options.dir,
        warmup={
            "steps": options.warmup,
            "demonstrations": BATCH_SIZE * max(options.warmup, 1),
            "batch_size": BATCH_SIZE,
        },
        train={"tasks_per_step": options.tasks, "learning_rate": options.learning_rate},
        rollout={"group_size": options.group, "max_trajectory_tokens": 1024, "max_concurrency": 8},
        eval={"tasks": options.held_out, "every": 0},
    )
    for step in range(1, options.rounds + 1):
        attempts = run.attempts(phase="train", step=step)
        print(f"round {step:2}  {sum(bool(row.is_success) for row in attempts)} of {len(attempts)} attempts fixed it")
    last = run.evaluations[-1]
    attempts = run.attempts(phase="eval", step=last.step)
    print(f"held out  {sum(bool(row.is_success) for row in attempts)} of {len(attempts)} repos fixed")


if __name__ == "__main__":
    main()
