"""An agent that searches before it answers, with the retriever and a judge in the same process.

    python -m turnwise.recipes.search                            # tiny: shows the way in a minute, learns little
    python -m turnwise.recipes.search --model smollm2 --steps 20
    python -m turnwise.recipes.search --judge                    # right answers are also scored by the base model

The preset `search` says how to play and to learn; `turnwise.train` is given the world as an object, because a judge
may stand around it. The judge reads finished attempts only where the answer was right, and its score is a reward
channel of its own; where it gives none, the attempt is scored without it.
"""

import argparse

import turnwise
from turnwise.envs.registry import get_world
from turnwise.judges import EmbeddedModel, Judge, JudgeLimits, Rubric, judged

SHOWN = ("rollout/success_mean", "rollout/reward_mean", "rollout/reward_judge_mean")


def make_world(model, *, is_judged):
    """The world; with a judge, a right answer earns up to 0.2 more by the opinion of the model that training begins
    with. The run loads that model where its own is: there is no second copy of the weights."""
    world = get_world("search", kind="one_hop", max_turns=3)
    if not is_judged:
        return world
    rubric = Rubric(criteria="A good attempt searches once and answers in one or two words.")
    opinion = EmbeddedModel(model, max_tokens=48)
    return judged(world, Judge(opinion, rubric, limits=JudgeLimits(fallback="skip", max_tries=1)), weight=0.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model of the store, the hub or a directory")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default 5)")
    parser.add_argument("--warmup", type=int, default=4, help="supervised steps before training (default 4)")
    parser.add_argument("--eval-tasks", type=int, default=32, help="held-out tasks to measure on (default 32)")
    parser.add_argument("--judge", action="store_true", help="let the base model score right answers")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run (default 0)")
    parser.add_argument("--dir", default=None, help="where the run is kept; default: a new directory below runs/")
    options = parser.parse_args()
    run = turnwise.train(
        "search",
        env=make_world(options.model, is_judged=options.judge),
        model=options.model,
        steps=options.steps,
        directory=options.dir,
        warmup={"steps": options.warmup},
        train={"seed": options.seed, "learning_rate": 2e-4},
        rollout={"max_trajectory_tokens": 1000},
        eval={"tasks": options.eval_tasks, "every": 0},
    )
    for name in SHOWN:
        print(f"{name:28}", "  ".join(f"{value:.3f}" for _, value in run.metric(name)))
    for row in run.evaluations:
        print(f"held out, {row.label}: success {row.success:.3f}, reward {row.reward:.3f}")


if __name__ == "__main__":
    main()
