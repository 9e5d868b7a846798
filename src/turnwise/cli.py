"""The `turnwise` command.

Each branch imports what it needs when it runs, so that `turnwise --help` is instant. A mistake that the user can fix is
a `TurnwiseError`: one message on stderr and exit code 2. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from turnwise import __version__
from turnwise.commands import arguments as train_cli
from turnwise.commands import check_env, cluster, data, env, view
from turnwise.commands import serve as service_cli
from turnwise.errors import TurnwiseError
from turnwise.retriever import cli as retriever_cli
from turnwise.runtime.exit_codes import ExitCode
from turnwise.runtime.suggest import did_you_mean
from turnwise.runtime.torchrun import refuse_torchrun

if TYPE_CHECKING:
    from turnwise.models.store import ModelRow

_EXAMPLES = """\
examples:
  turnwise train guess_number model=tiny  train on a world; add --plan to see the cost first
  turnwise view                           look at runs in a browser, live while they train
  turnwise eval runs/NAME                 measure a run on held-out tasks
  turnwise doctor runs/NAME               say why a run does not learn
  turnwise sample runs/NAME               chat with what a run trained
  turnwise model list                     list the models, and how to get missing ones
  turnwise model fetch smollm2            download a small chat model; no account needed
  turnwise model path smollm2             print its directory, for use in $(...)
  turnwise retriever serve --corpus FILE  answer the searches of agents over HTTP
  turnwise serve runs/a runs/b            serve trained policies to OpenAI clients and the Tinker and MinT SDKs
  turnwise bench sample --help            show the options of the sampling benchmark

Models are stored in $TURNWISE_HOME, or in ~/.cache/turnwise. `turnwise COMMAND --help` shows a command's options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        aliases, arguments = _take_aliases(arguments)
        with _aliased(aliases):
            return _run(arguments)
    except TurnwiseError as error:
        print(f"turnwise: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except BrokenPipeError:  # the reader closed the pipe, as in `turnwise ... | head`
        sys.stdout = None
        return ExitCode.BROKEN_PIPE
    except KeyboardInterrupt:
        print("turnwise: stopped", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _take_aliases(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take `--alias A=B` out of the arguments, at any position; returns the aliases and the other arguments."""
    parser = argparse.ArgumentParser(prog="turnwise", add_help=False, allow_abbrev=False)
    _add_alias_option(parser)
    options, rest = parser.parse_known_args(arguments)
    return options.alias, rest


@contextmanager
def _aliased(aliases: Sequence[str]) -> Iterator[None]:
    """Set aliases in the environment, where the model store and child processes look for them."""
    from turnwise.models.store import ALIASES_VARIABLE, parse_alias

    for text in aliases:
        parse_alias(text)
    before = os.environ.get(ALIASES_VARIABLE)
    if aliases:
        os.environ[ALIASES_VARIABLE] = ",".join([*([before] if before else []), *aliases])
    try:
        yield
    finally:
        if aliases:
            os.environ.pop(ALIASES_VARIABLE)
            if before is not None:
                os.environ[ALIASES_VARIABLE] = before


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    if arguments[:1] == ["bench"] and len(arguments) > 1 and arguments[1] not in ("-h", "--help"):
        from turnwise.bench.cli import main as bench_main  # it parses its own options

        return bench_main(arguments[1:]) or 0
    options = _parse(parser, arguments)
    if options.command not in (None, "train"):
        refuse_torchrun(f"turnwise {options.command}")
    if options.command in train_cli.COMMANDS:
        return train_cli.run_command(options)
    if options.command in service_cli.COMMANDS:
        return service_cli.run_command(options)
    if options.command == "check-env":
        return check_env.run(options)
    if options.command == "view":
        return view.run(options)
    if options.command == "env":
        return env.run(options)
    if options.command == "data":
        return data.run(options)
    if options.command == "cluster":
        return cluster.run(options)
    if options.command == "model":
        return _run_model(options)
    if options.command == "retriever":
        from turnwise.models.store import home

        return retriever_cli.run(options, default_cache=home() / "indexes")
    if options.command == "bench":
        options.parser.print_help()
        return 0
    parser.print_help()
    return 0


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments; overrides such as train.steps=5 may also come after options."""
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") or "=" not in text for text in rest)):
        hint = _as_overrides(rest) if hasattr(options, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _as_overrides(arguments: Sequence[str]) -> str:
    """How a flag such as `--steps 4` is written: `train.steps=4`; nothing if no option of a run is called like it."""
    from turnwise.config.files import option_paths

    flag, _, value = arguments[0].partition("=")
    name = flag.lstrip("-").replace("-", "_")
    found = [path for path in option_paths() if path == name or path.endswith(f".{name}")]
    if not flag.startswith("--") or not found:
        return ""
    value = value or next(iter(arguments[1:]), "VALUE")
    likeliest = min(found, key=lambda path: not path.startswith("train."))
    return f"; options of a run are written without dashes: {likeliest}={value}"


def _run_model(options: argparse.Namespace) -> int:
    from turnwise.models.store import fetch_model, list_models, resolve_model

    if options.action == "fetch":
        fetch_model(options.name, report=_say)
    elif options.action == "path":
        print(resolve_model(options.name, report=_say).directory)
    elif options.action == "list":
        _print_models(list_models())
    else:
        options.parser.print_help()
    return 0


def _say(line: str) -> None:
    """Print progress on stderr; stdout is for results that a script may read."""
    print(line, file=sys.stderr, flush=True)


def _print_models(rows: Sequence[ModelRow]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from turnwise.models.store import format_count, home

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "params", "size", "type", "context", "status", "description"):
        is_number = heading in ("params", "size", "context")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=heading != "description")
    for row in rows:
        table.add_row(
            escape(row.name),
            "" if row.num_parameters is None else format_count(row.num_parameters),
            "" if row.num_bytes is None else f"{row.num_bytes / 1e6:,.1f} MB",
            (row.architecture or "").removesuffix("ForCausalLM"),
            "" if row.context_length is None else str(row.context_length),
            "[green]ready[/green]" if row.is_ready else "[yellow]missing[/yellow]",
            row.description,
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\nstore: {home() / 'models'}", soft_wrap=True, markup=False)
    for row in rows:
        if not row.is_ready:
            console.print(f"{row.name} is missing: {row.how_to_get}", soft_wrap=True, markup=False)


class _Parser(argparse.ArgumentParser):
    """Answers a misspelt command with the nearest one, where argparse lists them all."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message)
        near = did_you_mean(found[1], re.findall(r"[\w-]+", found[2]), cutoff=0.6) if found else ""
        super().error(message if found is None or not near else f"{message[: found.start()]}no {found[1]!r}{near}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command but the benchmarks, which have their own."""
    parser = _Parser(
        prog="turnwise",
        description="Multi-turn reinforcement learning for LLM agents.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    _add_alias_option(parser)  # only for --help; `main` takes it before this parser runs
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    train_cli.add_commands(commands)
    check_env.add_parser(commands)
    env.add_parser(commands)
    cluster.add_parser(commands)
    data.add_parser(commands)
    service_cli.add_commands(commands)
    view.add_parser(commands)
    _add_model_commands(
        commands.add_parser(
            "model", help="download, list and find models", description="Download, list and find models."
        )
    )
    retriever_cli.add_parser(commands)
    bench = commands.add_parser(
        "bench",
        help="measure speed on this machine: sample, train, both, agreement, tree, branch, async, ...",
        description="Measure speed on this machine. `turnwise bench NAME --help` shows the options of one benchmark.",
    )
    bench.set_defaults(parser=bench)
    bench.add_argument(
        "benchmark",
        nargs="?",
        metavar="NAME",
        help="sample (tokens sampled per second), train (tokens trained per second), both (cost of switching between "
        "sampling and training), agreement (sampler and trainer logprobs), tree (shared prefixes), branch (branched "
        "dialogues), tenants (many adapters), speculation (guessed tokens), busy (a machine with other work), rollout "
        "(slow envs), async (training ahead of slow envs), sandbox (cost of the sandbox), service (cost of HTTP), "
        "learners (several processes that train), env-workers (several processes that play), simulation "
        "(cluster simulate against real runs), families (every model family against transformers), step (whole GRPO "
        "steps), worlds (an expert and a random policy in every world)",
    )
    return parser


def _add_model_commands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")

    fetch = actions.add_parser(
        "fetch",
        help="download or make a model of the store",
        description="Download or make a model and keep it in the store. No account is needed.",
    )
    fetch.add_argument("name", help="smollm2 (a 135M chat model) or tiny (random weights, for tests)")

    actions.add_parser(
        "list",
        help="list the models of the store, and how to get missing ones",
        description="List the models of the store, and how to get missing ones.",
    )

    path = actions.add_parser(
        "path",
        help="print the directory of a model",
        description="Print the directory of a model; a model of the hub is downloaded first.",
    )
    path.add_argument("name", help="a directory, a .gguf file, a name in the store or a name on the Hugging Face hub")


def _add_alias_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="A=B",
        help="use model B in place of model A; may be repeated (also TURNWISE_ALIASES=A=B,C=D)",
    )


if __name__ == "__main__":
    sys.exit(main())
