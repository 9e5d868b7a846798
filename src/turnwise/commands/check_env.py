"""`turnwise check-env TARGET`: the conformance check from the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

from turnwise.envs.registry import SHIPPED_WORLDS, load_target
from turnwise.errors import ConfigError

_EXAMPLES = """\
examples:
  turnwise check-env guess_number
  turnwise check-env my_package.my_env:MyWorld
  turnwise check-env my_env.py:MyEnv max_turns=8
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `check-env` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check-env",
        help="check that your env keeps the rules",
        description="Check a world or an env against every rule, and say what is wrong and what to do.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shipped = ", ".join(SHIPPED_WORLDS)
    parser.add_argument("target", help=f"module:Class, path/to/file.py:Class, or a shipped world ({shipped})")
    parser.add_argument("options", nargs="*", metavar="option=value", help="options of the world")
    parser.add_argument("--tasks", type=int, default=3, metavar="N", help="tasks to play (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, envs and replies (default 0)")
    parser.add_argument(
        "--deadline", type=float, default=5.0, metavar="SECONDS", help="time limit for one call (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check and print; return 0 if the env keeps every rule, 1 if it breaks one."""
    from turnwise.envs.check import check_env

    if args.tasks < 1:
        raise ConfigError(f"--tasks {args.tasks}; expected at least 1")
    if args.deadline <= 0:
        raise ConfigError(f"--deadline {args.deadline:g}; expected more than 0 seconds")
    options = dict(parse_option(text) for text in args.options)
    target = load_target(args.target)
    report = check_env(target, options, num_tasks=args.tasks, seed=args.seed, deadline_s=args.deadline)
    print(json.dumps(report.to_json(), indent=2) if args.json else report)
    return 0 if report.is_ok else 1


def parse_option(text: str) -> tuple[str, Any]:
    """Read the value as JSON where it is JSON (`high=8`), else as text (`protocol=line`)."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{text!r}; expected option=value, such as high=8")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
