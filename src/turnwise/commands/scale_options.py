"""The options of `turnwise scale`. This module imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

_EXAMPLES = """\
examples:
  turnwise scale runs/a                              before and after, 8 samples of every held-out task
  turnwise scale runs/a --samples 32 eval.tasks=200  more samples and tasks
  turnwise scale runs/a --orm orms/sql --json        also the best of k by an outcome model; numbers as JSON
  turnwise scale runs/a --critic                     the best of k by the critic of a run of ppo
  turnwise scale smollm2 --env search                a model as it is
"""


def add_commands(commands: Any) -> None:
    """Add the parser."""
    scale = commands.add_parser(
        "scale",
        help="draw success against samples, turns and tokens",
        description="Play held-out tasks several times, before and after training. Draw success against samples "
        "(pass@k, best of k, majority vote), turns and tokens, with 95 % intervals over tasks.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scale.add_argument("target", metavar="RUN|CHECKPOINT|MODEL", help="a run directory, a checkpoint or a model")
    scale.add_argument("overrides", nargs="*", metavar="section.key=value", help="options, such as eval.tasks=200")
    scale.add_argument("--env", metavar="NAME", help="the world (default: the world of the run)")
    scale.add_argument("--samples", type=int, default=8, metavar="N", help="attempts per task (default: %(default)s)")
    scale.add_argument("--orm", metavar="DIR", help="an outcome model, which picks the best of k")
    scale.add_argument("--critic", action="store_true", help="let the run's own critic pick the best of k")
    scale.add_argument("--out", default="scale.svg", metavar="FILE", help="the picture to write (default: %(default)s)")
    scale.add_argument(
        "--step", metavar="STEP", help="which checkpoint of a run: a step number, `best` (the default) or `last`"
    )
    scale.add_argument("--json", action="store_true", help="print one JSON object")


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    from turnwise.commands.scale import ScaleOptions, run_scale

    chosen = ScaleOptions(
        env=options.env,
        step=options.step,
        samples=options.samples,
        orm=options.orm,
        critic=options.critic,
        out=options.out,
        as_json=options.json,
    )
    return run_scale(options.target, options.overrides, chosen)
