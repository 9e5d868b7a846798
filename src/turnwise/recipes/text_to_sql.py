"""Text to SQL from Python: a world with options of your choice, a warm-up, GRPO, and the result.

    python -m turnwise.recipes.text_to_sql --model smollm2
    python -m turnwise.recipes.text_to_sql --model tiny --warmup 2 --steps 2 --tasks 2 --held-out 4      # does it run?

`turnwise.train` does the work; this is what a script around it looks like, to be copied and changed: another database
(`TextToSql(path="spider")`), another reward (`reward=my_function`), another method (`method="rloo"`).
"""

import argparse

import turnwise
from turnwise.envs.library.text_to_sql import TextToSql

BATCH_SIZE = 8


def train(options):
    world = TextToSql(difficulty=options.difficulty, demonstration_skill=0.3, demonstration_mistakes=0.1)
    return turnwise.train(
        world,
        model=options.model,
        method="grpo",
        steps=options.steps,
        directory=options.dir,
        warmup={
            "steps": options.warmup,
            "demonstrations": BATCH_SIZE * max(options.warmup, 1),
            "batch_size": BATCH_SIZE,
        },
        train={"tasks_per_step": options.tasks, "learning_rate": options.learning_rate},
        rollout={"group_size": options.group, "max_trajectory_tokens": 1024},
        eval={"tasks": options.held_out, "every": 0},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of the store, the hub or a directory")
    parser.add_argument(
        "--difficulty", default="easy", choices=["easy", "medium", "hard", "mixed"], help="difficulty of the tasks"
    )
    parser.add_argument("--warmup", type=int, default=12, help=f"supervised steps of {BATCH_SIZE} dialogues")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--tasks", type=int, default=4, help="tasks per step (default 4)")
    parser.add_argument("--group", type=int, default=8, help="attempts per task")
    parser.add_argument("--held-out", type=int, default=32, help="held-out tasks to measure on")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="learning rate (default 2e-4)")
    parser.add_argument("--dir", default=None, help="where the run is kept; default: a new directory below runs/")
    with train(parser.parse_args()) as run:
        first, last = run.evaluations[0], run.evaluations[-1]
        solved = [row for row in run.attempts(phase="eval", step=last.step) if row.is_success]
        print(f"held-out success: {first.success:.2f} at the start, {last.success:.2f} at the end")
        if solved:
            print(f"one that was solved:\n{run.dialogue(solved[-1].id)}")
        print(f"the run is in {run.directory}")


if __name__ == "__main__":
    main()
