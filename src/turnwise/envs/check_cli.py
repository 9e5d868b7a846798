"""`turnwise check-env TARGET`: the conformance check from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from turnwise.envs.registry import SHIPPED_WORLDS, load_target
from turnwise.errors import ConfigError

_EXAMPLES = """\
examples:
  turnwise check-env guess_number
  turnwise check-env my_package.my_env:MyWorld
  turnwise check-env my_env.py:MyEnv max_turns=8
"""


_ABOUT = "Check a world or an env against every rule, and say what is wrong and what to do."


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `check-env` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check-env",
        help="check that your env keeps the rules",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(SHIPPED_WORLDS)
    parser.add_argument("target", help=f"module:Class, path/to/file.py:Class, or a shipped world ({shipped})")
    parser.add_argument("options", nargs="*", metavar="option=value", help="options of the world")
    parser.add_argument("--tasks", type=int, default=3, metavar="N", help="tasks to play (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, envs and replies (default 0)")
    parser.add_argument(
        "--deadline", type=float, default=5.0, metavar="SECONDS", help="time limit for one call (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Check and print; return 0 if the env keeps every rule, 1 if it breaks one."""
    from turnwise.envs.check import check_env

    if args.tasks < 1:
        raise ConfigError(f"--tasks {args.tasks}; expected at least 1")
    if args.deadline <= 0:
        raise ConfigError(f"--deadline {args.deadline:g}; expected more than 0 seconds")
    options = dict(_parse_option(text) for text in args.options)
    target = load_target(args.target)
    report = check_env(target, options, num_tasks=args.tasks, seed=args.seed, deadline_s=args.deadline)
    print(json.dumps(report.to_json(), indent=2) if args.json else report)
    return 0 if report.is_ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command by itself: `main(["guess_number", "high=8"])`."""
    parser = argparse.ArgumentParser(
        prog="turnwise check-env",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    return run(parser.parse_args(sys.argv[1:] if argv is None else argv))


def _parse_option(text: str) -> tuple[str, Any]:
    """`high=8` is a number, `protocol=line` is text: JSON where it is JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{text!r}; expected option=value, such as high=8")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
