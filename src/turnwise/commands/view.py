"""`turnwise view`: look at runs in a browser, or write them into one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_EXAMPLES = """\
examples:
  turnwise view                              show the runs below ./runs
  turnwise view runs/a                       show one run
  turnwise view runs --port 9000             on a port of your choice
  turnwise view runs --export report.html    write one page that needs no server, to send to a colleague
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "view",
        help="look at runs in a browser, live while they train",
        description="Serve a local web page over run directories, live while they train: curves side by side, "
        "metrics, attempts, dialogues token by token. Runs are opened for reading only.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "place", nargs="?", default="runs", metavar="RUN|DIR", help="a run, or a directory with runs (default: runs)"
    )
    parser.add_argument("--export", metavar="FILE.html", help="write one self-contained page and serve nothing")
    parser.add_argument(
        "--attempts", type=int, default=100, metavar="N", help="with --export: most attempts per run (default 100)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, help="port to listen on (default: the first free one from 8642 on)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    from turnwise.errors import ConfigError

    place = Path(options.place).expanduser()
    if options.export is not None:
        from turnwise.view.export import export_page

        if options.attempts < 0:
            raise ConfigError(f"--attempts {options.attempts}; expected 0 or more")
        print(export_page(place, Path(options.export).expanduser(), num_attempts=options.attempts))
        return 0
    from turnwise.view.serve import ViewOptions, serve_view

    serve_view(ViewOptions(place=place, host=options.host, port=options.port, opens_browser=not options.no_browser))
    return 0
