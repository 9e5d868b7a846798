"""`turnwise env serve TARGET`: a world as a service."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from turnwise.commands.check_env import parse_option
from turnwise.errors import ConfigError

DEFAULT_PORT = 8100

_EXAMPLES = """\
examples:
  turnwise env serve guess_number                              serve on http://127.0.0.1:8100, for this machine only
  turnwise env serve my_env.py:MyEnv max_turns=8 --max-envs 4
  TURNWISE_ENV_KEY=... turnwise env serve swe --host 0.0.0.0   serve other machines too; this needs a key
  turnwise train served:http://a:8100,http://b:8100            train on the world that a and b serve
"""


def add_parser(subparsers: Any) -> None:
    """Add `env` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "env",
        help="serve a world to runs on other machines",
        description="Serve a world over HTTP, so that its envs run outside the training process.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    serve = actions.add_parser(
        "serve",
        help="serve one world",
        description="Serve one world over HTTP. Train on it with `turnwise train env=served:http://HOST:PORT`.",
    )
    serve.add_argument("target", help="a shipped world, module:Class, path/to/file.py:Class or prefix:name")
    serve.add_argument("options", nargs="*", metavar="option=value", help="options of the world")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port (default {DEFAULT_PORT}; 0 takes any free port)"
    )
    serve.add_argument("--max-envs", type=int, default=64, metavar="N", help="most envs at the same time (default 64)")
    serve.add_argument(
        "--deadline", type=float, default=60.0, metavar="SECONDS", help="time for one call of an env (default 60)"
    )
    serve.add_argument(
        "--idle", type=float, default=600.0, metavar="SECONDS", help="close an env that nobody calls (default 600)"
    )


def run(options: argparse.Namespace) -> int:
    if options.action is None:
        options.parser.print_help()
        return 0
    try:
        from turnwise.env_service.run_server import make_served_world, serve_env
        from turnwise.env_service.server import EnvServerOptions
    except ImportError as cause:
        raise ConfigError(f"env serve needs {cause.name}: pip install 'turnwise[served]'") from cause
    from turnwise.envs.remote.workers import KEY_VARIABLE
    from turnwise.runtime.network import is_loopback, open_port

    key = os.environ.get(KEY_VARIABLE, "")
    if not key and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines in, and {KEY_VARIABLE} is not set; set it to a long random "
            "text here and where the run starts"
        )
    given = EnvServerOptions(
        env=options.target,
        options=dict(parse_option(text) for text in options.options),
        max_envs=options.max_envs,
        deadline_s=options.deadline,
        idle_s=options.idle,
        key=key,
    )
    world = make_served_world(given)
    try:
        listener = open_port(options.host, options.port, backlog=512)
    except (OSError, OverflowError) as cause:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {cause}") from cause
    with listener:
        host, port = listener.getsockname()[:2]
        print(f"env: {world.name}, up to {given.max_envs} envs, at http://{host}:{port}", file=sys.stderr, flush=True)
        serve_env(given, listener, world)
    return 0
