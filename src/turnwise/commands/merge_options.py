"""The options of `turnwise merge`. This module imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

_EXAMPLES = """\
examples:
  turnwise merge runs/sql=0.5 runs/search=0.5 --out merged               half of each adapter's change
  turnwise merge runs/a=1 adapters/b=1 --out both                        the sum of both changes
  turnwise merge runs/a=0.7 runs/b=0.3 --method slerp --out merged       full weights (model.train=full)
  turnwise merge runs/a runs/b --search 5 --env search --env key_door --out merged
  turnwise eval merged --env text_to_sql                                 measure the result
"""


def add_commands(commands: Any) -> None:
    """Add the parser."""
    merge = commands.add_parser(
        "merge",
        help="merge what several runs trained on one base model",
        description="Merge runs, checkpoints or PEFT adapters of one base model. Adapters are summed exactly: the "
        "result has the sum of their ranks. Full weights become a Hugging Face model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument(
        "parts", nargs="+", metavar="RUN=WEIGHT", help="a run, a checkpoint or an adapter, and its weight"
    )
    merge.add_argument("--out", required=True, metavar="DIR", help="the new directory to write")
    merge.add_argument(
        "--method",
        choices=("sum", "slerp", "ties"),
        default="sum",
        help="sum adds the weighted changes; slerp and ties are for full weights (default: %(default)s)",
    )
    merge.add_argument(
        "--density", type=float, metavar="SHARE", help="share of each tensor's changes that ties keeps (default: 0.2)"
    )
    merge.add_argument(
        "--step", metavar="STEP", help="which checkpoint of the runs: a step number, `best` (the default) or `last`"
    )
    merge.add_argument(
        "--search", type=int, default=0, metavar="N", help="try N weights from 0 to 1 for each part, which sum to 1"
    )
    merge.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="a world to search the weights by; may be repeated"
    )
    merge.set_defaults(overrides=[])


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    from turnwise.commands.merge import SearchOptions, run_merge
    from turnwise.errors import ConfigError
    from turnwise.training.merge import MergeOptions

    if options.density is not None and options.method != "ties":
        raise ConfigError(f"--density is read by --method ties; {options.method} does not use it")
    chosen = MergeOptions(method=options.method, density=0.2 if options.density is None else options.density)
    search = SearchOptions(points=options.search, worlds=tuple(options.env))
    return run_merge([*options.parts, *options.overrides], options.out, options.step, chosen, search)
