"""Write code, read the tests, fix it: `turnwise.train` with an observer of one's own.

    python -m turnwise.recipes.code --model smollm2
    python -m turnwise.recipes.code --model tiny --warmup 2 --steps 2 --tasks 2 --held-out 4     # does it run?

`turnwise train code` trains the same world. The observer here adds a number that only this world has: of the attempts
whose first code failed a test that is shown, the share that was repaired after reading what the test said.
"""

import argparse

import turnwise
from turnwise.envs.library.code import Code
from turnwise.watch.terminal import LineView

BATCH_SIZE = 8


class RepairView(LineView):
    """One line per step, as usual, and the share of repaired attempts after each evaluation."""

    def __init__(self):
        super().__init__()
        self._repaired = []

    def attempt(self, step, phase, attempt):  # noqa: ARG002 - the signature of an observer
        turns = attempt.trajectory.turns
        answer = turns[0].observation[0].content if turns and turns[0].observation else ""
        if phase == "eval" and ", expected" in answer:
            self._repaired.append(bool(attempt.trajectory.is_success))

    def evaluation(self, row):
        super().evaluation(row)
        num_failed = len(self._repaired)
        share = sum(self._repaired) / max(num_failed, 1)
        self.message(f"held out ({row.label}): success {row.success:.2f}, repaired {share:.2f} of {num_failed}")
        self._repaired.clear()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model of the store, the hub or a directory")
    parser.add_argument(
        "--level", default="easy", choices=["easy", "medium", "hard", "mixed"], help="difficulty of the tasks"
    )
    parser.add_argument("--warmup", type=int, default=12, help=f"supervised steps of {BATCH_SIZE} dialogues")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--tasks", type=int, default=4, help="tasks per step (default 4)")
    parser.add_argument("--group", type=int, default=8, help="attempts per task")
    parser.add_argument("--held-out", type=int, default=32, help="held-out tasks to measure on")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="learning rate (default 2e-4)")
    parser.add_argument("--dir", default=None, help="where the run is kept; default: a new directory below runs/")
    options = parser.parse_args()
    turnwise.train(
        Code(level=options.level),
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
        observer=RepairView(),
    )


if __name__ == "__main__":
    main()
