"""`turnwise cluster`: what the processes of a run hold, send and would do on many devices, before anything is spent."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from turnwise.commands.cluster_simulate import add_simulate_parser, run_simulate

_EXAMPLES = """\
examples:
  turnwise cluster plan guess_number model=tiny cluster.learners=2 cluster.env_workers=4
  turnwise cluster plan my_run.yaml model.train=full cluster.learners=8 cluster.address=auto
  turnwise cluster plan guess_number --card 80 model=smollm2 cluster.learners=8 cluster.shard=true
  turnwise cluster simulate --from runs/NAME --devices 8,64,512,4096
"""


def add_parser(subparsers: Any) -> None:
    """Add `cluster` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cluster",
        help="plan or simulate a run on several processes and machines",
        description="Print where the processes of a run go and what they send, or how fast many devices would be.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    plan = actions.add_parser(
        "plan",
        help="print placement, memory and traffic of a run",
        description="Print where the processes of a run go, what they hold and what they send. Nothing is trained.",
    )
    plan.add_argument("name", help="a preset, a YAML file or a world, as for turnwise train")
    plan.add_argument(
        "--card",
        type=parse_card,
        metavar="GIB",
        help="plan for machines on which each engine has a GPU of this size, in place of this machine's device",
    )
    plan.add_argument("overrides", nargs="*", metavar="section.key=value", help="options of the run")
    add_simulate_parser(actions)


def parse_card(text: str) -> float:
    """GiB of a GPU, above 0."""
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected GiB of a GPU, such as 80")
    return gib


def run(options: argparse.Namespace) -> int:
    if options.action is None:
        options.parser.print_help()
        return 0
    if options.action == "simulate":
        return run_simulate(options)
    from turnwise.training.cluster_plan import cluster_lines, make_card
    from turnwise.training.setup import read_config, set_up_new

    setup = set_up_new(read_config(options.name, options.overrides))
    if options.card is not None:
        setup = replace(setup, card=make_card(options.card, setup.config.engine.dtype))
    print("\n".join([*setup.plan_lines(), "", *cluster_lines(setup)]))
    return 0
