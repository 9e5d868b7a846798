"""The options of `turnwise flywheel` and `turnwise pools`. This module imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from turnwise.rounds.tables import POOLS

COMMANDS = ("flywheel", "pools")

_FLYWHEEL_EXAMPLES = """\
examples:
  turnwise flywheel key_door_tiny                                 a shipped flywheel, on two CPU cores
  turnwise flywheel my.yaml flywheel.rounds=6 train.seed=1        a file with changed options
  turnwise flywheel my.yaml                                       go on with one that was stopped or killed
  turnwise pools runs/flywheel-key_door                           what its rounds did, and what is in its pools
  turnwise pools runs/flywheel-key_door --pool sft --where 'round = 2' --out sft.jsonl
"""


def add_commands(commands: Any) -> None:
    """Add the parsers."""
    flywheel = commands.add_parser(
        "flywheel",
        help="train in rounds on the model's own attempts",
        description="Train in rounds: play, judge, route attempts to pools, train, evaluate on fixed held-out tasks, "
        "retire solved tasks and propose harder ones. The same command goes on with a flywheel that was stopped.",
        epilog=_FLYWHEEL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flywheel.add_argument("file", metavar="FILE", help="a YAML file, or the name of a shipped flywheel")
    flywheel.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="options of the section flywheel, and every option of `turnwise train`",
    )
    pools = commands.add_parser(
        "pools",
        help="look at the pools of a flywheel, and export them",
        description="Show what the rounds of a flywheel did and what its pools hold, or write a pool to a file.",
    )
    pools.add_argument("directory", metavar="DIR", help="the directory of a flywheel")
    pools.add_argument("--pool", choices=POOLS, help="the pool to show or write")
    pools.add_argument(
        "--where", default="1", metavar="SQL", help="a condition on the columns, such as 'round = 2 AND score > 0.9'"
    )
    pools.add_argument("--out", metavar="FILE", help="write the pool to a .jsonl or .parquet file")


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    from turnwise.commands import flywheel

    if options.command == "flywheel":
        return flywheel.run_flywheel(options.file, options.overrides)
    return flywheel.run_pools(options.directory, options.pool, options.where, options.out)
