"""The options of `turnwise orm`. This module imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

_EXAMPLES = """\
examples:
  turnwise orm train runs/a runs/b --out orms/sql                      a value head over whole attempts
  turnwise orm train runs/a --out orms/why kind=generative             a model that writes a reason and a verdict
  turnwise orm eval orms/sql runs/c                                    accuracy, F1 and calibration on another run
  turnwise orm best orms/sql runs/c                                    best of n by the outcome model
  turnwise train text_to_sql reward.model=orms/sql reward.weights.outcome=0

`turnwise orm train --help` lists the options of the training.
"""
_TRAIN_OPTIONS = (
    "kind, model, rank, steps, rl_steps, batch_size, learning_rate, rl_learning_rate, save_every, max_attempts, seed, "
    "max_chars, num_votes"
)


def add_commands(commands: Any) -> None:
    """Add the parser."""
    orm = commands.add_parser(
        "orm",
        help="train and measure outcome models, which score whole attempts",
        description="Train outcome models on the attempts of runs, measure them, and pick the best of n with them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = orm.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser(
        "train",
        help="train on runs, or on .jsonl files of labelled attempts",
        description="Train an outcome model on the attempts of runs, or on .jsonl files of labelled attempts. To "
        "continue a training that was stopped, repeat the command.",
    )
    train.add_argument(
        "words", nargs="+", metavar="RUN|FILE|option=value", help=f"what to learn from, and options: {_TRAIN_OPTIONS}"
    )
    train.add_argument("--out", required=True, metavar="DIR", help="the outcome model's directory")
    train.set_defaults(overrides=[])
    measure = actions.add_parser(
        "eval",
        help="compare with a verifier on attempts of other runs",
        description="Compare the verdicts of an outcome model with those of the verifier, on attempts of other runs.",
    )
    measure.add_argument("directory", metavar="DIR", help="an outcome model")
    measure.add_argument("sources", nargs="+", metavar="RUN|FILE", help="runs, or .jsonl files of labelled attempts")
    measure.add_argument("--json", action="store_true", help="print one JSON object")
    best = actions.add_parser(
        "best",
        help="success of the best of n attempts by the outcome model",
        description="Let an outcome model pick the best of n attempts at each task, and print how many of its picks "
        "succeed.",
    )
    best.add_argument("directory", metavar="DIR", help="an outcome model")
    best.add_argument("run", metavar="RUN", help="a run whose evaluations played several attempts (eval.samples)")
    best.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    from turnwise.commands import orm

    if options.action == "train":
        return orm.run_orm_train([*options.words, *options.overrides], options.out)
    if options.action == "eval":
        return orm.run_orm_eval(options.directory, options.sources, as_json=options.json)
    return orm.run_orm_best(options.directory, options.run, as_json=options.json)
